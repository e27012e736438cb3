"""Packing: several rollouts on one token axis, and which hidden row scores which output token.

A rollout with prompt [a b] and output [x y z] goes through the policy as four tokens; the row at a
position predicts the token after it, so the rows of b, x and y score x, y and z::

    input_ids     a  b  x  y
    position_ids  0  1  2  3
    scores           x  y  z

The next rollout follows with positions from 0 again; attention never crosses that border.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replay.padded import PaddedBatch, with_tensors
from rollout.record import Rollout

Item = TypeVar("Item")

IN_BOTH_FORMS = (
    "number",
    "rollout_ids",
    "targets",
    "rollout_index",
    "support_ids",
    "support_offsets",
    "sampling_logprobs",
    "loss_mask",
    "temperature",
)


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """B whole rollouts as N input tokens, and the T sampled output tokens to score.

    `policy(input_ids, position_ids)[hidden_rows]` are the T hidden states that `score_support`
    takes with the targets and supports; forced tokens are input like any other and have no row
    there. `advantages[rollout_index]` spreads one number per rollout over its scored tokens.

    A batch without rollouts (`batches` makes them where ranks would get unequal numbers) has one
    input token, id 0, that nothing scores: the policy runs, and every gradient is zero.
    """

    number: int  # from 0 in its pass
    rollout_ids: tuple[str, ...]  # B
    input_ids: Tensor  # [N] int64
    position_ids: Tensor  # [N] int64, from 0 in each rollout
    cu_seqlens: Tensor  # [B + 1] int32: where rollouts begin in input_ids, and N; [0, 1] if B = 0
    max_seqlen: int  # input tokens of the longest rollout
    hidden_rows: Tensor  # [T] int64: the input position that predicts each scored token
    targets: Tensor  # [T] int64
    rollout_index: Tensor  # [T] int64: place in rollout_ids
    support_ids: Tensor  # [E] int32
    support_offsets: Tensor  # [T + 1] int64, from 0
    sampling_logprobs: Tensor  # [T] float32
    loss_mask: Tensor  # [T] bool: train on it
    temperature: Tensor  # [T] float32

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        """The same batch with its tensors on `device`; `non_blocking` needs pinned memory."""
        return with_tensors(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedBatch:
        """The same batch in pinned memory; `DataLoader(pin_memory=True)` calls it."""
        return with_tensors(self, Tensor.pin_memory)

    def padded(self) -> PaddedBatch:
        """The same rollouts as [B, L], padded on the right; pinned if this is."""
        lengths, longest = self.cu_seqlens.diff(), self.max_seqlen
        rows = torch.repeat_interleave(lengths, output_size=len(self.input_ids))
        places = rows * longest + self.position_ids  # in the flat [B * L]
        at = torch.arange(longest, device=places.device)
        attention_mask = (at < lengths[:, None]).long()
        input_ids = places.new_zeros(len(lengths) * longest).index_copy_(0, places, self.input_ids)
        made = PaddedBatch(
            input_ids=input_ids.view(len(lengths), longest),
            attention_mask=attention_mask,
            position_ids=at * attention_mask,
            hidden_rows=places[self.hidden_rows],
            **{name: getattr(self, name) for name in IN_BOTH_FORMS},
        )
        return made.pin_memory() if self.input_ids.is_pinned() else made


def pack(rollouts: Iterable[Rollout], max_tokens: int) -> Iterator[PackedBatch]:
    """Batches of at most `max_tokens` input tokens, in order; a longer rollout is alone in its own.

    Forced tokens are input like any other but are not scored.
    """
    for number, together in enumerate(group(rollouts, num_input_tokens, max_tokens)):
        yield assemble(parts_of(together), number)


def num_input_tokens(rollout: Rollout) -> int:
    """Tokens that go through the policy: the last output token predicts nothing we score."""
    return len(rollout.prompt_ids) + max(rollout.num_output_tokens, 1) - 1


def group(
    items: Iterable[Item], length: Callable[[Item], int], max_tokens: int, is_padded: bool = False
) -> Iterator[list[Item]]:
    """Neighbours of at most `max_tokens` together, a longer one alone; padding counts, if any."""
    waiting: list[Item] = []
    size = longest = 0
    for item in items:
        own = length(item)
        longest = max(longest, own)
        size = longest * (len(waiting) + 1) if is_padded else size + own
        if waiting and size > max_tokens:
            yield waiting
            waiting, size, longest = [], own, own
        waiting.append(item)
    if waiting:
        yield waiting


class Parts(NamedTuple):
    """What a batch is made of: for each rollout one array per column, as a shard has them."""

    rollout_ids: Sequence[str]
    prompt_ids: Sequence[NDArray[Any]]  # [P] each
    output_ids: Sequence[NDArray[Any]]  # [R] each
    support_counts: Sequence[NDArray[Any]]  # [R] each, 0 = forced
    support_ids: Sequence[NDArray[Any]]
    sampling_logprobs: Sequence[NDArray[Any]]  # [R] each
    loss_mask: Sequence[NDArray[Any]]  # [R] each, 0 or 1
    temperature: Sequence[float]


def parts_of(rollouts: Sequence[Rollout]) -> Parts:
    """The arrays of `rollouts`."""
    return Parts(
        rollout_ids=[r.rollout_id for r in rollouts],
        prompt_ids=[r.prompt_ids for r in rollouts],
        output_ids=[r.output_ids for r in rollouts],
        support_counts=[r.support.counts for r in rollouts],
        support_ids=[r.support.ids for r in rollouts],
        sampling_logprobs=[r.sampling_logprobs for r in rollouts],
        loss_mask=[r.loss_mask for r in rollouts],
        temperature=[r.temperature for r in rollouts],
    )


def assemble(parts: Parts, number: int, pin_memory: bool = False) -> PackedBatch:
    """One batch; every column is copied once, from where it lies into its tensor."""
    prompts, outputs = _lengths(parts.prompt_ids), _lengths(parts.output_ids)
    inputs = prompts + np.maximum(outputs, 1) - 1
    borders = np.concatenate([[0], np.cumsum(inputs)])
    num_inputs, num_outputs = int(borders[-1]), int(outputs.sum())
    counts = np.concatenate(parts.support_counts)
    scored = counts > 0
    num_scored = int(np.count_nonzero(scored))
    has_forced = num_scored < num_outputs
    sizes = {
        "input_ids": (num_inputs, torch.int64),
        "position_ids": (num_inputs, torch.int64),
        "hidden_rows": (num_scored, torch.int64),
        "targets": (num_scored, torch.int64),
        "rollout_index": (num_scored, torch.int64),
        "support_offsets": (num_scored + 1, torch.int64),
        "cu_seqlens": (len(borders), torch.int32),
        "support_ids": (sum(map(len, parts.support_ids)), torch.int32),
        "sampling_logprobs": (num_scored, torch.float32),
        "temperature": (num_scored, torch.float32),
        "loss_mask": (num_scored, torch.bool),
    }
    tensors = _empty(sizes, pin_memory)
    out = {name: tensor.numpy() for name, tensor in tensors.items()}

    def join(name: str, arrays: Sequence[NDArray[Any]]) -> None:
        np.concatenate(arrays, out=out[name], casting="same_kind")

    def join_scored(name: str, arrays: Sequence[NDArray[Any]]) -> None:
        if has_forced:
            out[name][:] = np.concatenate(arrays)[scored]
        else:
            join(name, arrays)

    def repeat(name: str, values: NDArray[Any]) -> None:
        """One value per rollout."""
        whole = np.repeat(values, outputs)
        out[name][:] = whole[scored] if has_forced else whole

    pairs = zip(parts.prompt_ids, parts.output_ids, strict=True)
    join("input_ids", [ids for prompt, output in pairs for ids in (prompt, output[:-1])])
    at = np.arange(num_inputs)
    join("position_ids", [at[:length] for length in inputs.tolist()])
    out["cu_seqlens"][:] = borders
    # the last prompt token predicts the first output token
    first_rows = borders[:-1] + prompts - 1
    spans = zip(first_rows.tolist(), (first_rows + outputs).tolist(), strict=True)
    join_scored("hidden_rows", [at[first:last] for first, last in spans])
    join_scored("targets", parts.output_ids)
    join_scored("sampling_logprobs", parts.sampling_logprobs)
    join_scored("loss_mask", [mask.astype(bool) for mask in parts.loss_mask])
    repeat("rollout_index", np.arange(len(outputs)))
    repeat("temperature", np.array(parts.temperature, np.float32))
    join("support_ids", parts.support_ids)
    out["support_offsets"][0] = 0
    sizes_of_rows = torch.from_numpy(counts[scored] if has_forced else counts)
    torch.cumsum(sizes_of_rows, 0, out=tensors["support_offsets"][1:])
    return PackedBatch(
        number=number,
        rollout_ids=tuple(parts.rollout_ids),
        max_seqlen=int(inputs.max()),
        **tensors,
    )


def _empty(sizes: dict[str, tuple[int, torch.dtype]], pin_memory: bool) -> dict[str, Tensor]:
    """Tensors in one buffer, the widest first.

    Allocators give back one buffer of the same size again and again; a dozen would go back to the
    system each time, and their pages would have to be cleared anew.
    """
    num_bytes = [number * dtype.itemsize for number, dtype in sizes.values()]
    buffer = torch.empty(sum(num_bytes), dtype=torch.uint8, pin_memory=pin_memory)
    pieces = zip(sizes.items(), buffer.split(num_bytes), strict=True)
    return {name: piece.view(dtype) for (name, (_, dtype)), piece in pieces}


def no_rollouts(number: int, pin_memory: bool = False) -> PackedBatch:
    """A batch that the policy can run, with nothing to score."""
    one, nothing = [np.zeros(1, np.int32)], [np.zeros(0, np.int32)]
    none = [np.zeros(0, np.float32)]
    parts = Parts((), one, nothing, nothing, nothing, none, nothing, [1.0])
    return assemble(parts, number, pin_memory)


def _lengths(arrays: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    return np.fromiter(map(len, arrays), np.int64, len(arrays))

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
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replay.padded import PaddedBatch, padded, with_tensors
from rollout.record import Rollout

Item = TypeVar("Item")


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
        """The same rollouts as [B, L], padded on the right."""
        return padded(self)


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
    empty = partial(torch.empty, pin_memory=pin_memory)
    prompts, outputs = _lengths(parts.prompt_ids), _lengths(parts.output_ids)
    inputs = prompts + np.maximum(outputs, 1) - 1
    borders, output_borders = _borders(inputs), _borders(outputs)
    num_inputs, num_outputs = int(borders[-1]), int(output_borders[-1])
    counts = np.concatenate(parts.support_counts)
    scored = counts > 0
    num_scored = int(np.count_nonzero(scored))
    has_forced = num_scored < num_outputs

    def filled(values: NDArray[Any], dtype: torch.dtype) -> Tensor:
        """[T] of [R]."""
        tensor = empty(num_scored, dtype=dtype)
        tensor.numpy()[:] = values[scored] if has_forced else values
        return tensor

    def gathered(arrays: Sequence[NDArray[Any]], dtype: torch.dtype) -> Tensor:
        """[T] of one array per rollout, [R] together."""
        if has_forced:
            return filled(np.concatenate(arrays), dtype)
        return _joined(arrays, empty(num_scored, dtype=dtype))

    input_ids = empty(num_inputs, dtype=torch.int64)
    pairs = zip(parts.prompt_ids, parts.output_ids, strict=True)
    _joined([ids for prompt, output in pairs for ids in (prompt, output[:-1])], input_ids)
    position_ids = empty(num_inputs, dtype=torch.int64)
    at = np.arange(num_inputs)
    np.subtract(at, np.repeat(borders[:-1], inputs), out=position_ids.numpy())
    cu_seqlens = empty(len(borders), dtype=torch.int32)
    cu_seqlens.numpy()[:] = borders
    # an output token stands one row after the one that predicts it
    shift = borders[:-1] + prompts - 1 - output_borders[:-1]
    support_offsets = empty(num_scored + 1, dtype=torch.int64)
    support_offsets[0] = 0
    np.cumsum(counts[scored] if has_forced else counts, out=support_offsets.numpy()[1:])
    num_ids = int(support_offsets[-1])
    return PackedBatch(
        number=number,
        rollout_ids=tuple(parts.rollout_ids),
        input_ids=input_ids,
        position_ids=position_ids,
        cu_seqlens=cu_seqlens,
        max_seqlen=int(inputs.max()),
        hidden_rows=filled(np.arange(num_outputs) + np.repeat(shift, outputs), torch.int64),
        targets=gathered(parts.output_ids, torch.int64),
        rollout_index=filled(np.repeat(np.arange(len(outputs)), outputs), torch.int64),
        support_ids=_joined(parts.support_ids, empty(num_ids, dtype=torch.int32)),
        support_offsets=support_offsets,
        sampling_logprobs=gathered(parts.sampling_logprobs, torch.float32),
        loss_mask=gathered(parts.loss_mask, torch.int8).view(torch.bool),
        temperature=filled(
            np.repeat(np.array(parts.temperature, np.float32), outputs), torch.float32
        ),
    )


def no_rollouts(number: int, pin_memory: bool = False) -> PackedBatch:
    """A batch that the policy can run, with nothing to score."""
    one, nothing = [np.zeros(1, np.int32)], [np.zeros(0, np.int32)]
    none = [np.zeros(0, np.float32)]
    parts = Parts((), one, nothing, nothing, nothing, none, nothing, [1.0])
    return assemble(parts, number, pin_memory)


def _lengths(arrays: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    return np.fromiter(map(len, arrays), np.int64, len(arrays))


def _borders(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)])


def _joined(arrays: Sequence[NDArray[Any]], tensor: Tensor) -> Tensor:
    """`tensor`, filled with `arrays` one after another."""
    np.concatenate(arrays, out=tensor.numpy(), casting="same_kind")
    return tensor

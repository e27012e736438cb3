"""Packing: several rollouts on one token axis, and which hidden row scores which output token.

A rollout with prompt [a b] and output [x y z] goes through the policy as four tokens; the row at a
position predicts the token after it, so the rows of b, x and y score x, y and z::

    input_ids     a  b  x  y
    position_ids  0  1  2  3
    scores           x  y  z

The next rollout follows with positions from 0 again; attention never crosses that border.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollout.record import Rollout
from rollout.support import Support


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """N input tokens of whole rollouts, and the T sampled output tokens to score."""

    rollouts: tuple[Rollout, ...]
    input_ids: Tensor  # [N] int64
    position_ids: Tensor  # [N] int64, from 0 in each rollout
    hidden_rows: Tensor  # [T] int64: the input position that predicts each scored token
    targets: Tensor  # [T] int64
    support_ids: Tensor  # [E] int64
    support_offsets: Tensor  # [T + 1] int64
    temperature: Tensor  # [T] float32

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch with its tensors on `device`."""
        return PackedBatch(
            rollouts=self.rollouts,
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            hidden_rows=self.hidden_rows.to(device),
            targets=self.targets.to(device),
            support_ids=self.support_ids.to(device),
            support_offsets=self.support_offsets.to(device),
            temperature=self.temperature.to(device),
        )


def pack(rollouts: Iterable[Rollout], max_tokens: int) -> Iterator[PackedBatch]:
    """Batches of at most `max_tokens` input tokens, in order; a longer rollout is alone in its own.

    Forced tokens are input like any other but are not scored.
    """
    waiting: list[Rollout] = []
    size = 0
    for rollout in rollouts:
        length = num_input_tokens(rollout)
        if waiting and size + length > max_tokens:
            yield _pack(waiting)
            waiting, size = [], 0
        waiting.append(rollout)
        size += length
    if waiting:
        yield _pack(waiting)


def num_input_tokens(rollout: Rollout) -> int:
    """Tokens that go through the policy: the last output token predicts nothing we score."""
    return len(rollout.prompt_ids) + max(rollout.num_output_tokens, 1) - 1


def _pack(rollouts: Sequence[Rollout]) -> PackedBatch:
    inputs = [np.concatenate([r.prompt_ids, r.output_ids[:-1]]) for r in rollouts]
    starts = np.cumsum([0, *map(len, inputs)])
    scored = [np.flatnonzero(~r.is_forced) for r in rollouts]
    hidden_rows = [
        start + len(r.prompt_ids) - 1 + positions
        for start, r, positions in zip(starts, rollouts, scored, strict=False)
    ]
    support = Support.concatenate(
        [r.support.take(positions) for r, positions in zip(rollouts, scored, strict=True)]
    )
    temperature = [np.full(len(s), r.temperature) for r, s in zip(rollouts, scored, strict=True)]
    targets = [r.output_ids[s] for r, s in zip(rollouts, scored, strict=True)]
    return PackedBatch(
        rollouts=tuple(rollouts),
        input_ids=_tensor(inputs, torch.int64),
        position_ids=_tensor([np.arange(len(ids)) for ids in inputs], torch.int64),
        hidden_rows=_tensor(hidden_rows, torch.int64),
        targets=_tensor(targets, torch.int64),
        support_ids=torch.tensor(support.ids, dtype=torch.int64),
        support_offsets=torch.tensor(support.offsets),
        temperature=_tensor(temperature, torch.float32),
    )


def _tensor(arrays: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
    return torch.tensor(np.concatenate(arrays), dtype=dtype)

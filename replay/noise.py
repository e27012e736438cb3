"""What honest numerics change: the policy once more in another precision, for some rollouts.

An engine computes in bfloat16. A policy in another precision is apart from it by what bfloat16 does
to the policy. One in bfloat16 too has rounding errors of its own, as large and independent, so
both sides are sqrt(2) times as far apart as each of them is from the same policy in float32.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replay.batch import assemble, parts_of
from replay.memory import LESS_EACH, memory_for
from replay.policy import Policy
from rollout.record import Rollout

NOISE_TOKENS = 4096  # sampled from two ids or more; a second forward of all would double a replay


class NoiseMeter:
    """Runs the rollouts of `sample`, by id, through `policy` in the other precision."""

    def __init__(self, policy: Policy, head_dtype: str, sample: Collection[str]) -> None:
        self._sample = sample
        with memory_for("the policy's head in another precision", LESS_EACH):
            self.policy = policy.in_precision(_other(policy.weight.dtype))
        self.head_dtype = _other(getattr(torch, head_dtype))
        self.factor = math.sqrt(2) if policy.weight.dtype == torch.bfloat16 else 1.0

    def change(self, rollouts: Sequence[Rollout], support_logprobs: Tensor) -> Tensor:
        """[E] How far an honest engine may be from `support_logprobs` [E], which are the policy's
        of every support id in `rollouts`; NaN of those outside the sample."""
        chosen = [r.rollout_id in self._sample for r in rollouts]
        found = torch.full_like(support_logprobs, torch.nan)
        if any(chosen):
            entries = torch.tensor([len(r.support.ids) for r in rollouts])
            inside = torch.tensor(chosen).repeat_interleave(entries)
            again = self._again([r for r, c in zip(rollouts, chosen, strict=True) if c])
            found[inside] = self.factor * (support_logprobs[inside] - again)
        return found

    def _again(self, rollouts: Sequence[Rollout]) -> Tensor:
        batch = assemble(parts_of(rollouts), 0).to(self.policy.device)
        hidden = self.policy.hidden(batch.input_ids, batch.position_ids)[batch.hidden_rows]
        scores = self.policy.over_supports(hidden, batch, self.head_dtype)
        assert scores.support_logprobs is not None
        return scores.support_logprobs.cpu()


def _other(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.bfloat16 else torch.bfloat16


def noise_sample(rollouts: Sequence[Rollout]) -> frozenset[str]:
    """Ids of rollouts from all over the run that have `NOISE_TOKENS` tokens which can differ."""
    sizes = np.array([_can_differ(r).sum() for r in rollouts])
    useful = np.flatnonzero(sizes)
    step = max(1, -(-int(sizes.sum()) // NOISE_TOKENS))
    return frozenset(rollouts[i].rollout_id for i in useful[::step])


def _can_differ(rollout: Rollout) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = (rollout.support.counts > 1) & ~rollout.is_forced
    return mask & np.isfinite(rollout.sampling_logprobs)

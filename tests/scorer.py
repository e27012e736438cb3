"""Evidence for many faulty versions of the same rollouts, without running the policy each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from replay import Policy, pack
from replay.evidence import Evidence, make_evidence
from replay.reference import shape_logits
from rollout.record import Rollout


class Scorer:
    """What `verify` computes for `diagnose`, from logits [R, V] that are kept by input ids."""

    def __init__(self, policy: Policy, head_dtype: torch.dtype = torch.float32) -> None:
        self.policy, self.head_dtype = policy, head_dtype
        self._hidden: dict[bytes, torch.Tensor] = {}
        self._logits: dict[bytes, torch.Tensor] = {}

    def with_policy(self, policy: Policy) -> Scorer:
        """Another head, softcap or body; hidden states of the same body are kept."""
        other = Scorer(policy, self.head_dtype)
        if policy.body is self.policy.body:
            other._hidden = self._hidden
        return other

    def evidence_of_two(
        self,
        rollouts: Sequence[Rollout],
        other: Scorer,
        of_other: Callable[[Rollout], NDArray[np.bool_]],
    ) -> Evidence:
        """The evidence of tokens of `of_other` [R] is `other`'s, of all others our own."""
        mine, theirs = self.evidence(rollouts), other.evidence(rollouts)
        np.testing.assert_array_equal(mine.position, theirs.position)
        masks = [of_other(r) for r in mine.rollouts]
        at = zip(mine.rollout, mine.position, strict=True)
        tokens = np.array([masks[i][t] for i, t in at], bool)
        columns = {
            name: np.where(is_other, getattr(theirs, name), getattr(mine, name))
            for names, is_other in (
                (("replay_full", "logsumexp"), tokens),
                (("replay_support", "replay_rounded"), tokens[mine.rows]),
            )
            for name in names
        }
        return replace(mine, **columns)

    def forget(self) -> None:
        """What was kept so far will not come again."""
        self._hidden.clear()
        self._logits.clear()

    def evidence(self, rollouts: Sequence[Rollout]) -> Evidence:
        return Evidence.concatenate([self._one(r) for r in rollouts if len(r.support.ids)])

    @torch.inference_mode()
    def _one(self, rollout: Rollout) -> Evidence:
        (batch,) = pack([rollout], 1)
        key = batch.input_ids.numpy().tobytes()
        if key not in self._hidden:
            hidden = self.policy.hidden(batch.input_ids, batch.position_ids)
            self._hidden[key] = hidden[len(rollout.prompt_ids) - 1 :].float()
        if key not in self._logits:
            self._logits[key] = self._hidden[key] @ self.policy.weight.float().T
        rows = np.flatnonzero(~rollout.is_forced)
        z = self._logits[key][rows]
        other = torch.bfloat16 if self.head_dtype == torch.float32 else torch.float32
        of_entry = torch.repeat_interleave(batch.support_offsets.diff())
        shaped = self._shaped(z, self.head_dtype) / rollout.temperature
        rough = self._shaped(z[of_entry, batch.support_ids], other) / rollout.temperature
        offsets = batch.support_offsets[:-1].numpy()
        entries = shaped[of_entry, batch.support_ids].double().numpy()
        logprobs, sums = _log_softmax(entries, offsets, of_entry.numpy())
        at_target = shaped.gather(1, batch.targets[:, None])[:, 0]
        return make_evidence(
            [rollout],
            logprobs,
            _log_softmax(rough.double().numpy(), offsets, of_entry.numpy())[0],
            (at_target - shaped.logsumexp(1)).numpy(),
            sums,
            self.policy.softcap,
        )

    def _shaped(self, z: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return shape_logits(z, self.policy.logit_scale, self.policy.softcap, dtype)


def _log_softmax(
    z: NDArray[np.float64], offsets: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[E] over each support, and [T] the logsumexp; supports are not empty."""
    peak = np.maximum.reduceat(z, offsets)
    sums = peak + np.log(np.add.reduceat(np.exp(z - peak[rows]), offsets))
    return z - sums[rows], sums

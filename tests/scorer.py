"""Evidence for many faulty versions of the same rollouts, without running the policy each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from replay import PackedBatch, Policy, pack
from replay.evidence import Evidence, make_evidence
from replay.noise import NoiseMeter
from replay.reference import shape_logits
from rollout.record import Rollout

Array = NDArray[np.float64]


class Scorer:
    """What `verify` computes for `diagnose`, from logits that are kept by input ids."""

    def __init__(self, policy: Policy, head_dtype: str = "float32") -> None:
        self.policy = policy
        meter = NoiseMeter(policy, head_dtype, ())
        self._factor = meter.factor
        self._own = _Kept(policy, getattr(torch, head_dtype))
        self._again = _Kept(meter.policy, meter.head_dtype)

    def with_policy(self, policy: Policy) -> Scorer:
        """Another head, softcap or body; hidden states of the same body are kept."""
        other = Scorer(policy, str(self._own.head_dtype).removeprefix("torch."))
        if policy.body is self.policy.body:
            other._own.hidden, other._again.hidden = self._own.hidden, self._again.hidden
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
                (("replay_full", "logsumexp", "noise"), tokens),
                (("replay_support",), tokens[mine.rows]),
            )
            for name in names
        }
        return replace(mine, **columns)

    def forget(self) -> None:
        """What was kept so far will not come again."""
        self._own.forget()
        self._again.forget()

    def evidence(self, rollouts: Sequence[Rollout]) -> Evidence:
        return Evidence.concatenate([self._one(r) for r in rollouts if len(r.support.ids)])

    @torch.inference_mode()
    def _one(self, rollout: Rollout) -> Evidence:
        (batch,) = pack([rollout], 1)
        rows = np.flatnonzero(~rollout.is_forced)
        shaped = self._own.logits(rollout, batch)[rows]
        at_target = shaped.gather(1, batch.targets[:, None])[:, 0]
        logprobs, sums = _over_supports(shaped, batch)
        again, _ = _over_supports(self._again.logits(rollout, batch)[rows], batch)
        return make_evidence(
            [rollout],
            logprobs,
            self._factor * (logprobs - again),
            (at_target - shaped.logsumexp(1)).numpy(),
            sums,
            self.policy.softcap,
        )


class _Kept:
    """A policy's logits [R, V] of rollouts."""

    def __init__(self, policy: Policy, head_dtype: torch.dtype) -> None:
        self.policy, self.head_dtype = policy, head_dtype
        self.hidden: dict[bytes, torch.Tensor] = {}
        self._products: dict[bytes, torch.Tensor] = {}

    def forget(self) -> None:
        self.hidden.clear()
        self._products.clear()

    def logits(self, rollout: Rollout, batch: PackedBatch) -> torch.Tensor:
        key = batch.input_ids.numpy().tobytes()
        if key not in self.hidden:
            hidden = self.policy.hidden(batch.input_ids, batch.position_ids)
            self.hidden[key] = hidden[len(rollout.prompt_ids) - 1 :].float()
        if key not in self._products:
            self._products[key] = self.hidden[key] @ self.policy.weight.float().T
        z = self._products[key]
        shaped = shape_logits(z, self.policy.logit_scale, self.policy.softcap, self.head_dtype)
        return shaped / rollout.temperature


def _over_supports(shaped: torch.Tensor, batch: PackedBatch) -> tuple[Array, Array]:
    """[E] log-softmax over each support, and [T] the logsumexp; supports are not empty."""
    offsets = batch.support_offsets[:-1].numpy()
    rows = torch.repeat_interleave(batch.support_offsets.diff())
    z = shaped[rows, batch.support_ids].double().numpy()
    peak = np.maximum.reduceat(z, offsets)
    sums = peak + np.log(np.add.reduceat(np.exp(z - peak[rows]), offsets))
    return z - sums[rows], sums

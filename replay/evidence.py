"""Evidence: both sides' numbers over whole supports, as flat arrays for `diagnose`.

Numbers are held in the precision in which they were recorded and scored, float32: a run has many.
Every method computes in float64, and `take`, with which every judgement begins, gives float64 and
int64. Types say what `take` gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.record import Rollout
from rollout.support import Support

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

HASH_BASE = 6364136223846793005  # odd and large, so that its powers fill 64 bits


@dataclass(frozen=True, eq=False)
class Evidence:
    """T sampled tokens that both sides scored, E entries of their supports.

    Engine numbers are as recorded (NaN where not), replay numbers are the policy's with the
    recorded temperature; logprobs in nats. `noise` is what honest numerics change, see
    `replay.noise`.
    """

    rollouts: tuple[Rollout, ...]
    rollout: NDArray[np.int64]  # [T] index into rollouts
    position: NDArray[np.int64]  # [T] in output_ids
    context: NDArray[np.int64]  # [T] the same number after the same ids, see `contexts`
    token_id: NDArray[np.int64]  # [T]
    support: Support  # T rows
    sampling: Floats  # [T] engine, over the support
    full: Floats  # [T] engine, over the whole vocabulary; NaN where not recorded
    support_logprobs: Floats  # [E] engine, NaN where not recorded
    replay_support: Floats  # [E]
    replay_full: Floats  # [T] over the whole vocabulary
    logsumexp: Floats  # [T] of the policy's logits / T over the support
    noise: Floats  # [T] mismatch of honest sides; NaN where it was not measured
    softcap: float | None = None  # of the policy

    def __len__(self) -> int:
        return len(self.rollout)

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """[E] token of each entry."""
        return self.support.rows

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """[T] ids per support."""
        return self.support.counts.astype(np.int64)

    @cached_property
    def temperature(self) -> Floats:
        """[T] as recorded."""
        return np.array([r.temperature for r in self.rollouts], np.float64)[self.rollout]

    @cached_property
    def prompt(self) -> NDArray[np.int64]:
        """[T] a number for each prompt."""
        numbers: dict[str, int] = {}
        of_rollout = [numbers.setdefault(r.prompt_id, len(numbers)) for r in self.rollouts]
        return np.array(of_rollout, np.int64)[self.rollout]

    @cached_property
    def sampled_entries(self) -> NDArray[np.int64]:
        """The entries of sampled ids."""
        return np.flatnonzero(self.support.ids == self.token_id[self.rows])

    @cached_property
    def replay(self) -> Floats:
        """[T] the policy's logprob of the sampled id over the support."""
        return self.at_sampled(self.replay_support)

    @cached_property
    def informative(self) -> Mask:
        """[T] two ids or more: a singleton is 0 on both sides, whatever is wrong."""
        return self.counts > 1

    @cached_property
    def weights(self) -> Floats:
        """[E] the engine's probabilities, the policy's where they are not known; rows sum to 1."""
        known = self.has_support[self.rows]
        logits = np.where(known, self.support_logprobs, self.replay_support)
        return np.exp(self.normalised(logits))

    def mismatch(self, predicted: Floats, sampled: Floats | None = None) -> Floats:
        """[T] Distance in nats between the engine's logprobs and `predicted` [E].

        Over the whole support the root of the mean square, weighted by the engine's probabilities;
        where only the sampled token is known, the size of its difference. `sampled` [T] is the
        prediction for the sampled token where it is not the one in `predicted`.
        """
        at_sampled = self.at_sampled(predicted) if sampled is None else sampled
        of_sampled = np.abs(self.sampling - at_sampled)
        if not self.has_support.any():
            return np.where(np.isfinite(of_sampled), of_sampled, np.inf)
        difference = np.subtract(self.support_logprobs, predicted, dtype=np.float64)
        difference = np.where(self.has_support[self.rows], difference, 0.0)
        over_support = np.sqrt(self.sums(self.weights * difference**2))
        distance = np.where(self.has_support, over_support, of_sampled)
        return np.where(np.isfinite(distance), distance, np.inf)

    @cached_property
    def as_recorded(self) -> Floats:
        """[T] mismatch when nothing is wrong."""
        return self.mismatch(self.replay_support)

    def apart(self, difference: Floats) -> Floats:
        """[T] The size of a `difference` [E] between two logprobs, as `mismatch` measures it."""
        over_support = np.sqrt(self.sums(self.weights * difference**2))
        return np.where(self.has_support, over_support, np.abs(self.at_sampled(difference)))

    def with_noise_everywhere(self) -> Evidence:
        """With the mean of the measured noise where none was; NaN stays where none was at all."""
        known = np.isfinite(self.noise)
        mean = self.noise[known].mean() if known.any() else np.nan
        return replace(self, noise=np.where(known, self.noise, mean))

    @cached_property
    def has_support(self) -> Mask:
        """[T] whether the engine's logprobs of the whole support are there and fit `sampling`."""
        known = self.sums(np.isnan(self.support_logprobs).astype(np.float64)) == 0
        fits: Mask = known & (np.abs(self.at_sampled(self.support_logprobs) - self.sampling) < 1e-4)
        return fits

    def at_sampled(self, values: Floats) -> Floats:
        """[T] `values` [E] of the sampled ids; NaN where outside the support."""
        out = np.full(len(self), np.nan)
        at = self.sampled_entries
        out[self.rows[at]] = values[at]
        return out

    def sums(self, values: Floats) -> Floats:
        """[T] Sums over each support."""
        total: Floats = np.bincount(self.rows, values, minlength=len(self)).astype(np.float64)
        return total

    def normalised(self, logits: Floats) -> Floats:
        """[E] Log-softmax over each support."""
        logits = logits.astype(np.float64, copy=False)
        starts = self.support.offsets[:-1]
        peak = np.maximum.reduceat(logits, starts)[self.rows]
        mass = np.add.reduceat(np.exp(logits - peak), starts)
        return logits - peak - np.log(mass)[self.rows]

    def take(self, keep: Mask) -> Evidence:
        """The tokens of `keep` [T], in float64."""
        taken = self.held(keep)
        wide = {
            name: values.astype(np.int64 if values.dtype.kind == "i" else np.float64, copy=False)
            for name in (*TOKEN_FIELDS, *ENTRY_FIELDS)
            for values in [getattr(taken, name)]
        }
        return replace(taken, **wide)

    def held(self, keep: Mask) -> Evidence:
        """The tokens of `keep` [T], as they are held here."""
        entries = np.repeat(keep, self.counts)
        return Evidence(
            rollouts=self.rollouts,
            support=self.support.take(np.flatnonzero(keep)),
            softcap=self.softcap,
            **{name: getattr(self, name)[keep] for name in TOKEN_FIELDS},
            **{name: getattr(self, name)[entries] for name in ENTRY_FIELDS},
        )

    @classmethod
    def concatenate(cls, parts: Iterable[Evidence]) -> Evidence:
        parts = list(parts)
        shifts = np.cumsum([0, *(len(p.rollouts) for p in parts)])
        columns = {
            name: np.concatenate([getattr(p, name) for p in parts])
            for name in (*TOKEN_FIELDS, *ENTRY_FIELDS)
        }
        columns["rollout"] = np.concatenate(
            [p.rollout + shift for p, shift in zip(parts, shifts, strict=False)]
        )
        return cls(
            rollouts=tuple(r for p in parts for r in p.rollouts),
            support=Support.concatenate([p.support for p in parts]),
            softcap=parts[0].softcap,
            **columns,
        )


TOKEN_FIELDS = (
    "rollout",
    "position",
    "context",
    "token_id",
    "sampling",
    "full",
    "replay_full",
    "logsumexp",
    "noise",
)
ENTRY_FIELDS = ("support_logprobs", "replay_support")


def make_evidence(
    rollouts: Sequence[Rollout],
    replay_support: NDArray[np.floating],
    replay_change: NDArray[np.floating],
    replay_full: NDArray[np.floating],
    logsumexp: NDArray[np.floating],
    softcap: float | None = None,
) -> Evidence:
    """What a batch gives: policy numbers [E] and [T] in the order of the sampled tokens of
    `rollouts`. `replay_change` [E] is how far honest numerics may move them, NaN where that was not
    measured. Tokens without finite numbers on both sides are left out: rules speak of those."""
    sampled = [(r, np.flatnonzero(~r.is_forced)) for r in rollouts]
    columns: dict[str, NDArray[Any]] = {
        "rollout": np.repeat(np.arange(len(rollouts)), [len(at) for _, at in sampled]),
        "position": np.concatenate([at for _, at in sampled]),
        "context": np.concatenate([contexts(r)[at] for r, at in sampled]),
        "token_id": np.concatenate([r.output_ids[at] for r, at in sampled]),
        "sampling": np.concatenate([r.sampling_logprobs[at] for r, at in sampled]),
        "full": np.concatenate([_full(r)[at] for r, at in sampled]),
        "support_logprobs": np.concatenate([_engine(r) for r in rollouts]),
        "replay_support": replay_support,
        "replay_full": replay_full,
        "logsumexp": logsumexp,
        "noise": np.full(sum(len(at) for _, at in sampled), np.nan),
    }
    support = Support.concatenate([r.support.take(at) for r, at in sampled])
    found = Evidence(tuple(rollouts), support=support, softcap=softcap, **columns)
    found = replace(found, noise=found.apart(replay_change.astype(np.float64)))
    finite = np.isfinite(found.sampling) & np.isfinite(found.replay)
    return found.held(finite & np.isfinite(found.replay_full))


def contexts(rollout: Rollout) -> NDArray[np.int32]:
    """[R] A hash of all ids before each output token: equal ones are the same input to a model.

    Where the rollouts of a prompt begin alike, they hold the same numbers with the same noise.
    """
    before = np.concatenate([[0], rollout.prompt_ids, rollout.output_ids[:-1]]).astype(np.uint64)
    powers = np.multiply.accumulate(np.full(len(before), HASH_BASE, np.uint64))  # modulo 2**64
    hashes = np.cumsum((before + np.uint64(1)) * powers)[len(rollout.prompt_ids) :]
    return (hashes >> np.uint64(32)).astype(np.uint32).view(np.int32)


def _engine(rollout: Rollout) -> NDArray[np.float32]:
    if rollout.support_logprobs is None:
        return np.full(len(rollout.support.ids), np.nan, np.float32)
    known = rollout.support_logprobs
    return np.where(np.isfinite(known), known, np.nan).astype(np.float32)


def _full(rollout: Rollout) -> NDArray[np.float32]:
    if rollout.full_logprobs is None:
        return np.full(rollout.num_output_tokens, np.nan, np.float32)
    return rollout.full_logprobs

"""Rollout: one sampled sequence with everything needed to replay it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout.support import Support


class WeightSpan(NamedTuple):
    """Output tokens [start, end) were sampled with weights `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Rollout:
    """One sampled sequence: flat arrays, those marked [R] of length ``len(output_ids)``.

    Logprobs are natural logarithms after temperature. `temperature` and `top_k` are what the
    sampler did (greedy is temperature 1, top_k 1); `sampling_params` is the JSON that was sent.
    `top_k` -1 means no limit. Optional arrays are None where the engine was not asked, never where
    it failed. Arrays may be read-only views of a shard, and rollouts compare by identity.
    """

    rollout_id: str  # "{prompt_id}:{sample_index}", the exactly-once key
    prompt_id: str
    sample_index: int
    prompt_ids: NDArray[np.int32]  # [P], P >= 1
    output_ids: NDArray[np.int32]  # [R]
    loss_mask: NDArray[np.int8]  # [R] 1 = train on it; 0 for every forced token
    sampling_logprobs: NDArray[np.float32]  # [R] over the support; 0.0 where forced
    support: Support  # R rows; an empty one is a forced token
    full_logprobs: NDArray[np.float32] | None  # [R] over the whole vocabulary
    support_logprobs: NDArray[np.float32] | None  # aligned with support.ids
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_new_tokens: int
    seed: int | None
    sampling_params: str  # canonical JSON
    finish_reason: str  # stop, length or abort
    stop_match: str | None
    weight_versions: tuple[WeightSpan, ...]
    engine_meta: str  # canonical JSON
    prompt_text: str | None = None
    output_text: str | None = None
    reward: float | None = None
    created_us: int = 0
    latency_ms: float = 0.0
    attempts: int = 1
    extra: str = "{}"  # canonical JSON

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_ids)

    @property
    def is_forced(self) -> NDArray[np.bool_]:
        """[R] Whether each token was put there by something other than the policy."""
        forced: NDArray[np.bool_] = self.support.counts == 0
        return forced

    @property
    def kept_mass(self) -> NDArray[np.float32] | None:
        """[R] The engine's full-vocabulary probability of each support: exp(full − sampling)."""
        if self.full_logprobs is None:
            return None
        mass: NDArray[np.float32] = np.exp(self.full_logprobs - self.sampling_logprobs)
        return mass


def make_rollout_id(prompt_id: str, sample_index: int, abort: int | None = None) -> str:
    """The exactly-once key of the sample_index-th rollout of a prompt.

    With `abort` it is the key of the abort-th aborted attempt at it, which is never the rollout.
    """
    done = f"{prompt_id}:{sample_index}"
    return done if abort is None else f"{done}#abort{abort}"

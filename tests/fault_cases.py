"""The seeded faults of the acceptance tests, each with the code that `diagnose` names first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from fault_injector import (
    Change,
    Inject,
    at_endpoint,
    declared_order,
    declared_temperature,
    duplicated,
    every,
    from_token,
    full_stored,
    full_stored_for_every_id,
    head_row_moved,
    in_halves,
    in_some,
    logits_times,
    logprobs_shifted,
    noise_of,
    noisy_body,
    noisy_head,
    noisy_norm,
    of_endpoint,
    of_version,
    on_ids,
    on_seen,
    padded,
    prompt_ids,
    sampled_removed,
    softcapped,
    stale_before,
    stale_from,
    supports_shifted,
    truncated,
    without_support_logprobs,
)
from numpy.typing import NDArray

from replay import Policy
from rollout.record import Rollout


@dataclass(frozen=True)
class Case:
    """A seeded fault. `kind` is the wanted kind of scope, where only one is right.

    `of_other` says which output tokens [R] the faulty policy scores, if not all: the engine went on
    with weights that the trainer has no more.
    """

    name: str
    code: str
    inject: Inject = list
    policy: Callable[[Policy], Policy] | None = None
    kind: str | None = None
    of_other: Callable[[Rollout], NDArray[np.bool_]] | None = None
    tries_prompts: bool = False  # a mismatch that nothing explains is replayed with other prompts


def _sampled_only(inject: Inject) -> Inject:
    return lambda rollouts: [without_support_logprobs(r) for r in inject(rollouts)]


def _two_endpoints(change: Change) -> Inject:
    """Odd rollouts came from b, which is faulty."""
    at_a, at_b = at_endpoint("http://a"), at_endpoint("http://b")
    return lambda rollouts: [at_b(change(r)) if i % 2 else at_a(r) for i, r in enumerate(rollouts)]


def _is_warm(i: int, r: Rollout) -> bool:
    return abs(r.temperature - 1.3) < 1e-3


IGNORED = logits_times(lambda r: r.temperature)
DOUBLED = logits_times(lambda r: 1 / r.temperature)
OTHER = stale_before(0.5, lambda r: noise_of(r, 0.3))
OFTEN = 198  # a line feed, in hundreds of recorded supports

CASES = (
    Case("nothing", "clean"),
    Case("nothing, sampled only", "clean", _sampled_only(list)),
    Case("T ignored", "temperature_ignored", in_some(IGNORED)),
    Case("T ignored, sampled only", "temperature_ignored", _sampled_only(in_some(IGNORED))),
    Case("T ignored by one endpoint", "temperature_ignored", _two_endpoints(IGNORED), kind="endpoint"),
    Case("T doubled", "temperature_doubled", in_some(DOUBLED)),
    Case("T doubled, sampled only", "temperature_doubled", _sampled_only(in_some(DOUBLED))),
    Case("T off by 20 %", "temperature_other", in_some(declared_temperature(1.2)), kind="all"),
    Case("T off by 5 %", "temperature_other", in_some(declared_temperature(1.05)), kind="all"),
    Case("T off by 3 %", "temperature_other", in_some(declared_temperature(1.03)), kind="all"),
    Case("T off by -5 %", "temperature_other", in_some(declared_temperature(0.95)), kind="all"),
    Case("T off by 5 %, one in ten", "temperature_other", in_some(declared_temperature(1.05), every(10)), kind="rollouts"),
    Case("T off by 10 %, sampled only", "temperature_other", _sampled_only(in_some(declared_temperature(1.1)))),
    Case("T off by 10 % in one setting", "temperature_other", in_some(logits_times(lambda r: 1.1), _is_warm), kind="setting"),
    Case("full stored", "full_logprobs_stored", in_some(full_stored)),
    Case("full stored for every id", "full_logprobs_stored", in_some(full_stored_for_every_id)),
    Case("full stored, one in ten", "full_logprobs_stored", in_some(full_stored, every(10)), kind="rollouts"),
    Case("supports shifted", "shifted_by_one", in_some(supports_shifted(1))),
    Case("supports shifted back, one in ten", "shifted_by_one", in_some(supports_shifted(-1), every(10))),
    Case("logprobs shifted", "shifted_by_one", in_some(logprobs_shifted(1))),
    Case("softcap 30", "softcap", policy=softcapped(30.0)),
    Case("softcap 100", "softcap", policy=softcapped(100.0)),
    Case("softcap 50", "softcap", policy=softcapped(50.0)),
    Case("head noise 5 %", "other_weights", policy=noisy_head(0.05)),
    Case("head noise 10 %", "other_weights", policy=noisy_head(0.1)),
    Case("head noise 3 %", "other_weights", policy=noisy_head(0.03, seed=1)),
    Case("stale version", "other_weights", in_some(OTHER), kind="version"),
    Case("stale from token 16 on", "other_weights", in_some(stale_from(16, 0.3)), kind="tail"),
    Case("stale, one in ten", "other_weights", in_some(stale_from(0, 0.4), every(10)), kind="rollouts"),
    Case("norm noise 5 %", "other_weights", policy=noisy_norm(0.05)),
    Case("body noise 2 %", "other_weights", policy=noisy_body(0.02)),
    Case("body noise 5 %", "other_weights", policy=noisy_body(0.05, seed=1), kind="all"),
    Case("body stale, an old version", "other_weights", in_some(in_halves), noisy_body(0.03), "version", of_version("old")),
    Case("body stale, one endpoint", "other_weights", _two_endpoints(lambda r: r), noisy_body(0.03, seed=2), "endpoint", of_endpoint("http://b")),
    Case("body stale from token 16 on", "other_weights", policy=noisy_body(0.05, seed=3), kind="tail", of_other=from_token(16)),
    Case("sampled outside", "sampled_outside_support", in_some(sampled_removed(0.05))),
    Case("sampled outside, one in ten", "sampled_outside_support", in_some(sampled_removed(0.3), every(10))),
    Case("support cut to 8", "support_truncated", in_some(truncated(8))),
    Case("support cut to 8, sampled only", "support_truncated", in_some(truncated(8, logprobs=False))),
    Case("support padded with 0", "support_padded", in_some(padded(0, None))),
    Case("support padded, -inf", "support_padded", in_some(padded(2, -np.inf))),
    Case("duplicate ids", "duplicate_ids", in_some(duplicated(1.0))),
    Case("duplicate ids, some", "duplicate_ids", in_some(duplicated(0.1, logprobs=False))),
    Case("order declared sequential", "filter_order", in_some(declared_order("sequential"))),
    Case("order declared sequential, one in three", "filter_order", in_some(declared_order("sequential"), every(3)), kind="rollouts"),
    Case("BOS not recorded", "prompt_differs", in_some(prompt_ids(lambda ids: ids[1:])), tries_prompts=True),
    Case("BOS recorded twice", "prompt_differs", in_some(prompt_ids(lambda ids: [ids[0], *ids])), tries_prompts=True),
    Case("bias +1", "bias", in_some(on_ids({OFTEN: 1.0})), kind="ids"),
    Case("bias on three ids", "bias", in_some(on_ids({OFTEN: -1.5, 28: 1.0, 30: 0.7})), kind="ids"),
    Case("bias +0.5", "bias", in_some(on_ids({OFTEN: 0.5})), kind="ids"),
    Case("head row moved", "bias", policy=head_row_moved(OFTEN, 0.1), kind="ids"),
    Case("penalty 0.2", "penalty", in_some(on_seen(-0.2))),
    Case("penalty 0.5", "penalty", in_some(on_seen(-0.5))),
    Case("penalty 1.5, one setting", "penalty", in_some(on_seen(-1.5), _is_warm), kind="setting"),
)  # fmt: skip

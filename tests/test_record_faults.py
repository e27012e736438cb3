"""Causes that the record alone shows: one name for the whole file, without a trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from builders import make_rollout
from fault_injector import (
    declared_order,
    duplicated,
    every,
    full_stored,
    full_stored_for_every_id,
    in_some,
    padded,
    sampled_removed,
    supports_shifted,
    truncated,
)
from sides import Array, play, some_logits

from replay.diagnose import diagnose
from rollout.record import Rollout
from rollout.self_check import EngineCheck, check_engine
from rollout.support import Support


@pytest.fixture(scope="module")
def logits() -> Array:
    return some_logits()


@pytest.mark.parametrize(
    ("inject", "codes"),
    [
        pytest.param(in_some(supports_shifted(1)), ["shifted_by_one"], id="shifted"),
        pytest.param(in_some(supports_shifted(-1)), ["shifted_by_one"], id="shifted back"),
        pytest.param(in_some(duplicated(1.0)), ["duplicate_ids"], id="duplicates"),
        pytest.param(in_some(sampled_removed(0.2)), ["sampled_outside_support"], id="outside"),
        pytest.param(in_some(truncated(4)), ["support_truncated"], id="cut"),
        pytest.param(in_some(padded(59, -np.inf)), ["support_padded"], id="padded"),
        pytest.param(in_some(padded(59, -9999.0)), ["support_padded"], id="padded, -9999"),
    ],
)
@pytest.mark.parametrize("which", ["all", "some"])
def test_broken_rules_are_judged_over_the_file_and_without_a_trainer(
    logits: Array,
    inject: Callable[[list[Rollout]], list[Rollout]],
    codes: list[str],
    which: str,
) -> None:
    rollouts, _ = play(logits[:, :, :59], noise=0.0)
    faulty = inject(rollouts)
    if which == "some":
        faulty = [new if every(5)(i, new) else old for i, (new, old) in
                  enumerate(zip(faulty, rollouts, strict=True))]  # fmt: skip
    got = diagnose(None, faulty, check_engine(faulty))
    assert [d.code for d in got] == codes
    assert got[0].scope["kind"] == ("all" if which == "all" else "rollouts")


def test_a_sampled_token_outside_its_support_is_no_member() -> None:
    """p = [.4, .3, .2, .1], top_k 2, y = 2 with S = {0, 1}."""
    rollout = make_rollout(
        output_ids=np.array([2], np.int32),
        loss_mask=np.ones(1, np.int8),
        support=Support.from_rows([[0, 1]]),
        sampling_logprobs=np.log(np.array([0.2 / 0.9], np.float32)),
        full_logprobs=None,
        support_logprobs=None,
        weight_versions=(),
    )
    (got,) = diagnose(None, [rollout])
    assert (got.code, got.evidence["tokens"]) == ("sampled_outside_support", 1)
    kept = replace(rollout, support=Support.from_rows([[0, 1, 2]]))
    assert [d.code for d in diagnose(None, [kept])] == ["clean"], "it passes membership"


def test_a_declared_filter_order_that_the_numbers_contradict(logits: Array) -> None:
    rollouts, evidence = play(logits, noise=0.0)
    engine = replace(check_engine([]), filter_order="joint", sequential_violated=40)
    declared = [declared_order("sequential")(r) for r in rollouts]
    got = diagnose(evidence, declared, engine)
    assert [d.code for d in got] == ["filter_order"]
    assert diagnose(evidence, rollouts, engine)[0].code == "clean"


def test_nothing_known_about_the_engine_is_no_order() -> None:
    unknown: EngineCheck = check_engine([])
    declared = [declared_order("sequential")(make_rollout())]
    assert diagnose(None, declared, unknown)[0].code == "clean"


def test_full_logprobs_are_seen_without_a_trainer_where_mass_is_missing(logits: Array) -> None:
    rollouts, _ = play(logits, noise=0.0)
    (got,) = diagnose(None, [full_stored_for_every_id(r) for r in rollouts])
    assert (got.code, got.also) == ("full_logprobs_stored", ("support_truncated",))
    alone = diagnose(None, [full_stored(r) for r in rollouts])
    assert [d.code for d in alone] == ["clean"], "a cool sampler leaves nothing out that counts"


def test_too_few_tokens_say_so() -> None:
    got = diagnose(None, [make_rollout()])
    assert [d.code for d in got] == ["clean"]
    assert "too few" in got[0].sentence


def test_a_likely_id_that_is_in_every_support_is_no_padding() -> None:
    """A sure model: id 7 is always among its ids, with next to no probability; the sum is 1."""
    rows = np.log(np.tile(np.array([1 - 2e-8, 1e-8, 1e-8]), 20)).astype(np.float32)
    rollout = make_rollout(
        output_ids=np.arange(100, 120, dtype=np.int32),
        loss_mask=np.ones(20, np.int8),
        support=Support.from_rows([[100 + t, 7, 8] for t in range(20)]),
        sampling_logprobs=rows[::3].copy(),
        full_logprobs=rows[::3] - np.float32(0.01),
        support_logprobs=rows,
        weight_versions=(),
    )
    assert [d.code for d in diagnose(None, [rollout] * 3)] == ["clean"]

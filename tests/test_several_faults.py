"""Two faults at once: a consequence is named beside its cause, a fault elsewhere by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fault_injector import (
    at_endpoint,
    duplicated,
    in_some,
    sampled_removed,
    supports_shifted,
    truncated,
)
from sides import ROLLOUTS, Array, play, some_logits

from replay.diagnose import diagnose
from replay.evidence import Evidence
from rollout.diagnosis import Diagnosis, without_consequences
from rollout.record import Rollout


@pytest.fixture(scope="module")
def logits() -> Array:
    return some_logits()


def where(found: list[Diagnosis]) -> dict[str, list[str]]:
    return {d.code: d.scope.get("first", ["all"]) for d in found}


def test_a_rule_broken_elsewhere_is_a_fault_of_its_own(logits: Array) -> None:
    rollouts, _ = play(logits, noise=0.0)
    faulty = in_some(supports_shifted(1), lambda i, r: i < 3)(rollouts)
    faulty = in_some(sampled_removed(0.3), lambda i, r: i in (6, 7))(faulty)
    found = diagnose(None, faulty)
    assert where(found) == {
        "shifted_by_one": ["0:0", "1:0", "2:0"],
        "sampled_outside_support": ["6:0", "7:0"],
    }
    assert "sampled_outside_support" in found[0].also, "in the first three it follows"


def test_a_rule_broken_in_the_same_rollouts_is_a_consequence(logits: Array) -> None:
    rollouts, _ = play(logits, noise=0.0)
    faulty = in_some(duplicated(1.0), lambda i, r: i in (1, 2))(rollouts)
    assert where(diagnose(None, faulty)) == {"duplicate_ids": ["1:0", "2:0"]}
    faulty = in_some(truncated(4), lambda i, r: i == 7)(faulty)
    found = diagnose(None, faulty)
    assert where(found) == {"duplicate_ids": ["1:0", "2:0"], "support_truncated": ["7:0"]}
    assert found[0].also == ("support_truncated",)
    assert found[1].evidence["tokens"] == 32, "those of the twice-held ids are not counted again"


def at_two_endpoints(
    logits: Array, a: Array, b: Array, **record: float
) -> tuple[tuple[Rollout, ...], Evidence]:
    """Even rollouts come from a, with its logits, odd ones from b."""
    is_b = (np.arange(ROLLOUTS) % 2 == 1)[:, None, None]
    rollouts, evidence = play(logits, lambda z: z + np.where(is_b, b, a) - logits, **record)
    at = tuple(at_endpoint("http://b" if i % 2 else "http://a")(r) for i, r in enumerate(rollouts))
    return at, replace(evidence, rollouts=at)


def test_two_causes_of_mismatch_in_two_places(logits: Array) -> None:
    rollouts, evidence = at_two_endpoints(logits, logits, logits / 0.49, temperature=0.7)
    found = {d.scope["endpoint"]: d for d in diagnose(evidence, rollouts)}
    assert {url: d.code for url, d in found.items()} == {
        "http://a": "temperature_ignored",
        "http://b": "temperature_doubled",
    }
    assert found["http://b"].rollouts == {f"{i}:0" for i in range(1, ROLLOUTS, 2)}
    assert not any(
        {"temperature_ignored", "temperature_doubled"} & set(d.also) for d in found.values()
    )


def test_one_code_in_two_places(logits: Array) -> None:
    rollouts, evidence = at_two_endpoints(logits, logits * 0.9, logits * 1.15)
    found = {d.scope["endpoint"]: d for d in diagnose(evidence, rollouts)}
    assert {d.code for d in found.values()} == {"temperature_other"}
    factors = {url: d.evidence["logit_factor"] for url, d in found.items()}
    assert factors == pytest.approx({"http://a": 0.9, "http://b": 1.15}, rel=0.01)


def test_other_weights_beside_a_temperature(logits: Array) -> None:
    wild = np.random.default_rng(5).normal(0, 0.4, logits.shape)
    rollouts, evidence = at_two_endpoints(logits, logits + wild, logits * 1.15)
    found = diagnose(evidence, rollouts)
    assert [(d.code, d.scope.get("endpoint")) for d in found] == [
        ("temperature_other", "http://b"),
        ("other_weights", "http://a"),
    ]


def test_a_broken_rule_beside_a_temperature(logits: Array) -> None:
    rollouts, evidence = play(logits, lambda z: z * 1.1)
    faulty = in_some(sampled_removed(0.3), lambda i, r: i in (2, 3))(rollouts)
    found = diagnose(evidence, faulty)
    assert [d.code for d in found] == ["temperature_other", "sampled_outside_support"]
    assert found[1].scope["first"] == ["2:0", "3:0"]


def made(code: str, *rollouts: str) -> Diagnosis:
    return Diagnosis(code, {"kind": "x", "where": "x"}, "x", rollouts=frozenset(rollouts) or None)


def test_consequences_are_those_of_the_same_rollouts() -> None:
    shifted, outside = made("shifted_by_one", "a", "b"), made("sampled_outside_support", "a")
    assert [d.code for d in without_consequences([shifted, outside])] == ["shifted_by_one"]
    assert [d.also for d in without_consequences([outside, shifted])] == [(outside.code,)]
    apart = made("sampled_outside_support", "b", "c")
    assert without_consequences([shifted, apart]) == [shifted, apart]
    everywhere = made("shifted_by_one")
    assert [d.code for d in without_consequences([everywhere, apart])] == ["shifted_by_one"]
    twice = [made("bias", "a"), made("bias", "b"), made("bias", "a")]
    assert without_consequences(twice) == twice[:2]

"""What picked rollouts share and no other has, in facts and in words."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import make_rollout
from fault_injector import at_endpoint, in_some, sampled_removed, without_support_logprobs
from sides import ROLLOUTS, play, some_logits

from replay.diagnose import diagnose
from rollout.record import Rollout, WeightSpan
from rollout.record_faults import explain_record
from rollout.shared import Traits, in_words, what_only_they_share


def long(r: Rollout, length: int) -> Rollout:
    return replace(r, output_ids=np.zeros(length, np.int32))


def of_version(version: str, r: Rollout) -> Rollout:
    return replace(r, weight_versions=(WeightSpan(version, 0, 3),))


def shared(affected: list[Rollout], others: list[Rollout]) -> dict[str, Any]:
    return what_only_they_share(list(map(Traits.of, affected)), list(map(Traits.of, others)))


def rollouts(n: int, first: int = 0) -> list[Rollout]:
    """Each of another prompt, otherwise alike."""
    return [make_rollout(str(first + i)) for i in range(n)]


AT_A, AT_B, AT_C = (at_endpoint(f"http://{name}") for name in "abc")


@pytest.mark.parametrize(
    ("affected", "others", "facts", "words"),
    [
        pytest.param(rollouts(3), rollouts(5, 3), {}, "", id="nothing"),
        pytest.param(
            [AT_B(r) for r in rollouts(3)],
            [AT_A(r) for r in rollouts(5, 3)],
            {"endpoint": ["http://b"]},
            ", the only ones with endpoint http://b",
            id="an endpoint",
        ),
        pytest.param(
            [at(r) for r in rollouts(2) for at in (AT_B, AT_C)],
            [AT_A(r) for r in rollouts(5, 3)],
            {"endpoint": ["http://b", "http://c"], "prompt": ["0", "1"]},
            ", the only ones with endpoint http://b or http://c and prompt 0 or 1",
            id="two endpoints",
        ),
        pytest.param(
            [AT_B(r) for r in rollouts(3)],
            [AT_A(rollouts(1, 7)[0]), AT_B(rollouts(1, 8)[0])],
            {},
            "",
            id="an endpoint that another has too",
        ),
        pytest.param(
            [replace(r, temperature=0.7) for r in rollouts(3)],
            rollouts(5, 3),
            {"temperature": ["0.7"]},
            ", the only ones with temperature 0.7",
            id="a setting",
        ),
        pytest.param(
            [of_version("v2", r) for r in rollouts(3)],
            rollouts(5, 3),
            {"weight version": ["v2"]},
            ", the only ones with weight version v2",
            id="a weight version",
        ),
        pytest.param(
            [long(r, 40 + i) for i, r in enumerate(rollouts(3))],
            [long(r, 32 - i) for i, r in enumerate(rollouts(5, 3))],
            {"longer_than": 32},
            ", the only ones with more than 32 output tokens",
            id="length",
        ),
        pytest.param(
            [make_rollout("9", i) for i in range(3)],
            rollouts(5),
            {"prompt": ["9"]},
            ", the only ones with prompt 9",
            id="a prompt",
        ),
        pytest.param([make_rollout("9")], rollouts(5), {}, "", id="one rollout has it all"),
        pytest.param(rollouts(5), [], {}, "", id="all rollouts"),
    ],
)
def test_what_only_they_share(
    affected: list[Rollout], others: list[Rollout], facts: dict[str, Any], words: str
) -> None:
    got = shared(affected, others)
    assert (got, in_words(got)) == (facts, words)
    assert json.loads(json.dumps(got)) == facts


def test_two_of_a_few_are_soon_the_two_longest() -> None:
    affected = [long(r, 40) for r in rollouts(2)]
    assert shared(affected, rollouts(5, 3)) == {}


def test_a_diagnosis_of_picked_rollouts_says_what_they_share() -> None:
    """Two samples of a prompt went through another temperature."""
    factor = np.where(np.isin(np.arange(ROLLOUTS), (2, 7)), 1.1, 1.0)[:, None, None]
    made, evidence = play(some_logits(), lambda z: z * factor)
    prompts = ["a" if i in (2, 7) else str(i) for i in range(ROLLOUTS)]
    named = tuple(
        replace(r, prompt_id=p, rollout_id=f"{p}:{i}")
        for i, (r, p) in enumerate(zip(made, prompts, strict=True))
    )
    (got,) = diagnose(replace(evidence, rollouts=named), named)
    assert got.scope["share"] == {"prompt": ["a"]}
    assert got.sentence.startswith(
        "In 2 of 10 rollouts (a:2, a:7), the only ones with prompt a, "
        "the engine sampled at temperature 0."
    )


def test_rollouts_that_break_a_rule_share_too() -> None:
    made, _ = play(some_logits(), noise=0.0)
    faulty = in_some(sampled_removed(0.3), lambda i, r: i % 2 == 1)(made)
    at = [without_support_logprobs((AT_B if i % 2 else AT_A)(r)) for i, r in enumerate(faulty)]
    (got,) = explain_record(at)
    assert got.scope["where"] == "In 5 of 10 rollouts, the only ones with endpoint http://b"
    assert got.scope["share"] == {"endpoint": ["http://b"]}

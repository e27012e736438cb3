"""Each hypothesis on exact numbers made by hand: seed one fault, find that one; no model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from fault_injector import (
    at_endpoint,
    full_stored,
    without_support_logprobs,
)
from sides import ERROR, GRAIN, LENGTH, ROLLOUTS, VOCABULARY, Array, play, sides, some_logits

from replay.diagnose import diagnose
from replay.evidence import Evidence
from replay.hypotheses import HYPOTHESES
from rollout.diagnosis import Diagnosis
from rollout.record import Rollout, WeightSpan
from rollout.self_check import check_engine

Z5 = np.array([3.0, 2.0, 1.0, 0.0, -1.0])


@pytest.fixture(scope="module")
def logits() -> Array:
    return some_logits()


def first(played: tuple[list[Rollout], Evidence]) -> Diagnosis:
    rollouts, evidence = played
    return diagnose(evidence, rollouts, check_engine(rollouts))[0]


def forgets_supports(evidence: Evidence) -> Evidence:
    """As if the engine had recorded the sampled token alone."""
    return replace(evidence, support_logprobs=np.full_like(evidence.support_logprobs, np.nan))


def sampled_only(played: tuple[list[Rollout], Evidence]) -> tuple[list[Rollout], Evidence]:
    rollouts, evidence = played
    return [without_support_logprobs(r) for r in rollouts], forgets_supports(evidence)


def test_honest_noise_is_clean(logits: Array) -> None:
    for noise in (0.0, 1e-5, 0.02, 0.06):
        got = first(play(logits, noise=noise))
        assert (got.code, got.scope["kind"]) == ("clean", "all"), noise
        assert first(sampled_only(play(logits, noise=noise))).code == "clean", noise


@pytest.mark.parametrize("only_sampled", [False, True], ids=["whole support", "sampled only"])
@pytest.mark.parametrize(
    ("code", "temperature", "change"),
    [
        pytest.param("temperature_ignored", 0.5, lambda z: z, id="ignored"),
        pytest.param("temperature_doubled", 0.7, lambda z: z / 0.49, id="doubled"),
        pytest.param("temperature_other", 0.7, lambda z: z / 0.77, id="other"),
        pytest.param("temperature_other", 1.0, lambda z: z * 1.05, id="a scale"),
    ],
)
def test_temperature(
    logits: Array,
    code: str,
    temperature: float,
    change: Callable[[Array], Array],
    only_sampled: bool,
) -> None:
    played = play(logits, change, temperature=temperature)
    got = first(sampled_only(played) if only_sampled else played)
    assert (got.code, got.scope["kind"]) == (code, "all")


def test_the_temperature_is_estimated_and_an_ignored_one_told_from_it() -> None:
    """z = [3, 2, 1, 0, -1], S = {0, 1}: -2.126928 at T 0.5 for id 1, -1.313262 with T ignored."""
    z = np.broadcast_to(Z5, (8, 6, 5))
    outputs = np.tile([1, 0, 0, 1, 0, 0], (8, 1))
    supports = [[[0, 1]] * 6] * 8
    rollouts, evidence = sides(z, z / 0.5, supports, outputs, temperature=1.0)
    assert rollouts[0].sampling_logprobs[0] == pytest.approx(-2.126928, abs=1e-6)
    assert evidence.replay[0] == pytest.approx(-1.313262, abs=1e-6)
    got = diagnose(evidence, rollouts)[0]
    assert (got.code, got.evidence["temperature"]) == ("temperature_other", [0.5])
    assert "logit_scale" in got.also

    _, evidence = sides(z, z, supports, outputs, temperature=0.5)
    assert evidence.sampling[0] == pytest.approx(-1.313262, abs=1e-6)
    assert diagnose(evidence, rollouts)[0].code == "temperature_ignored"


def test_a_bf16_grid_makes_the_temperature_exact(logits: Array) -> None:
    on_grid = np.round(logits * 16) / 16
    got = first(play(on_grid, lambda z: z / 0.735, noise=0.0, temperature=0.7))
    assert got.code == "temperature_other"
    assert got.evidence["temperature"] == [0.735]
    assert got.evidence["on_bf16_grid"]["estimate"] > 0.95
    slightly = first(play(on_grid, lambda z: z / 0.707, noise=0.0, temperature=0.7))
    assert slightly.code == "temperature_other", "1 %, inside the dead band of the fit"


def test_a_gap_of_the_kept_mass_is_the_support_not_applied() -> None:
    """S = {0, 1}: over the support -1.313262, over everything -1.451914."""
    z = np.broadcast_to(Z5, (8, 6, 5))
    outputs = np.tile([1, 0, 0, 1, 0, 0], (8, 1))
    rollouts, evidence = sides(z, z, [[[0, 1]] * 6] * 8, outputs)
    stored = forgets_supports(replace(evidence, sampling=evidence.full))
    assert stored.sampling[0] - stored.replay[0] == pytest.approx(-0.138653, abs=1e-6)
    got = diagnose(stored, [full_stored(r) for r in rollouts])[0]
    assert got.code == "full_logprobs_stored"
    assert got.evidence["share_of_mismatch_removed"] > 0.999


@pytest.mark.parametrize(
    ("change", "policy", "softcap", "facts"),
    [
        pytest.param(
            lambda z: 30 * np.tanh(z / 30), lambda z: z, None, ("cap", 30), id="only the engine"
        ),
        pytest.param(
            lambda z: z, lambda z: 30 * np.tanh(z / 30), 30.0, ("policy_cap", 30), id="only policy"
        ),
    ],
)
def test_softcap(
    logits: Array,
    change: Callable[[Array], Array],
    policy: Callable[[Array], Array],
    softcap: float | None,
    facts: tuple[str, float],
) -> None:
    got = first(play(logits, change, policy, softcap=softcap))
    assert got.code == "softcap"
    assert got.evidence[facts[0]] == pytest.approx(facts[1], rel=0.05)


def moved(ids: dict[int, float]) -> Callable[[Array], Array]:
    shift = np.zeros(VOCABULARY)
    for token, by in ids.items():
        shift[token] = by
    return lambda z: z + shift


def test_bias_names_its_ids(logits: Array) -> None:
    got = first(play(logits, moved({7: 1.0, 11: -0.8})))
    assert (got.code, got.scope["kind"]) == ("bias", "ids")
    assert got.evidence["ids"] == {
        7: pytest.approx(1.0, abs=0.1),
        11: pytest.approx(-0.8, abs=0.1),
    }


def test_penalty_is_told_from_bias(logits: Array) -> None:
    generator = np.random.default_rng(2)
    few = logits.copy()
    few[:, :, :10] += 6  # so that ids come again
    supports = [[np.argsort(-z)[:8].tolist() for z in rows] for rows in few]
    outputs = np.array([[generator.choice(s[:4]) for s in rows] for rows in supports])
    engine = few + generator.normal(0, 0.02, few.shape)
    for n, output in enumerate(outputs):
        for t in range(LENGTH):
            engine[n, t, np.unique(output[:t]).astype(int)] -= 0.5
    got = first(sides(few, engine, supports, outputs))
    assert got.code == "penalty"
    assert got.evidence["shift"] == pytest.approx(-0.5, abs=0.05)


def test_other_weights_are_what_nothing_explains(logits: Array) -> None:
    wild = np.random.default_rng(5).normal(0, 0.3, logits.shape)
    got = first(play(logits, lambda z: z + wild))
    assert (got.code, got.scope["kind"]) == ("other_weights", "all")
    assert got.evidence["over_noise_floor"] > 5


def test_other_weights_are_named_from_twice_the_noise_on(logits: Array) -> None:
    wild = np.random.default_rng(5).normal(0, 0.02 * 3**0.5, logits.shape)
    got = first(play(logits, lambda z: z + wild, noise=0.02))
    assert (got.code, got.scope["kind"]) == ("other_weights", "all")
    assert got.evidence["over_noise_floor"] == pytest.approx(2, abs=0.2)


def test_ids_that_moved_most_in_other_weights_are_no_bias(logits: Array) -> None:
    """Training moves some ids more than others; a bias leaves noise and nothing else."""
    moved = np.where(np.arange(VOCABULARY) < 5, 0.4, 0.0)
    assert first(play(logits, lambda z: z + moved)).code == "bias"
    wild = np.random.default_rng(5).normal(0, 0.04, logits.shape)
    rollouts, evidence = play(logits, lambda z: z + moved + wild)
    assert [d.code for d in diagnose(evidence, rollouts)] == ["other_weights"]


def test_stale_weights_are_named_by_their_version(logits: Array) -> None:
    wild = np.random.default_rng(5).normal(0, 0.3, logits.shape)
    wild[:, LENGTH // 2 :] = 0
    rollouts, evidence = play(logits, lambda z: z + wild)
    half = LENGTH // 2
    spans = (WeightSpan("v1", 0, half), WeightSpan("v2", half, LENGTH))
    dated = tuple(replace(r, weight_versions=spans) for r in rollouts)
    got = diagnose(replace(evidence, rollouts=dated), dated)[0]
    assert (got.code, got.scope["kind"], got.scope["version"]) == ("other_weights", "version", "v1")
    assert "other weights (those of another version)" in got.sentence


def test_from_a_token_on(logits: Array) -> None:
    wild = np.random.default_rng(5).normal(0, 0.3, logits.shape)
    wild[:, :16] = 0
    got = first(play(logits, lambda z: z + wild))
    assert (got.code, got.scope["kind"], got.scope["from_token"]) == ("other_weights", "tail", 16)
    assert "other weights (stale ones, from that point on)" in got.sentence


def test_an_endpoint_of_its_own(logits: Array) -> None:
    factor = np.where(np.arange(ROLLOUTS) % 2, 1.1, 1.0)[:, None, None]
    rollouts, evidence = play(logits, lambda z: z * factor)
    at = tuple(at_endpoint("http://b" if i % 2 else "http://a")(r) for i, r in enumerate(rollouts))
    got = diagnose(replace(evidence, rollouts=at), at)[0]
    assert (got.code, got.scope["kind"]) == ("temperature_other", "endpoint")
    assert got.scope["endpoint"] == "http://b"
    assert got.evidence["logit_factor"] == pytest.approx(1.1, rel=0.01)


def test_a_few_rollouts(logits: Array) -> None:
    factor = np.where(np.isin(np.arange(ROLLOUTS), (2, 7)), 1.1, 1.0)[:, None, None]
    got = first(play(logits, lambda z: z * factor))
    assert (got.code, got.scope["kind"]) == ("temperature_other", "rollouts")
    assert got.scope["first"] == ["2:0", "7:0"]


def test_another_prompt_is_named_when_it_agrees(logits: Array) -> None:
    wild = np.random.default_rng(5).normal(0, 0.3, logits.shape)
    rollouts, evidence = play(logits, lambda z: z + wild)
    _, agrees = play(logits)
    asked: list[str] = []

    def rescore(changed: list[Rollout]) -> Evidence:
        name = json.loads(changed[0].extra)["name"]
        asked.append(name)
        return agrees if name == "with BOS in front" else evidence

    def candidates(some: list[Rollout]) -> dict[str, list[Rollout]]:
        names = ("without the template", "with BOS in front", "third", "fourth")
        return {n: [replace(r, extra=json.dumps({"name": n})) for r in some] for n in names}

    got = diagnose(evidence, rollouts, None, rescore, candidates)[0]
    assert got.code == "prompt_differs"
    assert "with BOS in front" in got.sentence
    assert len(asked) == 3, "at most three are replayed"
    asked.clear()
    assert diagnose(agrees, rollouts, None, rescore, candidates)[0].code == "clean"
    assert asked == [], "nothing is replayed without need"


@pytest.mark.parametrize("seed", range(6))
def test_rollouts_of_a_prompt_that_begin_alike_are_one_observation(
    logits: Array, seed: int
) -> None:
    """Twenty equal answers hold the same noise twenty times, and no evidence for a cause."""
    answer = logits[:1, :4]
    noise = np.random.default_rng(seed).normal(0, 1.4 * ERROR * GRAIN, answer.shape)
    policy, engine = (np.repeat(z, 20, axis=0) for z in (answer, answer + noise))
    supports = [[np.argsort(-z)[:8].tolist() for z in rows] for rows in policy]
    outputs = np.array([[ids[0] for ids in rows] for rows in supports])
    rollouts, evidence = sides(policy, engine, supports, outputs)
    assert len(evidence) == 80
    assert len(np.unique(evidence.context)) == 4
    assert diagnose(evidence, rollouts)[0].code == "clean"


@pytest.mark.parametrize("only_sampled", [False, True], ids=["whole support", "sampled only"])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.2])
def test_weights_that_have_little_in_common_are_no_temperature_and_no_cap(
    logits: Array, share: float, only_sampled: bool
) -> None:
    """The less two sides go together, the flatter one looks against the other."""
    other = np.random.default_rng(9).normal(12, 3, logits.shape)
    played = play(logits, policy=lambda z: (1 - share) * z + share * other)
    got = first(sampled_only(played) if only_sampled else played)
    assert (got.code, got.scope["kind"]) == ("other_weights", "all")


def test_codes_are_distinct_and_have_words() -> None:
    codes = [h.code for h in HYPOTHESES]
    assert len(set(codes)) == len(codes)
    assert all(h.sentence and h.advice for h in HYPOTHESES)


def test_a_diagnosis_is_json_ready(logits: Array) -> None:
    got = first(play(logits, moved({7: 1.0})))
    assert json.loads(json.dumps(got.as_dict()))["code"] == "bias"

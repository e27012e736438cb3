"""Each hypothesis on exact numbers made by hand: seed one fault, find that one; no model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from builders import make_rollout
from fault_injector import (
    at_endpoint,
    declared_order,
    duplicated,
    every,
    full_stored,
    in_some,
    padded,
    sampled_removed,
    supports_shifted,
    truncated,
    without_support_logprobs,
)
from numpy.typing import NDArray

from replay.diagnose import diagnose, strength
from replay.evidence import Evidence, make_evidence
from replay.hypotheses import HYPOTHESES
from rollout.diagnosis import Diagnosis
from rollout.record import Rollout, WeightSpan
from rollout.self_check import EngineCheck, check_engine
from rollout.support import Support

Array = NDArray[np.float64]
VOCABULARY, LENGTH, ROLLOUTS = 60, 32, 10
Z5 = np.array([3.0, 2.0, 1.0, 0.0, -1.0])


def lse(z: Array) -> Array:
    return np.logaddexp.reduce(z, axis=-1)


def sides(
    policy: Array,  # [n, R, V] logits
    engine: Array,  # [n, R, V] logits, temperature and all
    supports: list[list[list[int]]],  # per rollout and token
    outputs: NDArray[np.int32],  # [n, R]
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[list[Rollout], Evidence]:
    """What an engine with logits `engine` records, and what a policy says about it."""
    rollouts, parts = [], []
    for n, rows in enumerate(supports):
        length = len(rows)
        of_engine = [engine[n, t][ids] for t, ids in enumerate(rows)]
        per_id = np.concatenate([z - lse(z) for z in of_engine])
        at = [ids.index(y) for ids, y in zip(rows, outputs[n], strict=True)]
        sampling = [z[i] - lse(z) for z, i in zip(of_engine, at, strict=True)]
        full = [engine[n, t][y] - lse(engine[n, t]) for t, y in enumerate(outputs[n])]
        rollout = make_rollout(
            str(n),
            output_ids=outputs[n].astype(np.int32),
            loss_mask=np.ones(length, np.int8),
            support=Support.from_rows(rows),
            sampling_logprobs=np.array(sampling, np.float32),
            full_logprobs=np.array(full, np.float32),
            support_logprobs=per_id.astype(np.float32),
            temperature=temperature,
            weight_versions=(),
        )
        rollouts.append(rollout)
        parts.append(scored(rollout, policy[n], softcap))
    return rollouts, Evidence.concatenate(parts)


def scored(rollout: Rollout, policy: Array, softcap: float | None = None) -> Evidence:
    """The policy's numbers [R, V] for a rollout as it stands; the other precision is bf16-like."""
    z = policy / rollout.temperature
    rough = np.round(policy * 16) / 16 / rollout.temperature
    rows = [rollout.support[t] for t in range(len(rollout.support))]
    sums = np.array([lse(z[t][ids]) for t, ids in enumerate(rows)])
    return make_evidence(
        [rollout],
        np.concatenate([z[t][ids] - sums[t] for t, ids in enumerate(rows)]),
        np.concatenate([rough[t][ids] - lse(rough[t][ids]) for t, ids in enumerate(rows)]),
        z[np.arange(len(rows)), rollout.output_ids] - lse(z),
        sums,
        softcap,
    )


@pytest.fixture(scope="module")
def logits() -> Array:
    """[n, R, V], the size of real ones: the largest about 20."""
    generator = np.random.default_rng(0)
    return generator.normal(12, 3, (ROLLOUTS, LENGTH, VOCABULARY))


def play(
    logits: Array,
    change: Callable[[Array], Array] = lambda z: z,
    policy: Callable[[Array], Array] = lambda z: z,
    noise: float = 0.02,
    **record: float,
) -> tuple[list[Rollout], Evidence]:
    """The eight largest logits are the support; engine logits are `change`d, with honest noise."""
    generator = np.random.default_rng(1)
    engine = change(logits + generator.normal(0, noise, logits.shape))
    supports = [[np.argsort(-z)[:8].tolist() for z in rows] for rows in logits]
    outputs = np.array([[generator.choice(s[:4]) for s in rows] for rows in supports])
    return sides(policy(logits), engine, supports, outputs, **record)


def first(played: tuple[list[Rollout], Evidence]) -> Diagnosis:
    rollouts, evidence = played
    return diagnose(evidence, rollouts, check_engine(rollouts))[0]


def sampled_only(played: tuple[list[Rollout], Evidence]) -> tuple[list[Rollout], Evidence]:
    rollouts, evidence = played
    return [without_support_logprobs(r) for r in rollouts], evidence.sampled_only()


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


def test_best_fit_temperature_of_a01() -> None:
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


def test_the_gap_of_a02_is_the_support_not_applied() -> None:
    """S = {0, 1}: over the support -1.313262, over everything -1.451914."""
    z = np.broadcast_to(Z5, (8, 6, 5))
    outputs = np.tile([1, 0, 0, 1, 0, 0], (8, 1))
    rollouts, evidence = sides(z, z, [[[0, 1]] * 6] * 8, outputs)
    stored = replace(evidence, sampling=evidence.full).sampled_only()
    assert stored.sampling[0] - stored.replay[0] == pytest.approx(-0.138653, abs=1e-6)
    got = diagnose(stored, [full_stored(r) for r in rollouts])[0]
    assert got.code == "full_logprobs_stored"
    assert got.evidence["share_of_mismatch_removed"] > 0.999


def test_full_logprobs_are_seen_without_a_trainer(logits: Array) -> None:
    rollouts, _ = play(logits, noise=0.0)
    got = diagnose(None, [full_stored(r) for r in rollouts])
    assert [d.code for d in got] == ["full_logprobs_stored"]


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


def test_one_row_of_the_head_a13() -> None:
    """200 rows, 50 of which have id 3 in their support, whose logit is 0.5 higher in replay."""
    generator = np.random.default_rng(3)
    z = np.where(np.arange(20) == 3, 15.0, generator.normal(15, 1, (10, 20, 20)))
    supports = [[[0, 1, 2, *([3] if t % 4 == 0 else [4])] for t in range(20)] for _ in range(10)]
    outputs = np.array([[s[t % 4] for t, s in enumerate(rows)] for rows in supports])
    rollouts, evidence = sides(z + np.where(np.arange(20) == 3, 0.5, 0), z, supports, outputs)
    differs = np.abs(evidence.as_recorded) > 1e-5
    assert (differs.sum(), len(evidence)) == (50, 200)
    got = diagnose(evidence, rollouts)[0]
    assert got.code == "bias"
    assert got.evidence["ids"] == {3: pytest.approx(-0.5, abs=1e-3)}
    assert got.evidence["tokens"] == 50
    assert "other_weights" in got.also, "a stale row of the head predicts the same"


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


def test_stale_weights_are_named_by_their_version(logits: Array) -> None:
    wild = np.random.default_rng(5).normal(0, 0.3, logits.shape)
    wild[:, LENGTH // 2 :] = 0
    rollouts, evidence = play(logits, lambda z: z + wild)
    half = LENGTH // 2
    spans = (WeightSpan("v1", 0, half), WeightSpan("v2", half, LENGTH))
    dated = tuple(replace(r, weight_versions=spans) for r in rollouts)
    got = diagnose(replace(evidence, rollouts=dated), dated)[0]
    assert (got.code, got.scope["kind"], got.scope["version"]) == ("other_weights", "version", "v1")


def test_from_a_token_on(logits: Array) -> None:
    wild = np.random.default_rng(5).normal(0, 0.3, logits.shape)
    wild[:, :16] = 0
    got = first(play(logits, lambda z: z + wild))
    assert (got.code, got.scope["kind"], got.scope["from_token"]) == ("other_weights", "tail", 16)


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


def test_a_sampled_token_outside_its_support_of_b01() -> None:
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


def test_small_noise_and_one_wild_token_of_a16() -> None:
    """10,000 tokens with N(0, 0.02); one with 3.0; one outside its support."""
    generator = np.random.default_rng(0)
    z = generator.normal(15, 1, (50, 200, 4))
    supports = [[[0, 1, 2, 3]] * 200] * 50
    outputs = generator.integers(0, 4, (50, 200))
    rollouts, exact = sides(z, z, supports, outputs)
    noisy = exact.sampling + generator.normal(0, 0.02, 10_000)
    gap = np.abs(noisy - exact.replay)
    assert gap.mean() == pytest.approx(0.0160, abs=3e-4)
    assert np.percentile(gap, 99) == pytest.approx(0.0515, abs=2e-3)
    evidence = replace(exact, sampling=noisy).sampled_only()
    bare = [without_support_logprobs(r) for r in rollouts]
    assert diagnose(evidence, bare)[0].code == "clean"
    noisy[77] += 3.0
    assert diagnose(evidence, bare)[0].code == "clean", "one token says nothing"
    bare[3] = replace(bare[3], support=Support.from_rows([[0, 1, 2, 3]] * 199 + [[9]]))
    got = diagnose(evidence, bare)[0]
    assert (got.code, got.evidence["tokens"]) == ("sampled_outside_support", 1)


def test_a_declared_filter_order_that_the_numbers_contradict(logits: Array) -> None:
    rollouts, evidence = play(logits, noise=0.0)
    engine = replace(check_engine([]), filter_order="joint", sequential_violated=40)
    declared = [declared_order("sequential")(r) for r in rollouts]
    got = diagnose(evidence, declared, engine)
    assert [d.code for d in got] == ["filter_order"]
    assert diagnose(evidence, rollouts, engine)[0].code == "clean"


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


def test_strength_counts_rollouts_not_tokens() -> None:
    gain = np.repeat([1.0, -0.9, 1.1, -1.0, 0.9, -1.1, 1.0, -0.8], 100)
    assert abs(strength(gain, np.repeat(np.arange(8), 100))) < 1
    assert strength(np.ones(40), np.repeat(np.arange(8), 5)) == np.inf
    assert strength(np.zeros(5), np.zeros(5, int)) == 0


def test_codes_are_distinct_and_have_words() -> None:
    codes = [h.code for h in HYPOTHESES]
    assert len(set(codes)) == len(codes)
    assert all(h.sentence and h.advice for h in HYPOTHESES)


def test_too_few_tokens_say_so() -> None:
    got = diagnose(None, [make_rollout()])
    assert [d.code for d in got] == ["clean"]
    assert "too few" in got[0].sentence


def test_a_diagnosis_is_json_ready(logits: Array) -> None:
    got = first(play(logits, moved({7: 1.0})))
    assert json.loads(json.dumps(got.as_dict()))["code"] == "bias"


def test_nothing_known_about_the_engine_is_no_order() -> None:
    unknown: EngineCheck = check_engine([])
    declared = [declared_order("sequential")(make_rollout())]
    assert diagnose(None, declared, unknown)[0].code == "clean"

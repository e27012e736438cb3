"""The support audit of rollouts: classes, odd ids, tolerance, what is left out and why."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from builders import make_rollout

from replay import GatesConfig, make_report
from replay.audit import FLOOR, Auditor, Semantics, exclusion
from replay.audit_result import CLASSES, Audit, Tolerance, classify, lower_bound
from replay.batch import pack
from replay.facts import Head
from replay.score import score_support
from replay.tokens import TokenTable, recorded
from replay.verify import Verified
from rollout.record import Rollout
from rollout.rules import find_faults
from rollout.support import Support

P = [0.4, 0.3, 0.2, 0.1]
JOINT_KEEP = '{"filter_order":"joint","tie_policy":"keep"}'


def sampled(
    supports: Sequence[Sequence[int]], drawn: Sequence[int], name: str = "0", **changes: Any
) -> Rollout:
    """Supports of an engine whose probabilities are `P` at every step."""
    mass = [sum(P[i] for i in ids) for ids in supports]
    plain: dict[str, Any] = {
        "output_ids": np.array(drawn, np.int32),
        "loss_mask": np.ones(len(drawn), np.int8),
        "support": Support.from_rows(supports),
        "sampling_logprobs": np.log([P[y] / m for y, m in zip(drawn, mass, strict=True)]),
        "full_logprobs": None,
        "support_logprobs": np.log(
            [P[i] / m for ids, m in zip(supports, mass, strict=True) for i in ids]
        ),
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 2,
        "engine_meta": JOINT_KEEP,
        "weight_versions": (),
    }
    for column in ("sampling_logprobs", "support_logprobs"):
        plain[column] = plain[column].astype(np.float32)
    return make_rollout(name, **(plain | changes))


def audited(rollouts: list[Rollout], tokens: int = 10_000, **options: Any) -> Audit:
    """Under a trainer whose logits are log `P`, whatever the token."""
    head = Head(torch.tensor(P).log()[:, None])
    faults = {r.rollout_id: find_faults(r, 4) for r in rollouts}
    auditor = Auditor(rollouts, tokens, faults, **options)
    for batch in pack(rollouts, 8):
        hidden = torch.ones(len(batch.targets), 1)
        scores = score_support(
            hidden, head.weight, batch.targets, batch.support_ids, batch.support_offsets,
            temperature=batch.temperature, return_support_logprobs=True, check=False,
        )  # fmt: skip
        assert scores.support_logprobs is not None
        auditor.add(batch, hidden, head, scores.support_logprobs)
    return auditor.finish(head)


def test_honest_supports_are_robust_at_the_floor_of_the_tolerance() -> None:
    audit = audited([sampled([[0, 1]] * 5, [0, 1, 0, 0, 1])])
    got = audit.as_dict()
    assert got["classes"] == {"robust": 5, "consistent": 0, "explainable": 0, "inconsistent": 0}
    assert got["tolerance"] == {"logits": FLOOR, "source": "support_logprobs", "tokens": 5}
    assert (got["exact_prefixes"], got["inconsistent"], got["worst"]) == (1.0, 0.0, [])
    assert got["semantics"] == {"joint, ties keep": 5}


def test_a_mask_patched_with_the_drawn_token_is_named() -> None:
    """Sampled without top_k, mask rebuilt with top_k 2, patched with what was drawn."""
    patched = sampled([[0, 1, 2], [0, 1]], [2, 1])
    np.testing.assert_allclose(patched.sampling_logprobs[0], math.log(0.2 / 0.9), rtol=1e-6)
    audit = audited([patched])
    (row,) = audit.as_dict()["worst"]
    assert (row["rollout_id"], row["position"], row["class"]) == ("0:0", 0, "inconsistent")
    assert row["condition"] == "top_k"
    assert row["eps"] == pytest.approx(math.log(0.3 / 0.2) / 2, abs=1e-6)
    assert [odd["id"] for odd in row["extra"]] == [2]
    assert (row["expected_size"], row["missing"]) == (2, [])
    assert row["extra"][0]["rank"] == 2
    assert row["extra"][0]["logit"] == pytest.approx(math.log(0.2), abs=1e-6)
    assert row["extra"][0]["margin"] == pytest.approx(math.log(0.3 / 0.2), abs=1e-6)
    assert row["repair_fingerprint"]
    assert audit.as_dict()["repair_fingerprints"] == 1
    json.dumps(audit.as_dict(), allow_nan=False)


def test_an_id_that_was_not_drawn_is_no_repair() -> None:
    got = audited([sampled([[0, 1, 2]], [1])]).as_dict()
    assert (got["classes"]["inconsistent"], got["repair_fingerprints"]) == (1, 0)


def test_an_intruder_and_an_absentee_have_rank_logit_and_margin() -> None:
    """{0, 3}: 1 is inside for the trainer and missing, 3 is outside and there."""
    got = audited([sampled([[0, 3]], [3], temperature=0.5)]).as_dict()
    (row,) = got["worst"]
    (extra,), (missing,) = row["extra"], row["missing"]
    assert (extra["id"], extra["rank"], missing["id"], missing["rank"]) == (3, 3, 1, 1)
    assert extra["margin"] == pytest.approx(math.log(3), abs=1e-5)  # logits, before temperature
    assert missing["margin"] == pytest.approx(math.log(1.5), abs=1e-5)
    assert row["eps"] == pytest.approx(math.log(3), abs=1e-5)  # half of twice that, in z/T
    assert row["eps_logits"] == pytest.approx(math.log(3) / 2, abs=1e-5)


@pytest.mark.parametrize(
    ("meta", "inconsistent"),
    [
        pytest.param(JOINT_KEEP, 1, id="joint"),
        pytest.param('{"filter_order":"sequential","tie_policy":"keep"}', 0, id="sequential"),
        pytest.param("{}", 0, id="not recorded: either"),
    ],
)
def test_the_order_of_the_filters_is_the_recorded_one(meta: str, inconsistent: int) -> None:
    """{0, 1} of p = .4 .3 .2 .1: 7/9 of the top 3 is enough for 0.75, 0.7 of all is not."""
    r = sampled([[0, 1]], [0], top_k=3, top_p=0.75, engine_meta=meta)
    assert audited([r]).as_dict()["classes"]["inconsistent"] == inconsistent
    told = audited([r], semantics=lambda r: Semantics("joint", "cut"))
    assert told.as_dict()["classes"]["inconsistent"] == 1, "what is told wins"


@pytest.mark.parametrize(
    "sent",
    [
        {"regex": "a+"}, {"json_schema": "{}"}, {"ebnf": "x"}, {"structural_tag": "{}"},
        {"min_new_tokens": 4}, {"custom_params": {"token_ids": [1]}}, {"logit_bias": {"1": -1e9}},
    ],
    ids=lambda sent: next(iter(sent)),
)  # fmt: skip
def test_excluded_ids_leave_prefix_and_mass_untested_and_that_is_said(sent: dict[str, Any]) -> None:
    r = sampled([[0, 2]], [2], top_p=0.5, sampling_params=json.dumps(sent))
    got = audited([r]).as_dict()
    assert got["classes"]["consistent"] == 1
    assert got["without_prefix_and_mass"] == {exclusion(r): {"rollouts": 1, "tokens": 1}}
    too_many = audited([replace(r, support=Support.from_rows([[0, 1, 2]]), support_logprobs=None)])
    assert too_many.as_dict()["worst"][0]["expected_size"] is None


def test_what_excludes_nothing_is_audited_in_full() -> None:
    sent = {"min_new_tokens": 0, "regex": None, "custom_params": {}, "stop": ["x"]}
    assert exclusion(sampled([[0, 1]], [0], sampling_params=json.dumps(sent))) is None


def test_a_support_that_is_no_set_is_skipped() -> None:
    got = audited([sampled([[0, 1], [0, 0]], [1, 0])]).as_dict()
    assert (got["tokens"], got["of"]) == (1, 2)
    assert got["skipped"] == {"duplicate_ids": {"rollouts": 1, "tokens": 1}}


def test_a_sample_is_drawn_with_a_fixed_seed_over_all_rollouts() -> None:
    rollouts = [sampled([[0, 1]] * 6, [0] * 6, str(i)) for i in range(9)]
    first, second = audited(rollouts, 20), audited(rollouts, 20)
    assert (len(first), first.sampled_tokens) == (20, 54)
    assert first.position.tolist() == second.position.tolist()
    assert len(set(zip(first.rollout_id, first.position, strict=True))) == 20
    assert len(set(first.rollout_id)) > 5


def test_the_tolerance_is_the_half_range_of_what_both_sides_say() -> None:
    """Engine logits moved by +0.1 and -0.1 at T 2: half-range 0.1 over z/T, 0.2 in logits."""
    r = sampled([[0, 1]], [0], temperature=2.0)
    both = torch.tensor(P[:2]).log() / 2
    lps = (both + torch.tensor([0.1, -0.1])).log_softmax(0).numpy()
    r = replace(r, support_logprobs=lps, sampling_logprobs=lps[:1])
    got = audited([r]).tolerance
    assert (got.source, got.tokens) == ("support_logprobs", 1)
    assert got.logits == pytest.approx(0.2, abs=1e-5)


def test_without_support_logprobs_the_sampled_tokens_tell_the_tolerance() -> None:
    r = sampled([[0, 1]], [0], support_logprobs=None)
    r = replace(r, sampling_logprobs=r.sampling_logprobs - np.float32(0.05))
    got = audited([r]).tolerance
    assert (got.source, got.logits) == ("log_ratio", pytest.approx(0.1, abs=1e-5))


def test_singletons_tell_no_tolerance() -> None:
    got = audited([sampled([[0]], [0], top_k=1)])
    assert got.tolerance == Tolerance(FLOOR, "none", 0)
    assert got.as_dict()["classes"]["robust"] == 1


def test_a_few_broken_rows_do_not_widen_their_own_tolerance() -> None:
    honest = sampled([[0, 1]] * 90, [0] * 90)
    wrong = sampled([[0, 1]] * 10, [0] * 10, "1")
    lps = np.log(np.tile([0.01, 0.99], 10)).astype(np.float32)
    assert audited([honest, replace(wrong, support_logprobs=lps)]).tolerance.logits == FLOOR


@pytest.mark.parametrize(
    ("margin", "name"),
    [(0.6, "robust"), (0.5, "consistent"), (0.0, "consistent"), (-0.1, "explainable"),
     (-0.5, "explainable"), (-0.51, "inconsistent"), (-math.inf, "inconsistent")],
)  # fmt: skip
def test_classes(margin: float, name: str) -> None:
    margins, temperature = np.array([[margin, 9, 9, 9]]), np.array([2.0])
    assert CLASSES[classify(margins, temperature, Tolerance(1.0, "none", 0))[0]] == name


@pytest.mark.parametrize(
    ("count", "total", "passes"),
    [(0, 1, True), (1, 12, True), (2, 12, False), (12, 12, False), (6, 1000, True),
     (8, 512, True), (20, 512, False)],
)  # fmt: skip
def test_the_gate_allows_for_chance(count: int, total: int, passes: bool) -> None:
    assert (lower_bound(count, total) <= GatesConfig().audit_inconsistent) is passes


def test_the_report_has_the_audit_and_its_gate() -> None:
    r = sampled([[0, 3]] * 9, [3] * 9)
    table = TokenTable.concatenate([recorded(r, [])])
    report = make_report(Verified(table, (), 1, audit=audited([r])), GatesConfig(), {})
    assert [gate.name for gate in report.failed_gates] == ["audit_inconsistent"]
    assert report.as_dict()["audit"]["classes"]["inconsistent"] == 9
    without = make_report(Verified(table, (), 1), GatesConfig(), {}).as_dict()
    assert (without["audit"], without["gates"]["audit_inconsistent"]["value"]) == (None, None)


def test_a_logit_that_is_no_number_is_skipped_not_judged() -> None:
    """Outside every support, so that only the whole vocabulary knows of it."""
    r = sampled([[0, 1]] * 3, [0, 1, 0])
    (batch,) = pack([r], 99)
    weight = torch.tensor([*P[:3], math.nan]).log()[:, None]
    auditor = Auditor([r], 99, {})
    auditor.add(batch, torch.ones(3, 1), Head(weight), torch.zeros(len(batch.support_ids)))
    got = auditor.finish(Head(weight)).as_dict()
    assert (got["tokens"], got["inconsistent_at_least"]) == (0, None)
    assert got["skipped"] == {"nonfinite_replay": {"rollouts": 1, "tokens": 3}}

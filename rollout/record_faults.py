"""Causes that the record alone shows: broken content rules, judged over all rollouts at once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rollout.diagnosis import Diagnosis, without_consequences
from rollout.record import Rollout
from rollout.rules import SENTINEL, SUM_SLACK, find_faults
from rollout.self_check import UNKNOWN, EngineCheck, check_engine

MIN_TOKENS = 10


Implausible = Callable[[str, int], int]
"""Tokens of a rollout where the policy puts an id far below every other id of the support."""


def explain_record(rollouts: Sequence[Rollout]) -> list[Diagnosis]:
    """What is wrong with `rollouts`, which may break content rules; none where nothing is."""
    found = [
        *find_record_faults(rollouts, check_engine(rollouts)),
        *_full_stored(rollouts),
    ]
    whole = [d for d in found if d.code in WHOLE_FILE]
    return without_consequences([*whole, *(d for d in found if d.code not in WHOLE_FILE)])


def find_record_faults(
    rollouts: Sequence[Rollout],
    engine: EngineCheck | None,
    implausible: Implausible = lambda rollout_id, pad: 0,
) -> list[Diagnosis]:
    """Whole-file causes first, then each broken rule by its own code, most tokens first."""
    return [
        *_shifted(rollouts),
        *_padded(rollouts, implausible),
        *_broken_rules(rollouts),
        *_declared_order(rollouts, engine),
    ]


WHOLE_FILE = ("shifted_by_one", "support_padded", "full_logprobs_stored")

ADVICE = {
    "duplicate_ids": "deduplicate where supports are made: an id twice counts twice in the sum",
    "sampled_outside_support": "record the set that was sampled from; one rebuilt beside the "
    "sampler can miss the token",
    "support_truncated": "record every id of the support; a limit on its length cuts it",
}


def _broken_rules(rollouts: Sequence[Rollout]) -> list[Diagnosis]:
    tokens: Counter[str] = Counter()
    first: dict[str, str] = {}
    names: dict[str, list[str]] = {}
    for rollout in rollouts:
        for fault in find_faults(rollout):
            tokens[fault.code] += len(fault.positions)
            first.setdefault(fault.code, f"{rollout.rollout_id}: {fault.message}")
            names.setdefault(fault.code, []).append(rollout.rollout_id)
    return [
        Diagnosis(
            code,
            _scope(sorted(set(names[code])), rollouts),
            f"{count} tokens break the rule {code}; first {first[code]}.",
            {"tokens": count},
            ADVICE.get(code, "see the rule in docs/format.md"),
        )
        for code, count in tokens.most_common()
    ]


def _scope(names: Sequence[str], rollouts: Sequence[Rollout]) -> dict[str, Any]:
    if len(names) >= 0.95 * len(rollouts):
        return {"kind": "all", "where": "In every rollout"}
    return {
        "kind": "rollouts",
        "where": f"In {len(names)} of {len(rollouts)} rollouts",
        "rollouts": len(names),
        "first": list(names[:10]),
    }


def _shifted(rollouts: Sequence[Rollout]) -> list[Diagnosis]:
    """Supports that hold the neighbouring output token, but not their own."""
    names, steps, tokens = [], Counter[int](), 0
    for r in rollouts:
        if r.num_output_tokens < 5 or r.is_forced.any():
            continue
        own = r.support.contains(r.output_ids).mean()
        for step in (1, -1):
            neighbour = r.support.contains(np.roll(r.output_ids, -step))
            held = neighbour[:-1] if step > 0 else neighbour[1:]
            if own < 0.9 and held.mean() > 0.98:
                names.append(r.rollout_id)
                steps[step] += 1
                tokens += r.num_output_tokens
                break
    if tokens < MIN_TOKENS:
        return []
    scope = _scope(names, rollouts)
    step = steps.most_common(1)[0][0]
    return [
        Diagnosis(
            "shifted_by_one",
            scope,
            f"{scope['where']}, the support of output token t is that of token t{step:+d}.",
            {"tokens": tokens, "shift": step},
            "align supports with output_ids: row t is what token t was sampled from",
            left_out=frozenset(names),
        )
    ]


def _padded(rollouts: Sequence[Rollout], implausible: Implausible) -> list[Diagnosis]:
    """One id in nearly every support, with next to no probability where it should have some."""
    counts = Counter[int]()
    for r in rollouts:
        if (sampled := int((~r.is_forced).sum())) >= 5:
            ids, times = np.unique(r.support.ids, return_counts=True)
            counts.update(ids[times >= 0.95 * sampled].tolist())
    for pad, _ in counts.most_common(3):
        names, proof = _padded_with(rollouts, pad, implausible)
        if proof >= MIN_TOKENS:
            scope = _scope(names, rollouts)
            return [
                Diagnosis(
                    "support_padded",
                    scope,
                    f"{scope['where']}, id {pad} is in every support and has no probability "
                    "there: padding was recorded as part of the support.",
                    {"id": pad, "tokens": proof},
                    "cut each support to its own length before it is recorded",
                )
            ]
    return []


def _padded_with(
    rollouts: Sequence[Rollout], pad: int, implausible: Implausible
) -> tuple[list[str], int]:
    """The rollouts padded with `pad`, and the number of tokens that prove it."""
    names, proof = [], 0
    for r in rollouts:
        entries = np.flatnonzero(r.support.ids == pad)
        rows = r.support.rows[entries]
        sampled = ~r.is_forced
        if not sampled.any() or len(np.unique(rows)) < 0.95 * sampled.sum():
            continue
        mine = 0
        others = r.output_ids[rows] != pad
        if r.support_logprobs is not None:
            values = r.support_logprobs[entries]
            exact = np.exp(r.support_logprobs.astype(np.float64))
            is_other = r.support.ids != pad
            total = np.bincount(r.support.rows, exact, len(r.support))[rows]
            rest = np.bincount(r.support.rows[is_other], exact[is_other], len(r.support))[rows]
            # a logprob that no sampler gives, or mass beside ids that have all of it
            is_number = np.isfinite(values) & (values > SENTINEL)
            is_beside = (np.abs(rest - 1) < SUM_SLACK) & (np.abs(total - 1) > SUM_SLACK)
            mine = int((others & (~is_number | is_beside)).sum())
        else:
            certain = np.abs(r.sampling_logprobs[rows]) <= 1e-6
            mine = int((others & certain & (r.support.counts[rows] == 2)).sum())
        mine = max(mine, implausible(r.rollout_id, pad))
        if mine >= max(3, 0.3 * len(rows)):
            names.append(r.rollout_id)
            proof += mine
    return names, proof


def _full_stored(rollouts: Sequence[Rollout]) -> list[Diagnosis]:
    """sampling_logprobs that are the full ones although ids were left out."""
    names, tokens = [], 0
    for r in rollouts:
        many = r.support.counts > 1
        if r.full_logprobs is None or many.sum() < 5:
            continue
        if (np.abs(r.full_logprobs - r.sampling_logprobs)[many] < 1e-6).mean() > 0.95:
            names.append(r.rollout_id)
            tokens += int(many.sum())
    if tokens < MIN_TOKENS:
        return []
    scope = _scope(names, rollouts)
    words = f"{scope['where']}, sampling_logprobs are the full logprobs: no support was applied."
    advice = "store the engine's sampling-mask logprobs, not those over the whole vocabulary"
    return [Diagnosis("full_logprobs_stored", scope, words, {"tokens": tokens}, advice)]


def _declared_order(rollouts: Sequence[Rollout], engine: EngineCheck | None) -> list[Diagnosis]:
    """`engine_meta` names another filter order than the recorded probabilities show."""
    if engine is None or engine.filter_order in (UNKNOWN, "neither"):
        return []
    declared = Counter(
        order
        for r in rollouts
        if r.min_p == 0 and (order := json.loads(r.engine_meta or "{}").get("filter_order"))
    )
    wrong = {order: n for order, n in declared.items() if order != engine.filter_order}
    if not wrong:
        return []
    (order, count), *_ = wrong.items()
    scope = {"kind": "all", "where": "In every rollout"}
    if count < 0.95 * len(rollouts):
        scope = {"kind": "rollouts", "where": f"In {count} rollouts"}
    return [
        Diagnosis(
            "filter_order",
            scope,
            f"{scope['where']}, engine_meta says that the filters are {order}; the recorded "
            f"probabilities show that they are {engine.filter_order}.",
            {
                "rows": engine.order_rows,
                "joint_violated": engine.joint_violated,
                "sequential_violated": engine.sequential_violated,
            },
            "correct engine_meta; scores do not depend on it, re-deriving supports does",
        )
    ]

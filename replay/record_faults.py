"""Causes that the record alone shows: broken content rules, judged over all rollouts at once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from replay.evidence import Evidence
from rollout.record import Rollout
from rollout.rules import find_faults
from rollout.self_check import UNKNOWN, EngineCheck

MIN_TOKENS = 10
PADDING_GAP = 4.0  # nats below the next likeliest id of a support, in the median


@dataclass(frozen=True)
class RecordFault:
    """The fields of a `Diagnosis`."""

    code: str
    scope: dict[str, Any]
    sentence: str
    evidence: dict[str, Any] = field(default_factory=dict)
    advice: str = ""
    also: tuple[str, ...] = ()
    left_out: frozenset[str] = frozenset()  # rollouts whose numbers it makes incomparable


def find_record_faults(
    rollouts: Sequence[Rollout], engine: EngineCheck | None, evidence: Evidence | None
) -> list[RecordFault]:
    """Whole-file causes first, then each broken rule by its own code, most tokens first."""
    found = [*_shifted(rollouts), *_padded(rollouts, evidence)]
    if evidence is None:
        found += _full_stored(rollouts)
    return [*found, *_broken_rules(rollouts), *_declared_order(rollouts, engine)]


ADVICE = {
    "duplicate_ids": "deduplicate where supports are made: an id twice counts twice in the sum",
    "sampled_outside_support": "record the set that was sampled from; one rebuilt beside the "
    "sampler can miss the token",
    "support_truncated": "record every id of the support; a limit on its length cuts it",
}


def _broken_rules(rollouts: Sequence[Rollout]) -> list[RecordFault]:
    tokens: Counter[str] = Counter()
    first: dict[str, str] = {}
    names: dict[str, list[str]] = {}
    for rollout in rollouts:
        for fault in find_faults(rollout):
            tokens[fault.code] += len(fault.positions)
            first.setdefault(fault.code, f"{rollout.rollout_id}: {fault.message}")
            names.setdefault(fault.code, []).append(rollout.rollout_id)
    return [
        RecordFault(
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


def _shifted(rollouts: Sequence[Rollout]) -> list[RecordFault]:
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
        RecordFault(
            "shifted_by_one",
            scope,
            f"{scope['where']}, the support of output token t is that of token t{step:+d}.",
            {"tokens": tokens, "shift": step},
            "align supports with output_ids: row t is what token t was sampled from",
            left_out=frozenset(names),
        )
    ]


def _padded(rollouts: Sequence[Rollout], e: Evidence | None) -> list[RecordFault]:
    """One id in nearly every support, with next to no probability where it should have some."""
    counts = Counter[int]()
    for r in rollouts:
        if (sampled := int((~r.is_forced).sum())) >= 5:
            ids, times = np.unique(r.support.ids, return_counts=True)
            counts.update(ids[times >= 0.95 * sampled].tolist())
    for pad, _ in counts.most_common(3):
        names, proof = _padded_with(rollouts, pad, e)
        if proof >= MIN_TOKENS:
            scope = _scope(names, rollouts)
            return [
                RecordFault(
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
    rollouts: Sequence[Rollout], pad: int, e: Evidence | None
) -> tuple[list[str], int]:
    """The rollouts padded with `pad`, and the number of tokens that prove it."""
    names, proof = [], 0
    at = {} if e is None else {r.rollout_id: i for i, r in enumerate(e.rollouts)}
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
            # where the other ids have all of the mass
            rest = np.bincount(
                r.support.rows[r.support.ids != pad],
                np.exp(r.support_logprobs[r.support.ids != pad].astype(np.float64)),
                minlength=len(r.support),
            )[rows]
            with np.errstate(invalid="ignore"):
                mine = int((others & ((np.abs(rest - 1) < 1e-5) | ~(values > -50))).sum())
        else:
            certain = np.abs(r.sampling_logprobs[rows]) <= 1e-6
            mine = int((others & certain & (r.support.counts[rows] == 2)).sum())
        if e is not None and r.rollout_id in at:
            mine = max(mine, _implausible(e, at[r.rollout_id], pad))
        if mine >= max(3, 0.3 * len(rows)):
            names.append(r.rollout_id)
            proof += mine
    return names, proof


def _implausible(e: Evidence, rollout: int, pad: int) -> int:
    """Tokens where the policy puts `pad` far below every other id of the support."""
    part = e.take((e.rollout == rollout) & e.informative)
    if not len(part):
        return 0
    is_pad = part.support.ids == pad
    of_pad = np.full(len(part), np.nan)
    of_pad[part.rows[is_pad]] = part.replay_support[is_pad]
    lowest = np.minimum.reduceat(
        np.where(is_pad, np.inf, part.replay_support), part.support.offsets[:-1]
    )
    gap = lowest - of_pad
    return int((gap > PADDING_GAP).sum()) if np.nanmedian(gap) > PADDING_GAP else 0


def _full_stored(rollouts: Sequence[Rollout]) -> list[RecordFault]:
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
    return [RecordFault("full_logprobs_stored", scope, words, {"tokens": tokens}, advice)]


def _declared_order(rollouts: Sequence[Rollout], engine: EngineCheck | None) -> list[RecordFault]:
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
        RecordFault(
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

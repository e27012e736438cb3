"""diagnose(): what is wrong with a run, in words, from both sides' numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from replay.evidence import Evidence
from replay.rule import (
    ALIKE,
    EXCESS,
    MIN_TOKENS,
    Explanation,
    best_of,
    excess,
    explain,
    floor,
)
from replay.scopes import everything
from rollout.diagnosis import CLEAN, Diagnosis, without_consequences
from rollout.record import Rollout
from rollout.record_faults import WHOLE_FILE, explain_record, find_record_faults
from rollout.self_check import EngineCheck

MOST = 0.6  # a cause that removes so much is not the mere look of another
MAX_ENTRIES = 500_000  # of supports; of larger runs a part of the rollouts is diagnosed
PADDING_GAP = 4.0  # nats below the least likely other id of a support, in the median

Rescore = Callable[[Sequence[Rollout]], Evidence | None]
OtherPrompts = Callable[[Sequence[Rollout]], dict[str, list[Rollout]]]


def diagnose(
    evidence: Evidence | None,
    rollouts: Iterable[Rollout],
    engine: EngineCheck | None = None,
    rescore: Rescore | None = None,
    other_prompts: OtherPrompts | None = None,
) -> list[Diagnosis]:
    """The causes, best first; exactly one `clean` where there is none.

    `rollouts` are all of them, also those that break content rules or could not be scored;
    `evidence` is None where there is no trainer. With `rescore` and `other_prompts`, mismatch that
    nothing explains is replayed with other prompts.
    """
    rollouts = list(rollouts)
    if evidence is None:
        return explain_record(rollouts) or [_clean(None)]
    place = {r.rollout_id: i for i, r in enumerate(evidence.rollouts)}
    record = find_record_faults(
        rollouts,
        engine,
        lambda name, pad: _implausible(evidence, place[name], pad) if name in place else 0,
    )
    causes: list[Diagnosis] = []
    unexplained: list[Diagnosis] = []
    comparable = _comparable(evidence, record)
    if len(comparable) >= MIN_TOKENS:
        causes, unexplained = _numeric(comparable, rescore, other_prompts)
    whole = [d for d in record if d.code in WHOLE_FILE]
    broken = [d for d in record if d.code not in WHOLE_FILE]
    found = without_consequences([*whole, *causes, *broken, *unexplained])
    return found or [_clean(comparable)]


def _comparable(e: Evidence, faults: Sequence[Diagnosis]) -> Evidence:
    """Tokens whose numbers can be compared: what the record's own faults explain is left out."""
    out = frozenset().union(*(fault.left_out for fault in faults))
    comparable = np.array([r.rollout_id not in out for r in e.rollouts], bool)[e.rollout]
    usable = e.informative & ~e.support.duplicated() & comparable
    step = max(1, -(-int(e.support.counts[usable].sum()) // MAX_ENTRIES))
    # of a large run tokens here and there, so that every rollout is among them
    thinned = (np.arange(len(usable)) * 2_654_435_761 >> 7) % step == 0
    return e.take(usable & thinned)


def _numeric(
    e: Evidence, rescore: Rescore | None, other_prompts: OtherPrompts | None
) -> tuple[list[Diagnosis], list[Diagnosis]]:
    """Named causes, and what none of them explains."""
    explanations = explain(e)
    best = best_of(explanations)
    mismatch = e.as_recorded.copy()
    if best is not None and best.left <= (2 * EXCESS if best.share >= MOST else EXCESS):
        mismatch[best.scope.tokens] = 0.0
    causes = [] if best is None else [_of(best, explanations)]
    rest = excess(e, mismatch)
    if rest is None:
        return causes, []
    unexplained = _unexplained(rest)
    if rescore is not None and other_prompts is not None:
        unexplained = _with_other_prompts(e, rest, rescore, other_prompts) or unexplained
    if best is not None and best.share < MOST and (best.scope.tokens & rest.scope.tokens).any():
        causes = []  # a little of it looks like something else, as noise does
    return causes, [unexplained]


def _of(best: Explanation, all_of_them: Sequence[Explanation]) -> Diagnosis:
    rivals = [
        x.hypothesis.code
        for x in all_of_them
        if x.hypothesis.code != best.hypothesis.code and x.gain >= ALIKE * best.gain
    ]
    h = best.hypothesis
    facts = {"temperature": "?", "shift": 0.0} | best.facts
    if isinstance(facts["temperature"], list):
        facts["temperature"] = " / ".join(f"{t:g}" for t in facts["temperature"])
    return Diagnosis(
        code=h.code,
        scope=best.scope.as_dict(),
        sentence=h.sentence.format(where=best.scope.where, **facts) + ".",
        evidence={
            **best.facts,
            "tokens": best.tokens,
            "share_of_mismatch_removed": round(best.share, 4),
            "standard_errors": round(min(best.strength, 1e6), 1),
            "left_over_noise_floor": round(best.left, 2),
        },
        advice=h.advice,
        also=tuple(dict.fromkeys((*rivals, *h.same))),
    )


def _unexplained(rest: Explanation) -> Diagnosis:
    stale = rest.scope.kind in ("version", "tail")
    return Diagnosis(
        code="other_weights",
        scope=rest.scope.as_dict(),
        sentence=f"{rest.scope.where}, the engine and the policy differ {rest.left:.1f} times as "
        "much as two precisions of the policy's head do, and no other cause explains it: they "
        f"have other weights{' (stale ones, from that point on)' if stale else ''}.",
        evidence={
            "tokens": rest.tokens,
            "over_noise_floor": round(rest.left, 2),
            "standard_errors": round(min(rest.strength, 1e6), 1),
        },
        advice="compare checkpoint, revision, adapters and quantisation of both sides, and "
        "whether the last weight update reached the engine",
    )


def _with_other_prompts(
    e: Evidence, rest: Explanation, rescore: Rescore, other_prompts: OtherPrompts
) -> Diagnosis | None:
    """The best of a few other prompts, if it brings a sample of the scope near the noise floor."""
    sample = np.unique(e.rollout[rest.scope.tokens])
    sample = sample[np.linspace(0, len(sample) - 1, min(8, len(sample))).astype(int)]
    mine = [e.rollouts[i] for i in sample]
    before = e.take(np.isin(e.rollout, sample))
    ratios = {}
    for name, changed in list(other_prompts(mine).items())[:3]:
        after = rescore(changed)
        if after is not None and len(after := after.take(after.informative)):
            ratios[name] = float(after.as_recorded.sum() / floor(after).sum())
    if not ratios:
        return None
    name = min(ratios, key=lambda n: ratios[n])
    was = float(before.as_recorded.sum() / floor(before).sum())
    if not (ratios[name] <= EXCESS and ratios[name] <= 0.7 * was):
        return None
    return Diagnosis(
        code="prompt_differs",
        scope=rest.scope.as_dict(),
        sentence=f"{rest.scope.where}, the engine did not read the recorded prompt: {name}, both "
        "sides agree.",
        evidence={
            "rollouts_replayed": len(mine),
            "over_noise_floor": {"as recorded": round(was, 2)}
            | {n: round(r, 2) for n, r in ratios.items()},
        },
        advice="send and record the same prompt_ids; let one side add BOS and apply the template",
    )


def _implausible(e: Evidence, rollout: int, pad: int) -> int:
    """Tokens where the policy puts `pad` far below every other id of the support."""
    part = e.take((e.rollout == rollout) & e.informative)
    if not len(part):
        return 0
    is_pad = part.support.ids == pad
    of_pad = np.full(len(part), np.nan)
    of_pad[part.rows[is_pad]] = part.replay_support[is_pad]
    others = np.where(is_pad, np.inf, part.replay_support)
    gap = np.minimum.reduceat(others, part.support.offsets[:-1]) - of_pad
    known = gap[np.isfinite(gap)]
    is_far = len(known) > 0 and np.median(known) > PADDING_GAP
    return int((known > PADDING_GAP).sum()) if is_far else 0


def _clean(e: Evidence | None) -> Diagnosis:
    if e is None or len(e) < MIN_TOKENS:
        words = "No content rule is broken; there are too few scored tokens to look for causes."
        return Diagnosis(CLEAN, {"kind": "all", "where": "In every rollout"}, words)
    over = float(e.as_recorded.sum() / floor(e).sum())
    return Diagnosis(
        code=CLEAN,
        scope=everything(e).as_dict(),
        sentence=f"Both sides differ {over:.1f} times as much as two precisions of the policy's "
        "head do: honest numerics.",
        evidence={"tokens": len(e), "over_noise_floor": round(over, 2)},
    )

"""diagnose(): what is wrong with a run, in words, from both sides' numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

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
from replay.scopes import Scope, everything
from rollout.diagnosis import CLEAN, Diagnosis, without_consequences
from rollout.record import Rollout
from rollout.record_faults import RecordJudge
from rollout.rules import Fault
from rollout.self_check import EngineCheck

MOST = 0.6  # a cause that removes so much is not the mere look of another
MAX_CAUSES = 3  # in numbers, each in tokens of its own
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
    faults: Mapping[str, Sequence[Fault]] | None = None,
) -> list[Diagnosis]:
    """The causes, best first; exactly one `clean` where there is none.

    `rollouts` are all of them, also those that break content rules or could not be scored;
    `evidence` is None where there is no trainer. `faults` are those of the content rules by rollout
    id, where somebody has looked already. With `rescore` and `other_prompts`, mismatch that
    nothing explains is replayed with other prompts.
    """
    judge = RecordJudge(check_engine=evidence is None)
    for rollout in rollouts:
        judge.add(rollout, None if faults is None else faults[rollout.rollout_id])
    if evidence is None:
        return judge.diagnose() or [_clean(None)]
    whole = judge.whole_file(lambda pad: _implausible(evidence.held(evidence.informative), pad))
    causes: list[Diagnosis] = []
    unexplained: list[Diagnosis] = []
    comparable = _comparable(evidence, whole)
    if len(comparable) >= MIN_TOKENS:
        causes, unexplained = _numeric(comparable, rescore, other_prompts)
    causes = [*whole, *causes]
    broken = [*judge.broken_rules(causes), *judge.declared_order(engine)]
    return without_consequences([*causes, *broken, *unexplained]) or [_clean(comparable)]


def _comparable(e: Evidence, causes: Sequence[Diagnosis]) -> Evidence:
    """Tokens whose numbers can be compared: those of shifted supports cannot."""
    shifted = [d for d in causes if d.code == "shifted_by_one"]
    is_in = [not any(d.covers(r.rollout_id) for d in shifted) for r in e.rollouts]
    comparable = np.array(is_in, bool)[e.rollout]
    usable = e.informative & ~e.support.duplicated() & comparable
    if not np.isfinite(e.noise[usable]).any():
        usable[:] = False  # there is nothing to compare with
    step = max(1, -(-int(e.support.counts[usable].sum()) // MAX_ENTRIES))
    # of a large run tokens here and there, so that every rollout is among them
    thinned = (np.arange(len(usable)) * 2_654_435_761 >> 7) % step == 0
    return e.take(usable & thinned).with_noise_everywhere()


def _numeric(
    e: Evidence, rescore: Rescore | None, other_prompts: OtherPrompts | None
) -> tuple[list[Diagnosis], list[Diagnosis]]:
    """Named causes, each in tokens of its own, and what none of them explains."""
    named: list[tuple[Explanation, Diagnosis]] = []
    left, mismatch = np.ones(len(e), bool), e.as_recorded.copy()
    while len(named) < MAX_CAUSES:
        explanations = explain(e, left)
        best = best_of(explanations)
        if best is None:
            break
        named.append((best, _of(e, best, explanations)))
        if best.left <= (2 * EXCESS if best.share >= MOST else EXCESS):
            mismatch[best.scope.tokens] = 0.0
        left &= ~best.scope.tokens
    rest = excess(e, mismatch)
    if rest is None:
        return [d for _, d in named], []
    unexplained = _unexplained(e, rest)
    if rescore is not None and other_prompts is not None:
        unexplained = _with_other_prompts(e, rest, rescore, other_prompts) or unexplained
    # a little of what is unexplained looks like something else, as noise does
    causes = [
        d for x, d in named if x.share >= MOST or not (x.scope.tokens & rest.scope.tokens).any()
    ]
    return causes, [unexplained]


def _names(e: Evidence, scope: Scope) -> frozenset[str]:
    return frozenset(e.rollouts[i].rollout_id for i in np.unique(e.rollout[scope.tokens]))


def _of(e: Evidence, best: Explanation, all_of_them: Sequence[Explanation]) -> Diagnosis:
    h = best.hypothesis
    rivals = [
        x.hypothesis.code
        for x in all_of_them
        if x.hypothesis.code != h.code
        and x.gain >= ALIKE * best.gain
        and (x.scope.tokens & best.scope.tokens).sum() >= best.tokens / 2  # the same data
    ]
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
        rollouts=_names(e, best.scope),
    )


def _unexplained(e: Evidence, rest: Explanation) -> Diagnosis:
    more = {"tail": " (stale ones, from that point on)", "version": " (those of another version)"}
    return Diagnosis(
        code="other_weights",
        scope=rest.scope.as_dict(),
        sentence=f"{rest.scope.where}, the engine and the policy differ {rest.left:.1f} times as "
        "much as bfloat16 explains, and no other cause explains it: they have other weights"
        f"{more.get(rest.scope.kind, '')}.",
        evidence={
            "tokens": rest.tokens,
            "over_noise_floor": round(rest.left, 2),
            "standard_errors": round(min(rest.strength, 1e6), 1),
        },
        advice="compare checkpoint, revision, adapters and quantisation of both sides, and "
        "whether the last weight update reached the engine",
        rollouts=_names(e, rest.scope),
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
        if after is None:
            continue
        after = after.take(after.informative).with_noise_everywhere()
        if len(after):
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
        rollouts=_names(e, rest.scope),
    )


def _implausible(e: Evidence, pad: int) -> dict[str, int]:
    """By rollout, the tokens where the policy puts `pad` far below every other id of the support.

    None of a rollout where it does so in fewer than half of them. `e` holds no singletons.
    """
    is_pad = e.support.ids == pad
    of_pad = np.full(len(e), np.nan)
    of_pad[e.rows[is_pad]] = e.replay_support[is_pad]
    others = np.where(is_pad, np.inf, e.replay_support)
    gap = np.minimum.reduceat(others, e.support.offsets[:-1]) - of_pad if len(e) else of_pad
    known = np.flatnonzero(np.isfinite(gap))
    if not len(known):
        return {}
    known = known[np.argsort(e.rollout[known], kind="stable")]
    numbers, starts = np.unique(e.rollout[known], return_index=True)
    found = {}
    for number, gaps in zip(numbers, np.split(gap[known], starts[1:]), strict=True):
        if np.median(gaps) > PADDING_GAP:
            found[e.rollouts[number].rollout_id] = int((gaps > PADDING_GAP).sum())
    return found


def _clean(e: Evidence | None) -> Diagnosis:
    if e is None or len(e) < MIN_TOKENS:
        words = "No content rule is broken; there are too few scored tokens to look for causes."
        return Diagnosis(CLEAN, {"kind": "all", "where": "In every rollout"}, words)
    over = float(e.as_recorded.sum() / floor(e).sum())
    so = "honest numerics"
    if over > EXCESS:
        so = "more than usual, but in too few contexts, or too little, to be sure of a cause"
    return Diagnosis(
        code=CLEAN,
        scope=everything(e).as_dict(),
        sentence=f"Both sides differ {over:.1f} times as much as bfloat16 explains: {so}.",
        evidence={"tokens": len(e), "over_noise_floor": round(over, 2)},
    )

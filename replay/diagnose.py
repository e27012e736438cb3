"""diagnose(): what is wrong with a run, in words, from both sides' numbers.

Every hypothesis of `replay.hypotheses` is tried in every scope of `replay.scopes` by one rule. Its
*gain* is how much of the mismatch it removes, summed over the tokens of the scope. It is named when

* it removes at least SHARE of the mismatch there (SHARE_PICKED where the rollouts were picked by
  their mismatch),
* the gain is at least STRENGTH standard errors, resampling whole rollouts, and
* the gain is at least OF_FLOOR of what the precision of the policy's own head changes.

Mismatch beyond EXCESS times that noise floor which nothing explains is `other_weights`, if it is at
least EXCESS_NATS in logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from replay.evidence import Evidence, Floats, Mask
from replay.hypotheses import HYPOTHESES, Hypothesis
from replay.scopes import Scope, everything, of_rollouts, scopes
from rollout.diagnosis import CLEAN, Diagnosis, without_consequences
from rollout.record import Rollout
from rollout.record_faults import WHOLE_FILE, explain_record, find_record_faults
from rollout.self_check import EngineCheck

# fixed on tests/data/sglang_0.5.23_cpu_pytorch; docs/diagnosis.md has the error rates on the others
SHARE = 0.05
SHARE_PICKED = 0.2
STRENGTH = 4.0
OF_FLOOR = 0.1
EXCESS = 3.0
EXCESS_SHARE_PICKED = 0.3
EXCESS_NATS = 0.08  # at temperature 1; honest bf16 sides of a 135M model are 0.05 apart

LEAST_FLOOR = 1e-3  # nats; two fp32 sides are nearer, and that is no reason to look for causes
MOST = 0.6  # a cause that removes so much is not the mere look of another
ALIKE = 0.95  # gains this near the best explain as much as it does
MIN_TOKENS = 10
PADDING_GAP = 4.0  # nats below the least likely other id of a support, in the median
CLUSTERS = 8  # rollouts needed to judge by whole rollouts
MAX_ROLLOUTS = 400  # looked at one by one
MAX_ENTRIES = 500_000  # of supports; of larger runs every n-th rollout is diagnosed


@dataclass(frozen=True)
class Explanation:
    """A hypothesis in a scope, and how well it does there."""

    hypothesis: Hypothesis
    scope: Scope
    facts: dict[str, Any]
    gain: float  # nats, summed over tokens
    share: float  # of the mismatch in the scope
    strength: float  # in standard errors
    left: float  # mismatch with it, as a multiple of the noise floor
    tokens: int

    @property
    def freedom(self) -> int:
        return self.hypothesis.freedom + self.scope.freedom


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
    step = max(1, -(-len(e.support.ids) // MAX_ENTRIES))
    usable = e.informative & ~e.support.duplicated() & (e.rollout % step == 0)
    return e.take(usable & comparable)


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


def explain(e: Evidence) -> list[Explanation]:
    """Every hypothesis that passes the rule, each in its best scope."""
    everywhere = [(scope, e.take(scope.tokens)) for scope in scopes(e)]
    numbers = np.unique(e.rollout)
    numbers = numbers[:: -(-len(numbers) // MAX_ROLLOUTS)]
    one_by_one = {int(i): e.take(e.rollout == i) for i in numbers}
    found = []
    for hypothesis in HYPOTHESES:
        tried = [judge(part, hypothesis, scope) for scope, part in everywhere]
        if hypothesis.by_rollout:
            tried.append(_picked(e, one_by_one, hypothesis))
        chosen = best_of([x for x in tried if x is not None and passes(x, e)])
        if chosen is not None:
            found.append(chosen)
    return found


def judge(part: Evidence, hypothesis: Hypothesis, scope: Scope) -> Explanation | None:
    """Fit `hypothesis` to `part`, the tokens of `scope`; None where it predicts no change."""
    if len(part) < MIN_TOKENS or (predicted := hypothesis.predict(part)) is None:
        return None
    applies = np.ones(len(part), bool) if predicted.applies is None else predicted.applies
    if applies.sum() < MIN_TOKENS:
        return None
    with_it = part.mismatch(predicted.support, predicted.sampled)
    gain = np.where(applies, part.as_recorded - with_it, 0.0)
    if not np.isfinite(gain.sum()):
        return None
    if "ids" in predicted.facts:
        inside = np.zeros(len(scope.tokens), bool)
        inside[np.flatnonzero(scope.tokens)[applies]] = True
        names = ", ".join(f"{i}" for i in predicted.facts["ids"])
        where = f"{scope.where}, in supports that hold {names}"
        scope = Scope("ids", where, inside, {"ids": list(predicted.facts["ids"])}, scope.freedom)
    return Explanation(
        hypothesis=hypothesis,
        scope=scope,
        facts=predicted.facts,
        gain=float(gain.sum()),
        share=float(gain.sum() / part.as_recorded[applies].sum()),
        strength=strength(gain[applies], part.rollout[applies]),
        left=float(with_it[applies].sum() / _floor(part)[applies].sum()),
        tokens=int(applies.sum()),
    )


def passes(x: Explanation, e: Evidence) -> bool:
    """The rule of this module."""
    share = SHARE_PICKED if x.scope.kind == "rollouts" else SHARE
    least = OF_FLOOR * float(_floor(e)[x.scope.tokens].sum()) * x.tokens / x.scope.tokens.sum()
    return x.share >= share and x.strength >= STRENGTH and x.gain >= least


def best_of(found: Sequence[Explanation]) -> Explanation | None:
    """The largest gain; among those that are nearly as large, the least free."""
    if not found:
        return None
    most = max(x.gain for x in found)
    return min((x for x in found if x.gain >= ALIKE * most), key=lambda x: (x.freedom, -x.gain))


def strength(gain: Floats, rollout: np.ndarray) -> float:
    """Total over its standard error, by rollouts; by tokens where the rollouts are few."""
    of_rollout = np.unique(rollout, return_inverse=True)[1]
    if of_rollout.max(initial=-1) + 1 < CLUSTERS:
        of_rollout = np.arange(len(gain))
    total, size = np.bincount(of_rollout, gain), np.bincount(of_rollout)
    spread = total - gain.sum() / len(gain) * size
    error = float(np.sqrt((spread**2).sum() * len(total) / max(len(total) - 1, 1)))
    if error == 0:
        return float(np.sign(gain.sum()) * np.inf) if gain.sum() else 0.0
    return float(gain.sum() / error)


def excess(e: Evidence, mismatch: Floats) -> Explanation | None:
    """Where `mismatch` [T] is beyond what honest numerics explain, in its best scope."""
    noise = _noise(e)
    beyond = mismatch - EXCESS * noise
    hypothesis = Hypothesis("other_weights", lambda _: None, "", "")

    def weigh(scope: Scope) -> Explanation:
        inside = scope.tokens
        return Explanation(
            hypothesis=hypothesis,
            scope=scope,
            facts={},
            gain=float(beyond[inside].sum()),
            share=float(beyond[inside].sum() / max(mismatch[inside].sum(), 1e-12)),
            strength=strength(beyond[inside], e.rollout[inside]),
            left=float(mismatch[inside].sum() / noise[inside].sum()),
            tokens=int(inside.sum()),
        )

    def is_large(x: Explanation) -> bool:
        inside = x.scope.tokens
        share = EXCESS_SHARE_PICKED if x.scope.kind == "rollouts" else SHARE
        nats = float((e.temperature * mismatch)[inside].mean())
        return x.share >= share and x.strength >= STRENGTH and nats >= EXCESS_NATS

    tried = [weigh(scope) for scope in scopes(e)]
    affected = _stand_out(e, beyond)
    if affected.any():
        tried.append(weigh(of_rollouts(e, affected)))
    return best_of([x for x in tried if is_large(x)])


def _noise(e: Evidence) -> Floats:
    """[T] The noise floor of each token's rollout, or of all tokens where that is more.

    Small logits are rounded less, but the body's noise is not smaller for that.
    """
    size = np.bincount(e.rollout, minlength=len(e.rollouts))
    own = np.bincount(e.rollout, _floor(e), len(e.rollouts)) / np.maximum(size, 1)
    return np.maximum(own, _floor(e).mean())[e.rollout]


def _picked(e: Evidence, parts: dict[int, Evidence], hypothesis: Hypothesis) -> Explanation | None:
    """The rollouts that the hypothesis explains one by one, judged together."""
    fitted = np.zeros(len(e.rollouts), bool)
    for i, part in parts.items():
        one = judge(part, hypothesis, everything(part))
        fitted[i] = one is not None and one.share >= SHARE_PICKED and one.strength >= 3.0
    if not fitted.any():
        return None
    scope = of_rollouts(e, fitted)
    return judge(e.take(scope.tokens), hypothesis, scope)


def _stand_out(e: Evidence, beyond: Floats) -> Mask:
    """[n] rollouts that are clearly beyond by themselves."""
    out = np.zeros(len(e.rollouts), bool)
    for i in np.unique(e.rollout):
        mine = e.rollout == i
        if mine.sum() >= 5:
            out[i] = strength(beyond[mine], np.zeros(mine.sum(), int)) >= 3.0
    return out


def _floor(e: Evidence) -> Floats:
    return np.maximum(e.floor, LEAST_FLOOR)


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
            ratios[name] = float(after.as_recorded.sum() / _floor(after).sum())
    if not ratios:
        return None
    name = min(ratios, key=lambda n: ratios[n])
    was = float(before.as_recorded.sum() / _floor(before).sum())
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
    over = float(e.as_recorded.sum() / _floor(e).sum())
    return Diagnosis(
        code=CLEAN,
        scope=everything(e).as_dict(),
        sentence=f"Both sides differ {over:.1f} times as much as two precisions of the policy's "
        "head do: honest numerics.",
        evidence={"tokens": len(e), "over_noise_floor": round(over, 2)},
    )

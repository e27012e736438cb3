"""The rule of `diagnose`: which causes explain the mismatch, and where.

Every hypothesis of `replay.hypotheses` is tried in every scope of `replay.scopes` by one rule. Its
*gain* is how much of the mismatch it removes, summed over the tokens of the scope. It is named when

* it removes at least SHARE of the mismatch there (SHARE_PICKED where the rollouts were picked by
  their mismatch),
* the gain is at least STRENGTH standard errors (STRENGTH_PICKED where a number was fitted to
  rollouts that were picked, STRENGTH_IDS where ids were chosen), by whole prompts, by whole
  rollouts and by contexts, and
* the gain is at least OF_FLOOR of the noise floor (`replay.noise`), and, where a number was fitted,
  what is left is at most FAR of them (FAR_IDS where ids were chosen).

Mismatch beyond EXCESS noise floors which nothing explains is `other_weights`, if it is at least
EXCESS_NATS in logits and STRENGTH standard errors beyond (STRENGTH_ALL in the whole run, a scope
that was not chosen).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.evidence import Evidence, Floats, Mask
from replay.hypotheses import HYPOTHESES, Hypothesis
from replay.scopes import Scope, everything, of_rollouts, scopes, within
from replay.strength import strength, strength_beyond

# fixed on tests/data/sglang_0.5.23_cpu_pytorch; docs/diagnosis.md has the error rates on the others
SHARE = 0.1
SHARE_ON_GRID = 0.01  # a bf16 grid that fits at one factor alone is proof
SHARE_PICKED = 0.2
STRENGTH = 3.0
STRENGTH_PICKED = 5.0
STRENGTH_IDS = 4.0  # ids that were chosen among many
OF_FLOOR = 0.05
FAR = 6.0  # a fitted cause that leaves more is the best of several that are all wrong
FAR_IDS = 2.0  # weights that were trained on moved some ids more than others
EXCESS = 1.3  # clean runs are 0.8 to 1.1 apart
FRINGE = 0.25  # of the mean mismatch; tokens with less are no part of where it is
EXCESS_SHARE_PICKED = 0.3
STRENGTH_ALL = 1.5  # in the whole run, a scope that was not chosen
EXCESS_NATS = 0.02  # at temperature 1; nearer than that, rounding elsewhere may do it

LEAST_FLOOR = 1e-3  # nats; two fp32 sides are nearer, and that is no reason to look for causes
ALIKE = 0.95  # gains this near the best explain as much as it does
MIN_TOKENS = 10
CLUSTERS = 8  # prompts or rollouts needed to judge by whole ones
MAX_ROLLOUTS = 400  # looked at one by one


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


def explain(e: Evidence, left: Mask) -> list[Explanation]:
    """Every hypothesis that passes the rule among the tokens of `left`, each in its best scope."""
    tokens = [within(scope, left) for scope in scopes(e)]
    everywhere = [(scope, e.take(scope.tokens)) for scope in tokens if scope.tokens.any()]
    numbers = np.unique(e.rollout[left])
    numbers = numbers[:: max(1, -(-len(numbers) // MAX_ROLLOUTS))]
    one_by_one = {int(i): e.take((e.rollout == i) & left) for i in numbers}
    found = []
    for hypothesis in HYPOTHESES:
        tried = [judge(part, hypothesis, scope) for scope, part in everywhere]
        if hypothesis.by_rollout:
            tried.append(_picked(e, left, one_by_one, hypothesis))
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
        strength=strength(gain[applies], *_clusters(part, applies)),
        left=float(with_it[applies].sum() / floor(part)[applies].sum()),
        tokens=int(applies.sum()),
    )


def passes(x: Explanation, e: Evidence) -> bool:
    """The rule of this module."""
    share = SHARE_PICKED if x.scope.kind == "rollouts" else SHARE
    if "on_bf16_grid" in x.facts:
        share = SHARE_ON_GRID
    least = OF_FLOOR * float(floor(e)[x.scope.tokens].sum()) * x.tokens / x.scope.tokens.sum()
    strong = STRENGTH_PICKED if x.scope.kind == "rollouts" and is_fitted(x) else STRENGTH
    if x.scope.kind == "ids":
        strong = STRENGTH_IDS
    if is_fitted(x) and x.left > (FAR_IDS if x.scope.kind == "ids" else FAR):
        return False
    return (
        x.share >= share and x.strength >= strong and (x.gain >= least or "on_bf16_grid" in x.facts)
    )


def is_fitted(x: Explanation) -> bool:
    """Whether chance may have fitted it: a number was, and no bf16 grid confirms it."""
    return x.hypothesis.freedom > 0 and "on_bf16_grid" not in x.facts


def best_of(found: Sequence[Explanation]) -> Explanation | None:
    """The largest gain; among those that are nearly as large, the least free."""
    if not found:
        return None
    most = max(x.gain for x in found)
    return min((x for x in found if x.gain >= ALIKE * most), key=lambda x: (x.freedom, -x.gain))


def _clusters(e: Evidence, among: Mask) -> list[NDArray[np.int64]]:
    """Tokens [T] whose noise hangs together, one way after the other.

    After the same ids both sides compute the same numbers, noise and all, whichever rollout it is.
    """
    ways = [e.context[among], e.rollout[among]]
    if len(np.unique(ways[-1])) < CLUSTERS:
        return ways[:1]  # nor are there more prompts, which take a look at every rollout
    prompts = e.prompt[among]
    return [*ways, prompts] if len(np.unique(prompts)) >= CLUSTERS else ways


def excess(e: Evidence, mismatch: Floats) -> Explanation | None:
    """Where `mismatch` [T] is beyond what honest numerics explain, in its best scope."""
    noise = _noise(e)
    limit = EXCESS * noise
    beyond = mismatch - np.maximum(limit, FRINGE * mismatch.mean())
    hypothesis = Hypothesis("other_weights", lambda _: None, "", "")

    def weigh(scope: Scope) -> Explanation:
        inside = scope.tokens
        return Explanation(
            hypothesis=hypothesis,
            scope=scope,
            facts={},
            gain=float(beyond[inside].sum()),
            share=float(beyond[inside].sum() / max(mismatch[inside].sum(), 1e-12)),
            strength=strength_beyond(mismatch[inside], limit[inside], _clusters(e, inside)),
            left=float(mismatch[inside].sum() / noise[inside].sum()),
            tokens=int(inside.sum()),
        )

    def is_large(x: Explanation) -> bool:
        inside = x.scope.tokens
        share = EXCESS_SHARE_PICKED if x.scope.kind == "rollouts" else SHARE
        nats = float((e.temperature * mismatch)[inside].mean())
        least = STRENGTH_ALL if x.scope.kind == "all" else STRENGTH
        return x.share >= share and x.strength >= least and nats >= EXCESS_NATS

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
    own = np.bincount(e.rollout, floor(e), len(e.rollouts)) / np.maximum(size, 1)
    noise: Floats = np.maximum(own, floor(e).mean())[e.rollout]
    return noise


def _picked(
    e: Evidence, left: Mask, parts: dict[int, Evidence], hypothesis: Hypothesis
) -> Explanation | None:
    """The rollouts that the hypothesis explains one by one, judged together."""
    fitted = np.zeros(len(e.rollouts), bool)
    for i, part in parts.items():
        one = judge(part, hypothesis, everything(part))
        if one is not None:
            # of so many rollouts, some fit a number by chance
            least = 1.5 + np.sqrt(2 * np.log(len(parts))) if is_fitted(one) else 3.0
            fitted[i] = one.share >= SHARE_PICKED and one.strength >= least
    if not fitted.any():
        return None
    scope = of_rollouts(e, fitted, left)
    return judge(e.take(scope.tokens), hypothesis, scope)


def _stand_out(e: Evidence, beyond: Floats) -> Mask:
    """[n] rollouts that are clearly beyond by themselves."""
    out = np.zeros(len(e.rollouts), bool)
    for i in np.unique(e.rollout):
        mine = e.rollout == i
        if mine.sum() >= 5:
            out[i] = strength(beyond[mine], e.context[mine]) >= 3.0
    return out


def floor(e: Evidence) -> Floats:
    return np.maximum(e.noise, LEAST_FLOOR)

"""Predictors: what the engine's logprobs would be if one thing were wrong.

Each sees both sides' numbers of the tokens in question, may fit one number to them, and predicts
the engine's logprobs; None where it says nothing other than "as recorded".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from replay.evidence import Evidence, Floats, Mask
from rollout.self_check import GRID, GRID_SLACK

DEAD_BAND = 0.025  # clean slopes are up to 1.6 % low: errors in the regressor
TOGETHER = 0.9  # squared correlation; clean ones are 0.95 or more
ON_GRID = 0.9  # share of pairs of a bf16 head
GRID_PAIRS = 3000
FIT_ENTRIES = 10_000
NEAR = 0.2  # factors this near 1 that the bf16 grid can rule out
MAX_IDS = 5
LEAST_BIAS = 0.2  # nats; a bf16 head rounds logits of 16 or more to 0.125, divided by T


@dataclass(frozen=True, eq=False)
class Prediction:
    """The engine's logprobs if the hypothesis holds."""

    support: Floats  # [E]
    sampled: Floats | None = None  # [T] where not what `support` holds
    facts: dict[str, Any] = field(default_factory=dict)  # what was fitted, for the evidence
    applies: Mask | None = None  # [T] the tokens it can change, if not all


def scaled(e: Evidence, factor: Floats | float) -> Floats:
    """[E] The policy's logprobs with its logits multiplied by `factor` (a number or [T])."""
    by_entry = factor[e.rows] if isinstance(factor, np.ndarray) else factor
    return e.normalised(e.replay_support * by_entry)


def temperature_ignored(e: Evidence) -> Prediction | None:
    if np.allclose(e.temperature, 1.0):
        return None
    return Prediction(scaled(e, e.temperature), applies=~np.isclose(e.temperature, 1.0))


def temperature_doubled(e: Evidence) -> Prediction | None:
    if np.allclose(e.temperature, 1.0):
        return None
    return Prediction(scaled(e, 1 / e.temperature), applies=~np.isclose(e.temperature, 1.0))


def temperature_other(e: Evidence) -> Prediction | None:
    """One factor between the engine's logits and the policy's, by regression over supports."""
    slope = logit_factor(e)
    if slope is None:
        return None
    factor, share_before, share_after = _on_grid(e, slope)
    # where the head is bf16, its grid decides; else the fit outside its dead band
    if abs(factor - 1) < (5e-4 if share_after > ON_GRID > share_before else DEAD_BAND):
        return None
    if share_before > ON_GRID and abs(factor - 1) < NEAR:
        return None
    temperatures = sorted({round(float(t) / factor, 4) for t in np.unique(e.temperature)})
    facts: dict[str, Any] = {"logit_factor": round(factor, 4), "temperature": temperatures}
    if share_after > ON_GRID:
        facts["on_bf16_grid"] = {
            "as_recorded": round(share_before, 3),
            "estimate": round(share_after, 3),
        }
    return Prediction(scaled(e, factor), facts=facts)


def logit_factor(e: Evidence) -> float | None:
    """The slope of the engine's logprobs against the policy's, centred within each support.

    None where there is none: a factor leaves the correlation of both sides at 1, other weights do
    not, and the slope that those have is small for that reason alone.
    """
    if (e.has_support & e.informative).any():
        xx, yy, xy = _moments(e, e.replay_support)
        return xy / xx if xy > 0 and xy**2 >= TOGETHER * xx * yy else None
    if not e.informative.any():
        return None
    few = _fewer(e)
    return _search(0.3, 3.0, lambda factor: float(few.mismatch(scaled(few, factor)).mean()))


def _moments(e: Evidence, predicted: Floats) -> tuple[float, float, float]:
    """Sums of squares of `predicted` [E] and of the engine's logprobs, each centred within its
    support, and of their products."""
    use = (e.has_support & e.informative)[e.rows]
    weight = np.where(use, e.weights, 0.0)
    x, y = predicted, np.where(use, e.support_logprobs, 0.0)
    x = x - e.sums(weight * x)[e.rows]
    y = y - e.sums(weight * y)[e.rows]
    xx, yy, xy = (float((weight * a * b).sum()) for a, b in ((x, x), (y, y), (x, y)))
    return xx, yy, xy


def _on_grid(e: Evidence, factor: float) -> tuple[float, float, float]:
    """`factor` made exact by the grid of a bf16 head, and the shares on it before and after."""
    known = np.flatnonzero(e.has_support[e.rows])
    if len(known) < 20:
        return factor, 0.0, 0.0
    some = known[:: max(1, len(known) // GRID_PAIRS)]
    peak = np.maximum.reduceat(e.support_logprobs, e.support.offsets[:-1])[e.rows]
    steps = ((e.support_logprobs - peak) * e.temperature[e.rows])[some] / GRID
    steps = steps[(steps != 0) & (steps > -4 / GRID)]  # the farther, the sooner it is off the grid
    if len(steps) < 10:
        return factor, 0.0, 0.0

    def share(f: float, slack: float) -> float:
        off = steps / f
        return float((np.abs(off - np.round(off)) * GRID < slack).mean())

    before = share(1.0, GRID_SLACK)
    if before > ON_GRID and abs(factor - 1) < NEAR:
        return factor, before, before
    # each pass is as coarse as its slack allows
    for width, points, slack in ((0.02, 41, GRID / 8), (1e-3, 101, 1e-4), (2e-5, 21, GRID_SLACK)):
        nearby = factor * (1 + width * np.linspace(-1, 1, points))
        shares = [share(float(f), slack) for f in nearby]
        if max(shares) <= ON_GRID:
            return factor, before, max(shares)
        factor = float(np.mean(nearby[np.array(shares) == max(shares)]))
    return factor, before, max(shares)


def full_logprobs_stored(e: Evidence) -> Prediction | None:
    mass = e.replay_full - e.replay
    return Prediction(e.replay_support + mass[e.rows], sampled=e.replay_full)


def support_short(e: Evidence) -> Prediction | None:
    """Both sides agree on the whole vocabulary, and the engine's support had more mass.

    The prediction rests on the recorded `sampling` itself, so it must also look like ids that are
    missing: mass of the engine's at most 1, and never less than that of the recorded support.
    """
    if np.isnan(e.full).any():
        return None
    sampled = e.replay_full - (e.full - e.sampling)
    less = sampled - e.replay > 0.1
    impossible = e.full - e.sampling > 1e-3
    if less.mean() > 0.05 or impossible.mean() > 0.01:
        return None
    return Prediction(e.replay_support + (sampled - e.replay)[e.rows], sampled=sampled)


def shifted(e: Evidence) -> Prediction | None:
    """The sampled token's logprob belongs to its neighbour; supports are not touched."""
    if e.has_support.mean() > 0.5:
        return None  # the sampled id's logprob among those of its support is its own
    options = [_shifted_by(e, step) for step in (1, -1)]
    return min(options, key=lambda p: float(e.mismatch(p.support, p.sampled).sum()))


def _shifted_by(e: Evidence, step: int) -> Prediction:
    sampled = np.full(len(e), np.nan)
    here = slice(None, -step) if step > 0 else slice(-step, None)
    there = slice(step, None) if step > 0 else slice(None, step)
    same = e.rollout[here] == e.rollout[there]
    sampled[here] = np.where(same, e.replay[there], np.nan)
    sampled = np.where(np.isnan(sampled), e.replay, sampled)  # no neighbour: as recorded
    support = e.replay_support + (sampled - e.replay)[e.rows]
    return Prediction(support, sampled=sampled, facts={"shift": step})


def softcap(e: Evidence) -> Prediction | None:
    """tanh bends large logits: a curvature that no factor gives."""
    cap = None
    if e.softcap is None and (cap := _search(10.0, 400.0, _loss_of_cap(_fewer(e)))) is None:
        return None
    predicted = _capped(e, cap)
    xx, yy, xy = _moments(e, predicted)
    if xy**2 < TOGETHER * xx * yy:
        return None
    return Prediction(predicted, facts={"cap": cap and round(cap, 1), "policy_cap": e.softcap})


def _capped(e: Evidence, cap: float | None) -> Floats:
    """[E] The policy's logprobs with its logits capped at `cap`, and without the policy's own."""
    temperature = e.temperature[e.rows]
    z = temperature * (e.replay_support + e.logsumexp[e.rows])
    if e.softcap is not None:
        z = e.softcap * np.arctanh(np.clip(z / e.softcap, -1 + 1e-7, 1 - 1e-7))
    return e.normalised((z if cap is None else cap * np.tanh(z / cap)) / temperature)


def _loss_of_cap(e: Evidence) -> Callable[[float], float]:
    return lambda cap: float(e.mismatch(_capped(e, cap)).mean())


def _fewer(e: Evidence) -> Evidence:
    """Every n-th token, enough to fit one number."""
    step = len(e.support.ids) // FIT_ENTRIES
    return e if step <= 1 else e.take(np.arange(len(e)) % step == 0)


def penalty(e: Evidence) -> Prediction | None:
    """A constant on every id that is in the output already."""
    return _shift(e, already_in_output(e), "shift")


def already_in_output(e: Evidence) -> Mask:
    """[E] whether the entry's id stands among the output tokens before it."""
    outputs = [r.output_ids.astype(np.int64) for r in e.rollouts]
    owner = np.repeat(np.arange(len(outputs)), [len(o) for o in outputs])
    position = np.concatenate([np.arange(len(o)) for o in outputs])
    keys, first = np.unique((owner << 32) | np.concatenate(outputs), return_index=True)
    wanted = (e.rollout[e.rows] << 32) | e.support.ids.astype(np.int64)
    at = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    seen: Mask = (keys[at] == wanted) & (position[first[at]] < e.position[e.rows])
    return seen


def _shift(e: Evidence, is_moved: Mask, name: str) -> Prediction | None:
    use = (e.has_support & e.informative)[e.rows]
    x = is_moved.astype(np.float64)
    x = np.where(use, x - e.sums(e.weights * x)[e.rows], 0.0)
    information = float((e.weights * x * x).sum())
    if information <= 0:
        return None
    residual = np.where(use, e.support_logprobs - e.replay_support, 0.0)
    by = float((e.weights * x * residual).sum()) / information
    if abs(by) < 0.05:
        return None
    moved = e.sums(is_moved.astype(np.float64)) > 0
    return Prediction(
        e.normalised(e.replay_support + by * is_moved), facts={name: round(by, 4)}, applies=moved
    )


def bias(e: Evidence) -> Prediction | None:
    """A constant on few ids, each found by its own evidence, strongest first."""
    if not (e.has_support & e.informative).any():
        return None
    ids, place = np.unique(e.support.ids, return_inverse=True)
    predicted, found = e.replay_support, np.zeros(len(ids))
    for _ in range(MAX_IDS):
        use = e.has_support[e.rows]
        residual = np.where(use, e.support_logprobs - predicted, 0.0)
        residual = residual - e.sums(e.weights * residual)[e.rows]
        pull = np.where(use, e.weights * residual, 0.0)
        information = np.bincount(place, np.where(use, e.weights * (1 - e.weights), 0.0))
        with np.errstate(invalid="ignore", divide="ignore"):
            by = np.bincount(place, pull) / information
            strength = np.abs(np.bincount(place, pull)) / np.sqrt(np.bincount(place, pull**2))
        # once one is sure, the next are likelier
        clear = strength > (3.5 if found.any() else 4.5)
        enough = (np.bincount(place) >= 6) & (np.abs(by) > LEAST_BIAS) & clear
        strength = np.where(enough & (found == 0), strength * np.abs(by), 0.0)
        best = int(np.argmax(strength))
        if strength[best] == 0:
            break
        found[best] = by[best]
        predicted = e.normalised(e.replay_support + found[place])
    if not found.any():
        return None
    changed = {int(i): round(float(b), 4) for i, b in zip(ids, found, strict=True) if b}
    return Prediction(
        predicted,
        facts={"ids": changed},
        applies=e.sums((found[place] != 0).astype(np.float64)) > 0,
    )


def _search(low: float, high: float, loss: Callable[[float], float]) -> float | None:
    """The minimum on a logarithmic axis: a coarse scan, then golden section. None at an end."""
    points = np.geomspace(low, high, 25)
    best = int(np.argmin([loss(float(p)) for p in points]))
    if best in (0, len(points) - 1):
        return None
    a, b = np.log(points[best - 1]), np.log(points[best + 1])
    ratio = (5**0.5 - 1) / 2
    for _ in range(14):
        c, d = b - ratio * (b - a), a + ratio * (b - a)
        if loss(float(np.exp(c))) < loss(float(np.exp(d))):
            b = d
        else:
            a = c
    return float(np.exp((a + b) / 2))

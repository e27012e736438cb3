"""Binned numbers of a replay for its page: a million tokens become a few hundred rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.tokens import OK, Floats, TokenTable
from rollout.record import Rollout

Rows = list[dict[str, Any]]

PER_DECADE = 5
SMALLEST, LARGEST = -8, 1  # decades of |log_ratio|
SIDE = 48  # bins of the density, each way
LOWEST = -40.0  # nats: what an engine writes for "no number" would squeeze all else
POSITIONS = 40
VERSIONS = 24
NO_VERSION = "not recorded"


def log_ratio_histogram(tokens: TokenTable) -> Rows:
    """Shares of |log_ratio| in bins of a fifth of a decade, over the support and without it.

    The first row, `from` and `to` 0, holds the values that are exactly 0; values beyond the edges
    are in the outermost bins. Empty bins at both ends are left out.
    """
    scored = np.isfinite(tokens.log_ratio)
    edges = np.logspace(SMALLEST, LARGEST, (LARGEST - SMALLEST) * PER_DECADE + 1)
    over = _log_shares(tokens.log_ratio[scored], edges)
    without = _log_shares(tokens.log_ratio_without_support[scored], edges)
    used = np.flatnonzero(over[1:] + without[1:])
    bins = range(used[0], used[-1] + 1) if len(used) else range(0)
    zero = {"from": 0.0, "to": 0.0, "support": float(over[0]), "whole": float(without[0])}
    return [zero] + [
        {
            "from": float(edges[i]),
            "to": float(edges[i + 1]),
            "support": float(over[i + 1]),
            "whole": float(without[i + 1]),
        }
        for i in bins
    ]


def _log_shares(log_ratio: Floats, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """[B + 1] shares: exactly 0, then the B bins between `edges`."""
    size = np.abs(log_ratio[np.isfinite(log_ratio)]).astype(np.float64)
    if not len(size):
        return np.zeros(len(edges))
    at = np.clip(np.searchsorted(edges, size, side="right"), 1, len(edges) - 1)
    counts = np.bincount(np.where(size == 0, 0, at), minlength=len(edges))
    return counts / len(size)


@dataclass(frozen=True)
class Density:
    """Tokens by engine's and trainer's logprob over the support; both axes from `floor` to 0."""

    floor: float  # nats; smaller logprobs are in the outermost bins
    counts: NDArray[np.int64]  # [SIDE, SIDE], engine first
    singletons: int  # 0 on both sides by definition, not counted

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())


def density(tokens: TokenTable) -> Density:
    scored = np.isfinite(tokens.log_ratio)
    several = scored & (tokens.support_size > 1)
    engine, trainer = tokens.sampling_logprobs[several], tokens.replay_logprobs[several]
    both = np.concatenate([engine, trainer])
    low = float(np.floor(np.percentile(both, 0.1))) if len(both) else -1.0
    floor = max(min(low, -1.0), LOWEST)
    at = [_bin(values, floor) for values in (engine, trainer)]
    counts = np.bincount(at[0] * SIDE + at[1], minlength=SIDE * SIDE).reshape(SIDE, SIDE)
    return Density(floor, counts, int(scored.sum() - several.sum()))


def _bin(values: Floats, floor: float) -> NDArray[np.int64]:
    place = (values.astype(np.float64) - floor) / -floor * SIDE
    return np.clip(place, 0, SIDE - 1).astype(np.int64)


def by_position(tokens: TokenTable) -> Rows:
    """Mismatch in at most 40 equal bins of the position in the output."""
    last = int(tokens.position.max(initial=0))
    width = last // POSITIONS + 1
    labels = {i: {"from": i * width, "to": (i + 1) * width - 1} for i in range(last // width + 1)}
    return _grouped(tokens, tokens.position // width, labels)


def by_support_size(tokens: TokenTable) -> Rows:
    """Mismatch by ids in the support: 1, 2, 3 to 4, 5 to 8, and so on."""
    group = np.ceil(np.log2(np.maximum(tokens.support_size, 1))).astype(np.int64)
    labels = {
        i: {"from": 2 ** (i - 1) + 1 if i else 1, "to": 2**i}
        for i in range(int(group.max(initial=0)) + 1)
    }
    return _grouped(tokens, group, labels)


def by_version(tokens: TokenTable, rollouts: Mapping[str, Rollout]) -> Rows:
    """Mismatch by the weights that sampled, in the order in which they appear; the newest 24."""
    names: dict[str, int] = {NO_VERSION: 0}
    group = np.zeros(len(tokens), np.int64)
    for rollout_id, rows in rows_of_rollouts(tokens):
        for span in rollouts[rollout_id].weight_versions:
            inside = (tokens.position[rows] >= span.start) & (tokens.position[rows] < span.end)
            group[rows][inside] = names.setdefault(span.version, len(names))
    return _grouped(tokens, group, {i: {"version": name} for name, i in names.items()})[-VERSIONS:]


def rows_of_rollouts(tokens: TokenTable) -> list[tuple[str, slice]]:
    """The rows of each rollout in `tokens`; those of one rollout stand together."""
    if not len(tokens):
        return []
    ids = tokens.rollout_id
    starts = [0, *(np.flatnonzero(ids[1:] != ids[:-1]) + 1).tolist(), len(ids)]
    return [(ids[a], slice(a, b)) for a, b in zip(starts[:-1], starts[1:], strict=True)]


def worst_tokens(tokens: TokenTable, limit: int = 50) -> NDArray[np.int64]:
    """Rows of the worst tokens: findings and tokens without a score, then by |log_ratio|."""
    return np.argsort(-badness(tokens), kind="stable")[:limit]


def badness(tokens: TokenTable) -> NDArray[np.float64]:
    """|log_ratio| of each token; infinite where it breaks a rule or has no score."""
    with np.errstate(invalid="ignore"):
        size = np.abs(tokens.log_ratio.astype(np.float64))
    return np.where(np.isfinite(size) & (tokens.finding == OK), size, np.inf)


def _grouped(tokens: TokenTable, group: NDArray[Any], labels: Mapping[int, Any]) -> Rows:
    """One row per group with a scored token: how many, and their mismatch."""
    scored = np.isfinite(tokens.log_ratio)
    group, log_ratio = group[scored], tokens.log_ratio[scored].astype(np.float64)
    without = np.abs(tokens.log_ratio_without_support[scored].astype(np.float64))
    with np.errstate(over="ignore"):
        size, kl = np.abs(log_ratio), np.expm1(log_ratio) - log_ratio
    order = np.lexsort((size, group))
    ends = np.cumsum(np.bincount(group, minlength=len(labels)))
    rows, start = [], 0
    for i, end in enumerate(ends.tolist()):
        if end > start:
            members = order[start:end]  # by size
            rows.append(
                {
                    **labels[i],
                    "tokens": end - start,
                    "mean": float(size[members].mean()),
                    "p90": float(size[members[int(0.9 * (end - start - 1))]]),
                    "whole": float(without[members].mean()),
                    "mismatch_kl": float(kl[members].mean()),
                }
            )
        start = end
    return rows

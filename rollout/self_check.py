"""What the recorded numbers say about their engine, without any trainer.

With `support_logprobs` and `full_logprobs` every id i of a support has a known probability in the
engine's own whole softmax, y being the sampled id::

    p_i = exp(support_logprobs_i + full_logprobs_y - sampling_logprobs_y)

A filter order that allows no such support is ruled out by it. An engine whose head gives bf16
logits shows that too: T * (lp_i - lp_j) is the difference of two logits, a multiple of their grid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.record import Rollout

UNKNOWN = "unknown"
SLACK = 1e-5  # of a probability: rounding of fp32 sums

GRID = 1 / 32  # bf16 numbers of size 4 or more are multiples of it
GRID_SLACK = 2e-5  # float32 logprobs; recorded sets: 99.5 % of pairs are within 1e-5

MIN_ROWS = 3  # fewer rows that rule something out are not believed
MAX_VOCABULARY = 2**20  # more ids than any model has

FEW = 0.1  # a fact may be contradicted by so many rows for each that contradicts the other:
# rounding and ties at a cut-off
EXPECTED_TIES = 5.0  # none seen where so many are expected: a chance of e^-5


@dataclass(frozen=True)
class EngineCheck:
    """Facts about the engine, each "unknown" where the evidence lacks; counts are of tokens.

    A row is an output token with two ids or more. Order is read from rows with top_k and a top_p
    below 1: with top_p 1 both orders give the same support. Rows with min_p have an order of their
    own: some engines change it then.
    """

    filter_order: str  # joint, sequential, neither
    tie_policy: str  # keep: ids that tie at the cut-off of top_k stay together; cut: by rank
    head: str  # bfloat16, finer
    full_logprobs: str  # after_temperature, before_temperature
    order_rows: int
    joint_violated: int
    sequential_violated: int
    min_p_filter_order: str  # the same for rows with min_p
    min_p_order_rows: int
    min_p_joint_violated: int
    min_p_sequential_violated: int
    top_k_rows: int  # supports of top_k ids or more
    above_top_k: int
    ties_expected: float  # cut-off ties among top_k_rows, from ties just inside the cut-off
    grid_pairs: int
    on_grid: int
    temperature_rows: int  # with T other than 1, two ids or more
    after_temperature_violated: int
    before_temperature_violated: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class SelfCheck:
    """Adds up evidence over rollouts, one at a time; memory does not grow."""

    def __init__(self) -> None:
        self._n: Counter[str] = Counter()

    def add(self, rollout: Rollout) -> None:
        """Count what the rows of `rollout` show; numbers that are not finite show nothing."""
        rows = _Rows.of(rollout)
        if rows is None:
            return
        self._add_ties(rows, rollout)
        self._add_grid(rows, rollout)
        if rollout.full_logprobs is not None:
            self._add_temperature(rows, rollout)
            self._add_order(rows, rollout)

    def facts(self) -> EngineCheck:
        n = self._n
        before = _decide(
            {"after_temperature": n["after_wrong"], "before_temperature": n["before_wrong"]},
            neither=UNKNOWN,
        )
        # with full logprobs before temperature, only T = 1 gives the engine's probabilities
        parts = ("t1_",) if before == "before_temperature" else ("t1_", "")
        (rows, joint, sequential), (min_p_rows, min_p_joint, min_p_sequential) = (
            [
                sum(n[f"{part}{min_p}{name}"] for part in parts)
                for name in ("order", "joint", "sequential")
            ]
            for min_p in ("", "min_p_")
        )
        ties = n["top_k_rows"] * n["tied_inside"] / max(n["bound_rows"], 1)
        if n["above_top_k"] >= MIN_ROWS:
            policy = "keep"
        elif n["above_top_k"] == 0 and ties >= EXPECTED_TIES:
            policy = "cut"
        else:
            policy = UNKNOWN
        share = n["on_grid"] / max(n["pairs"], 1)
        head = UNKNOWN
        if n["pairs"] >= 100:
            head = "bfloat16" if share > 0.9 else "finer" if share < 0.2 else UNKNOWN
        return EngineCheck(
            filter_order=_decide({"joint": joint, "sequential": sequential}, "neither"),
            tie_policy=policy,
            head=head,
            full_logprobs=before,
            order_rows=rows,
            joint_violated=joint,
            sequential_violated=sequential,
            min_p_filter_order=_decide(
                {"joint": min_p_joint, "sequential": min_p_sequential}, "neither"
            ),
            min_p_order_rows=min_p_rows,
            min_p_joint_violated=min_p_joint,
            min_p_sequential_violated=min_p_sequential,
            top_k_rows=n["top_k_rows"],
            above_top_k=n["above_top_k"],
            ties_expected=round(ties, 2),
            grid_pairs=n["pairs"],
            on_grid=n["on_grid"],
            temperature_rows=n["t_rows"],
            after_temperature_violated=n["after_wrong"],
            before_temperature_violated=n["before_wrong"],
        )

    def _add_ties(self, rows: _Rows, r: Rollout) -> None:
        if r.top_k < 1:
            return
        bound = rows.counts >= r.top_k
        exactly = rows.counts == r.top_k
        self._n["top_k_rows"] += int(bound.sum())
        self._n["above_top_k"] += int((rows.counts > r.top_k).sum())
        self._n["bound_rows"] += int(exactly.sum())
        self._n["tied_inside"] += int((exactly & (rows.weakest_ids > 1)).sum())

    def _add_grid(self, rows: _Rows, r: Rollout) -> None:
        on_grid, pairs = grid_share(rows.logprobs, rows.top[rows.of_entry], r.temperature)
        self._n["on_grid"] += on_grid
        self._n["pairs"] += pairs

    def _add_temperature(self, rows: _Rows, r: Rollout) -> None:
        if r.temperature == 1.0:
            return
        # no support has more than all of the mass, neither at T nor, scaled back, at 1
        relative = rows.logprobs - rows.sampling[rows.of_entry]
        after = rows.sums(np.exp(relative + rows.full[rows.of_entry]))
        before = rows.sums(np.exp(relative * r.temperature + rows.full[rows.of_entry]))
        self._n["t_rows"] += len(rows.counts)
        self._n["after_wrong"] += int((after > 1 + 10 * SLACK).sum())
        self._n["before_wrong"] += int((before > 1 + 10 * SLACK).sum())

    def _add_order(self, rows: _Rows, r: Rollout) -> None:
        if not (r.top_k >= 1 and 0 < r.top_p < 1):
            return
        p = np.exp(rows.logprobs + (rows.full - rows.sampling)[rows.of_entry])
        mass, weakest = rows.sums(p), np.minimum.reduceat(p, rows.starts)
        # mass of the ids above the weakest one: it is inside, so they had not filled top_p
        above = mass - weakest * rows.weakest_ids
        missing = np.maximum(r.top_k - rows.counts, 0)
        top_k_mass_at_most = np.minimum(1.0, mass + missing * weakest)
        too_wide = above > r.top_p + SLACK
        too_narrow = (rows.counts < r.top_k) & (mass < r.top_p - SLACK)
        if r.min_p > 0:
            # whatever min_p left out is below this; a narrow support is its work where that may do
            too_narrow &= 1 - mass > MAX_VOCABULARY * r.min_p * np.maximum.reduceat(p, rows.starts)
        part = ("t1_" if r.temperature == 1.0 else "") + ("min_p_" if r.min_p > 0 else "")
        self._n[part + "order"] += len(mass)
        self._n[part + "joint"] += int((too_wide | too_narrow).sum())
        self._n[part + "sequential"] += int((above > r.top_p * top_k_mass_at_most + SLACK).sum())


def check_engine(rollouts: Iterable[Rollout]) -> EngineCheck:
    """The facts that all `rollouts` together show."""
    check = SelfCheck()
    for rollout in rollouts:
        check.add(rollout)
    return check.facts()


def grid_share(
    logprobs: NDArray[np.floating], reference: NDArray[np.floating], temperature: float
) -> tuple[int, int]:
    """Of the pairs (id, reference of its row) with different logprobs: on the bf16 grid, and all.

    Both arrays are [E]; the reference is the largest logprob of each id's support.
    """
    steps = (logprobs.astype(np.float64) - reference) * (temperature / GRID)
    steps = steps[(steps != 0) & np.isfinite(steps)]
    near = np.abs(steps - np.round(steps)) * GRID < GRID_SLACK * max(1.0, temperature)
    return int(near.sum()), len(steps)


def _decide(violated: dict[str, int], neither: str) -> str:
    """The one of two names that hardly any rows contradict while enough contradict the other."""
    (fewer, least), (_, most) = sorted(violated.items(), key=lambda item: item[1])
    if most < MIN_ROWS:
        return UNKNOWN
    return fewer if least <= FEW * most else neither


@dataclass(frozen=True, eq=False)
class _Rows:
    """The sampled tokens of one rollout with two ids or more and finite numbers, K of them."""

    counts: NDArray[np.int64]  # [K]
    starts: NDArray[np.int64]  # [K] first entry
    of_entry: NDArray[np.int64]  # [E] row of each entry
    logprobs: NDArray[np.float64]  # [E]
    top: NDArray[np.float64]  # [K] largest logprob
    weakest_ids: NDArray[np.int64]  # [K] ids that share the smallest logprob
    sampling: NDArray[np.float64]  # [K]
    full: NDArray[np.float64]  # [K] NaN where not recorded

    @classmethod
    def of(cls, r: Rollout) -> _Rows | None:
        if r.support_logprobs is None:
            return None
        finite = np.bincount(r.support.rows, ~np.isfinite(r.support_logprobs), len(r.support)) == 0
        full = np.zeros(len(r.support)) if r.full_logprobs is None else r.full_logprobs
        finite &= np.isfinite(r.sampling_logprobs) & np.isfinite(full)
        use = finite & (r.support.counts > 1)
        if not use.any():
            return None
        logprobs = r.support_logprobs[use[r.support.rows]].astype(np.float64)
        counts = r.support.counts[use].astype(np.int64)
        starts = np.cumsum(counts) - counts
        of_entry = np.repeat(np.arange(len(counts)), counts)
        weakest = np.minimum.reduceat(logprobs, starts)
        return cls(
            counts=counts,
            starts=starts,
            of_entry=of_entry,
            logprobs=logprobs,
            top=np.maximum.reduceat(logprobs, starts),
            weakest_ids=np.add.reduceat((logprobs == weakest[of_entry]).astype(np.int64), starts),
            sampling=r.sampling_logprobs[use].astype(np.float64),
            full=full[use].astype(np.float64),
        )

    def sums(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """[K] Sums over each row's entries."""
        total: NDArray[np.float64] = np.add.reduceat(values, self.starts)
        return total

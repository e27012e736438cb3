"""Statistics of a run, derived from its shards and line files: a resumed run counts as one.

One pass, and memory for the rollouts but not for their tokens: a run may be larger than memory.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.files import read_lines
from rollout.reader import open_run
from rollout.schema import ERRORS_FILE, REJECTED_FILE
from rollout.self_check import SelfCheck


def run_stats(path: Path) -> dict[str, Any]:
    """Counts, support sizes, latencies and what went wrong, over the whole run directory."""
    run = open_run(path)
    totals: Counter[str] = Counter()
    finish_reasons: Counter[str] = Counter()
    versions: Counter[str] = Counter()  # output tokens; those without a span are in none
    sizes, groups, engine = SupportSizes(), _Groups(), SelfCheck()
    latencies: list[float] = []
    attempts: list[int] = []
    rewards: list[float] = []
    for rollout in run:
        totals["rollouts"] += 1
        totals["output_tokens"] += rollout.num_output_tokens
        totals["prompt_tokens"] += len(rollout.prompt_ids)
        finish_reasons[rollout.finish_reason] += 1
        for span in rollout.weight_versions:
            versions[span.version] += span.end - span.start
        sizes.add(rollout.support.counts, rollout.top_k)
        groups.add(rollout.prompt_id, rollout.output_ids)
        engine.add(rollout)
        latencies.append(rollout.latency_ms)
        attempts.append(rollout.attempts)
        if rollout.reward is not None:
            rewards.append(rollout.reward)
    tokens = totals["output_tokens"]
    return {
        **{name: totals[name] for name in ("rollouts", "output_tokens", "prompt_tokens")},
        "finish_reasons": dict(finish_reasons),
        "latency_ms": percentiles(latencies),
        "support_size": sizes.as_dict(),
        "engine_check": engine.facts().as_dict(),
        "bytes_per_token": sum(s.size_bytes for s in run.shards) / tokens if tokens else None,
        "duplicate_groups": groups.duplicates(),
        "weight_versions": dict(versions),
        "attempts": {
            "total": sum(attempts),
            "max": max(attempts, default=0),
            "retried": sum(count > 1 for count in attempts),
        },
        "reward": {"count": len(rewards), "mean": float(np.mean(rewards))} if rewards else None,
        "failed": dict(Counter(line["reason"] for line in read_lines(path / ERRORS_FILE))),
        "rejected": dict(Counter(line["reason"] for line in read_lines(path / REJECTED_FILE))),
    }


class SupportSizes:
    """Sizes of the supports of sampled tokens, as a histogram."""

    def __init__(self) -> None:
        self._counts = np.zeros(1, np.int64)  # tokens by support size
        self._above_top_k = 0

    def add(self, sizes: NDArray[np.int32], top_k: NDArray[np.integer] | int) -> None:
        """`top_k` of all or of each token, -1 where there was no limit; size 0 is forced."""
        counts = np.bincount(sizes[sizes > 0], minlength=len(self._counts))
        counts[: len(self._counts)] += self._counts
        self._counts = counts
        self._above_top_k += int(((sizes > top_k) & (np.asarray(top_k) > 0)).sum())

    def as_dict(self) -> dict[str, Any]:
        """`above_top_k` is no fault: samplers that cut by threshold keep every id that ties."""
        total = int(self._counts.sum())
        if not total:
            return {}
        return {
            "mean": float(self._counts @ np.arange(len(self._counts)) / total),
            "median": self._percentile(50),
            "p99": self._percentile(99),
            "max": len(self._counts) - 1,
            "singletons": int(self._counts[1]),
            "above_top_k": self._above_top_k,
        }

    def _percentile(self, q: float) -> float:
        """With linear interpolation, as numpy's."""
        upto = np.cumsum(self._counts)
        place = q / 100 * (int(upto[-1]) - 1)
        low, high = np.searchsorted(upto, [np.floor(place), np.ceil(place)], side="right")
        return float(low + (high - low) * (place - np.floor(place)))


def support_sizes(sizes: NDArray[np.int32], top_k: NDArray[np.integer]) -> dict[str, Any]:
    """`SupportSizes` of one array."""
    found = SupportSizes()
    found.add(sizes, top_k)
    return found.as_dict()


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p95 and p99."""
    if not values:
        return {}
    return {f"p{q}": float(np.percentile(values, q)) for q in (50, 95, 99)}


class _Groups:
    """Prompts all of whose rollouts (two or more) are the same tokens: no advantage can be had."""

    def __init__(self) -> None:
        self._first: dict[str, bytes] = {}
        self._is_alike: dict[str, bool] = {}  # of prompts with two rollouts or more

    def add(self, prompt_id: str, output_ids: NDArray[np.int32]) -> None:
        output = hashlib.blake2b(output_ids.tobytes(), digest_size=16).digest()
        first = self._first.setdefault(prompt_id, b"")
        if not first:
            self._first[prompt_id] = output
            return
        self._is_alike[prompt_id] = self._is_alike.get(prompt_id, True) and first == output

    def duplicates(self) -> int:
        return sum(self._is_alike.values())

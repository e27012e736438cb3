"""Statistics of a run, derived from its shards and line files: a resumed run counts as one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.files import read_lines
from rollout.reader import Run, open_run
from rollout.record import Rollout
from rollout.schema import ERRORS_FILE, REJECTED_FILE


def run_stats(path: Path) -> dict[str, Any]:
    """Counts, support sizes, latencies and what went wrong, over the whole run directory."""
    run = open_run(path)
    rollouts = list(run)
    sizes = np.concatenate([np.zeros(0, np.int32), *(r.support.counts for r in rollouts)])
    limits = np.concatenate(
        [np.zeros(0, np.int64), *(np.full(r.num_output_tokens, r.top_k) for r in rollouts)]
    )
    tokens = sum(r.num_output_tokens for r in rollouts)
    return {
        "rollouts": len(rollouts),
        "output_tokens": tokens,
        "prompt_tokens": sum(len(r.prompt_ids) for r in rollouts),
        "finish_reasons": dict(Counter(r.finish_reason for r in rollouts)),
        "latency_ms": percentiles([r.latency_ms for r in rollouts]),
        "support_size": support_sizes(sizes, limits),
        "bytes_per_token": _shard_bytes(run) / tokens if tokens else None,
        "duplicate_groups": _duplicate_groups(run),
        "weight_versions": _weight_versions(rollouts),
        "attempts": _attempts(rollouts),
        "reward": _reward(rollouts),
        "failed": dict(Counter(line["reason"] for line in read_lines(path / ERRORS_FILE))),
        "rejected": dict(Counter(line["reason"] for line in read_lines(path / REJECTED_FILE))),
    }


def support_sizes(sizes: NDArray[np.int32], top_k: NDArray[np.integer]) -> dict[str, Any]:
    """Sizes of the supports of sampled tokens; `top_k` per token, -1 where there was no limit.

    `above_top_k` is no fault: samplers that cut by threshold keep every id that ties there.
    """
    sampled = sizes > 0
    sizes, top_k = sizes[sampled], top_k[sampled]
    if not len(sizes):
        return {}
    return {
        "mean": float(sizes.mean()),
        "median": float(np.median(sizes)),
        "p99": float(np.percentile(sizes, 99)),
        "max": int(sizes.max()),
        "singletons": int((sizes == 1).sum()),
        "above_top_k": int(((sizes > top_k) & (top_k > 0)).sum()),
    }


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p95 and p99."""
    if not values:
        return {}
    return {f"p{q}": float(np.percentile(values, q)) for q in (50, 95, 99)}


def _weight_versions(rollouts: list[Rollout]) -> dict[str, int]:
    """Output tokens by the weights that sampled them; tokens without a span are in none."""
    tokens: Counter[str] = Counter()
    for rollout in rollouts:
        for span in rollout.weight_versions:
            tokens[span.version] += span.end - span.start
    return dict(tokens)


def _attempts(rollouts: list[Rollout]) -> dict[str, int]:
    """Times the stored rollouts were asked for; asking again favours what an engine does well."""
    attempts = [r.attempts for r in rollouts]
    return {
        "total": sum(attempts),
        "max": max(attempts, default=0),
        "retried": sum(count > 1 for count in attempts),
    }


def _reward(rollouts: list[Rollout]) -> dict[str, Any] | None:
    """Mean reward of the rollouts that have one; None where none has."""
    rewards = [r.reward for r in rollouts if r.reward is not None]
    return {"count": len(rewards), "mean": float(np.mean(rewards))} if rewards else None


def _shard_bytes(run: Run) -> int:
    return sum(shard.size_bytes for shard in run.shards)


def _duplicate_groups(run: Run) -> int:
    """Prompts all of whose rollouts (two or more) are the same tokens: no advantage can be had."""
    groups: dict[str, list[bytes]] = {}
    for rollout in run:
        groups.setdefault(rollout.prompt_id, []).append(rollout.output_ids.tobytes())
    return sum(len(outputs) > 1 and len(set(outputs)) == 1 for outputs in groups.values())

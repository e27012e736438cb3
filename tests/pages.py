"""Replays made up for tests of the page: any number of tokens at once, and texts that attack it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from builders import make_rollout

from replay import GatesConfig, TokenTable, Verified, make_report, pack
from replay.html import render_page
from replay.strips import Strip, StripCollector
from replay.tokens import recorded
from rollout.record import Rollout, WeightSpan
from rollout.support import Support

HOSTILE = {
    7: "<script>document.title='owned'</script>",
    8: "</script><img src=x onerror=document.title='owned'>",
    9: "\n",
    10: "{{ 7 * 7 }}",
    11: "&lt;b&gt;",
    12: "\u202eright to left\ud800",
}


def decode(token: int) -> str:
    """Something to attack with for a few ids, a word for the rest."""
    return HOSTILE.get(token, f" word{token}")


def synthetic(rollouts: int, tokens: int, seed: int = 0) -> tuple[list[Rollout], Verified, Any]:
    """Rollouts of `tokens` tokens each, how an honest trainer in bf16 scores them, and what the
    page keeps of them: a `StripCollector`."""
    generator = np.random.default_rng(seed)
    made = [_rollout(str(i), tokens, generator) for i in range(rollouts)]
    collector = StripCollector(made)
    tables = []
    for rollout in made:
        table, support_logprobs = _scored(rollout, generator)
        collector.add(next(pack([rollout], 1)), table, support_logprobs)
        tables.append(table)
    return made, Verified(TokenTable.concatenate(tables), (), rollouts), collector


def page(
    rollouts: Sequence[Rollout],
    verified: Verified,
    strips: Sequence[Strip],
    gates: GatesConfig | None = None,
    **parts: Any,
) -> str:
    """The page with the texts of `decode`; `parts` go into the summary, as an audit would."""
    report = make_report(verified, gates or GatesConfig(), {"model": "made up"})
    return render_page(report.as_dict() | parts, verified, rollouts, strips, decode)


def _rollout(name: str, length: int, generator: np.random.Generator) -> Rollout:
    counts = np.minimum(generator.geometric(0.12, length), 64)
    total = int(counts.sum())
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    within = np.arange(total) - np.repeat(starts, counts)
    ids = ((np.repeat(generator.integers(7, 900, length), counts) + within) % 1000).astype(np.int32)
    weights = generator.exponential(1, total).astype(np.float32) + 1e-3
    logprobs = np.log(weights / np.repeat(np.add.reduceat(weights, starts), counts))
    chosen = starts + (generator.random(length) * counts).astype(np.int64)
    sampling = np.where(counts == 1, 0, logprobs[chosen]).astype(np.float32)
    return make_rollout(
        name,
        output_ids=ids[chosen],
        loss_mask=np.ones(length, np.int8),
        sampling_logprobs=sampling,
        full_logprobs=sampling - np.float32(0.1),
        support=Support.from_counts(ids, counts),
        support_logprobs=np.where(np.repeat(counts, counts) == 1, 0, logprobs).astype(np.float32),
        top_k=64,
        weight_versions=(WeightSpan("v1", 0, length // 2), WeightSpan("v2", length // 2, length)),
    )


def _scored(rollout: Rollout, generator: np.random.Generator) -> tuple[TokenTable, Any]:
    noise = generator.normal(0, 0.03, rollout.num_output_tokens).astype(np.float32)
    noise[rollout.support.counts == 1] = 0
    sampling = rollout.sampling_logprobs
    table = replace(
        recorded(rollout, []),
        replay_logprobs=sampling + noise,
        replay_full_logprobs=sampling + noise - np.float32(0.1),
        support_kl=noise**2 / 2,
    )
    assert rollout.support_logprobs is not None
    return table, rollout.support_logprobs

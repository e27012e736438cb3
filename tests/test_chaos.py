"""Two thousand rollouts through proxies that spoil one reply in five: none lost, none twice."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos import KINDS, VOCAB_SIZE, Chaos, fake_reply, fake_server, proxy, running

from rollout.collect import make_requests, rollout_seed
from rollout.config import CollectConfig
from rollout.engines import pool as pool_module
from rollout.job import collect_into, make_engine
from rollout.keeper import Progress
from rollout.prompts import Prompt
from rollout.reader import open_run
from rollout.record import Rollout
from rollout.stats import run_stats
from rollout.support import Support
from rollout.writer import RunWriter

NUM_PROMPTS, PER_PROMPT = 500, 4
SEED = 7
LOG = logging.getLogger(__name__)
"""Numbers, shown with --log-cli-level=info."""


def config_for(urls: list[str]) -> CollectConfig:
    return CollectConfig.model_validate(
        {
            "model": "none",
            "prompts": {"dataset": "none"},
            "sampling": {"top_k": 40, "max_new_tokens": 8},
            "engine": {
                "kind": "sglang",
                "url": urls,
                "queue_timeout_s": 3.0,
                "slowest_tokens_per_s": 8.0,
            },
            "seed": SEED,
            "retry": {"attempts": 20, "first_pause_s": 0.02, "longest_pause_s": 0.2},
        }
    )


def collect(folder: Path, urls: list[str]) -> Progress:
    config = config_for(urls)
    prompts = [Prompt(str(i), np.array([i + 1, 7], np.int32), "") for i in range(NUM_PROMPTS)]
    wanted = list(make_requests(prompts, PER_PROMPT))

    async def run() -> Progress:
        async with make_engine(config, VOCAB_SIZE) as engine:
            with RunWriter(folder, {}, vocab_size=VOCAB_SIZE) as writer:
                return await collect_into(writer, engine, wanted, config)

    return asyncio.run(run())


def served(rollout: Rollout) -> dict[str, Any]:
    """What the server behind the proxies answers to the request of `rollout`."""
    params = {"max_new_tokens": 8, "sampling_seed": rollout_seed(SEED, rollout.rollout_id)}
    return fake_reply({"input_ids": rollout.prompt_ids.tolist(), "sampling_params": params})


@pytest.mark.stress
def test_every_rollout_arrives_once_and_every_failure_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "FIRST_REST_S", 0.02)
    chaos, start = Chaos(0.2, seed=1), time.monotonic()
    with (
        running(fake_server()) as server,
        running(proxy(server.url, chaos)) as first,
        running(proxy(server.url, chaos)) as second,
    ):
        progress = collect(tmp_path, [first, second])
    LOG.info("%.1f s, spoiled: %s", time.monotonic() - start, dict(chaos.spoiled))

    rollouts = {rollout.rollout_id: rollout for rollout in open_run(tmp_path)}
    wanted = [f"{i}:{j}" for i in range(NUM_PROMPTS) for j in range(PER_PROMPT)]
    assert sorted(r.rollout_id for r in open_run(tmp_path)) == sorted(wanted)
    assert (progress.done, progress.lost) == (len(wanted), 0)
    for rollout in rollouts.values():
        reply = served(rollout)
        meta = reply["meta_info"]
        assert rollout.output_ids.tolist() == reply["output_ids"], rollout.rollout_id
        rows = Support.from_rows(meta["output_token_sampling_mask"])
        np.testing.assert_array_equal(rollout.support.offsets, rows.offsets)
        np.testing.assert_array_equal(rollout.support.ids, rows.ids)
        logprobs = np.array(sum(meta["output_token_sampling_logprobs"], []), np.float32)
        np.testing.assert_array_equal(rollout.support_logprobs, logprobs)
    outputs = {(r.output_ids.tobytes(), r.support.ids.tobytes()) for r in rollouts.values()}
    assert len(outputs) == len(wanted), "another rollout's reply"

    assert chaos.spoiled.keys() == KINDS.keys(), "every kind was there"
    spoiled = sum(chaos.spoiled.values())
    assert 0.15 < spoiled / len(server.requests) < 0.25
    assert progress.retried == chaos.by_code
    stats = run_stats(tmp_path)
    assert stats["attempts"]["total"] == len(wanted) + spoiled == len(server.requests)
    assert (stats["failed"], stats["rejected"]) == ({}, {})
    assert chaos.too_early == 0, "asked again before Retry-After"

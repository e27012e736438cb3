"""Storing in a thread: a cancellation in the middle of a commit costs nothing that was stored."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
from builders import ScriptedEngine, make_completion

from rollout import shard as shard_module
from rollout.collect import Request
from rollout.config import CollectConfig, ShardsConfig
from rollout.files import write_at
from rollout.job import collect_into
from rollout.prompts import Prompt
from rollout.reader import open_run
from rollout.writer import RunWriter

CONFIG = CollectConfig.model_validate(
    {
        "model": "none",
        "prompts": {"dataset": "none"},
        "sampling": {"top_k": 4, "max_new_tokens": 2},
        "engine": {"kind": "sglang", "url": "none"},
        "concurrency": 1,
    }
)


def test_a_cancellation_waits_for_the_commit_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [Request(Prompt(str(i), np.array([1], np.int32), ""), 0) for i in range(20)]
    engine = ScriptedEngine(*[make_completion()] * 20)

    def slow_write(descriptor: int, offset: int, data: bytes) -> None:
        time.sleep(0.1)
        write_at(descriptor, offset, data)

    async def interrupted() -> None:
        with RunWriter(tmp_path, {}, shards=ShardsConfig(batch_rows=1)) as writer:
            monkeypatch.setattr(shard_module, "write_at", slow_write)
            task = asyncio.create_task(collect_into(writer, engine, wanted, CONFIG))
            await asyncio.sleep(0.55)  # in the middle of the third commit
            task.cancel()
            await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupted())
    stored = [rollout.rollout_id for rollout in open_run(tmp_path)]
    assert stored == [f"{i}:0" for i in range(len(stored))]
    assert 2 <= len(stored) < 20

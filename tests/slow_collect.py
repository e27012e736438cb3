"""Collect with an engine that takes its time, to be killed; or watch a run directory; a script.

    python tests/slow_collect.py collect FOLDER NUM_PROMPTS
    python tests/slow_collect.py watch FOLDER

`collect` starts a collecting process for every line on its standard input, in a fork, so that a
life costs no imports. It prints `started PID`, `committed ID ID …` after each commit has returned,
and `ended STATUS`. `watch` opens the directory again and again, as a dataset and as a run, until
its standard input ends, and prints how often.
"""

from __future__ import annotations

import asyncio
import os
import select
import sys
import time
from pathlib import Path

import datasets
import numpy as np
from builders import ScriptedEngine, make_completion

from rollout.collect import collect, make_requests
from rollout.config import ShardsConfig
from rollout.engines.base import Completion
from rollout.prompts import Prompt
from rollout.reader import open_run
from rollout.record import Rollout
from rollout.sampling import SamplingParams
from rollout.writer import RunWriter

ROLLOUTS_PER_PROMPT = 2
SHARDS = ShardsConfig(batch_rows=3, batch_age_s=0.01, shard_bytes=96 * 2**10)


class SlowEngine(ScriptedEngine):
    """Answers after a few milliseconds, in an order of its own."""

    async def generate(self, prompt: Prompt, params: SamplingParams) -> Completion:
        await asyncio.sleep(0.01 + 0.004 * (int(prompt.ids[0]) * 7919 % 5))
        return make_completion(text=f"of prompt {prompt.ids[0]}")


class ReportingWriter(RunWriter):
    """Says what each commit made durable."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, {"vocab_size": None}, shards=SHARDS)
        self.unreported: list[str] = []

    def write(self, rollout: Rollout) -> None:
        self.unreported.append(rollout.rollout_id)
        super().write(rollout)

    def commit(self) -> None:
        super().commit()
        if self.unreported:
            say("committed", *self.unreported)
        self.unreported = []


def say(*words: object) -> None:
    """One line in one write: a killed process leaves no half of it."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def collect_into(folder: Path, num_prompts: int) -> None:
    with ReportingWriter(folder) as writer:
        prompts = [Prompt(str(i), np.array([i], np.int32), None) for i in range(num_prompts)]
        wanted = make_requests(prompts, ROLLOUTS_PER_PROMPT)
        requests = [request for request in wanted if request.rollout_id not in writer.done]
        params = SamplingParams(top_k=50)
        async for rollout in collect(SlowEngine(), requests, params, concurrency=6):
            writer.write(rollout)


def collect_whenever_asked(folder: Path, num_prompts: int) -> None:
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            asyncio.run(collect_into(folder, num_prompts))
            os._exit(0)
        say("started", pid)
        say("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def watch(folder: Path) -> None:
    opened, seen = 0, 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        if not (folder / "state.json").exists():
            continue  # not a run before its first writer has named a shard
        time.sleep(0.02)  # leaves the processor to the writer, which has to get somewhere
        rows = len(datasets.load_from_disk(str(folder)))
        run = open_run(folder)
        assert seen <= rows <= len(run), f"{rows} and {len(run)} rows after {seen}"
        opened, seen = opened + 1, len(run)
        if opened % 10 == 0:  # the slow part: every rule of every row, and no id twice
            assert sum(1 for _ in run) == seen
    say(opened, seen)


if __name__ == "__main__":
    if sys.argv[1] == "collect":
        collect_whenever_asked(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        watch(Path(sys.argv[2]))

"""A collecting process killed again and again: nothing committed is lost, nothing stored twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
import pytest

from rollout.reader import open_run
from rollout.shard import read_batches

SCRIPT = Path(__file__).parent / "slow_collect.py"
NUM_PROMPTS = 1300
KILLS = 50


@contextmanager
def running(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def live_once(collector: subprocess.Popen[str], kill_after_s: float | None) -> tuple[int, set[str]]:
    """Start, and kill after a while: the exit status, and the ids that commits reported."""
    assert collector.stdin is not None and collector.stdout is not None
    collector.stdin.write("go\n")
    collector.stdin.flush()
    committed: set[str] = set()
    for line in collector.stdout:
        word, *rest = line.split()
        if word == "started" and kill_after_s is not None:
            time.sleep(kill_after_s)
            os.kill(int(rest[0]), signal.SIGKILL)
        elif word == "committed":
            committed |= set(rest)
        elif word == "ended":
            return int(rest[0]), committed
    raise AssertionError(collector.stderr and collector.stderr.read())


def stored_ids(path: Path) -> set[str]:
    shards = [read_batches(path / shard.name)[1] for shard in open_run(path).shards]
    return {i for batches in shards for b in batches for i in b.column("rollout_id").to_pylist()}


@pytest.mark.stress
def test_a_run_survives_fifty_kills(tmp_path: Path) -> None:
    rng = random.Random(50)
    wanted = {f"{i}:{j}" for i in range(NUM_PROMPTS) for j in range(2)}
    committed: set[str] = set()
    with (
        running("collect", tmp_path / "run", NUM_PROMPTS) as collector,
        running("watch", tmp_path / "run") as watcher,
    ):
        for _ in range(KILLS):
            status, reported = live_once(collector, rng.uniform(0, 0.3))
            assert status == -signal.SIGKILL, collector.stderr
            assert not reported & committed, "collected twice"
            committed |= reported
            if committed:
                assert committed <= stored_ids(tmp_path / "run")
        assert committed, "killed too early each time to say anything"
        assert len(committed) < len(wanted), "done before it could be killed that often"
        status, reported = live_once(collector, None)
        assert status == 0
        opened, complaints = watcher.communicate(timeout=60)
    assert watcher.returncode == 0, complaints
    assert int(opened.split()[0]) >= 20
    ids = [rollout.rollout_id for rollout in open_run(tmp_path / "run")]
    assert sorted(ids) == sorted(wanted)
    assert sorted(datasets.load_from_disk(str(tmp_path / "run"))["rollout_id"]) == sorted(wanted)

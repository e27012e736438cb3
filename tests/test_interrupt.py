"""Ctrl-C on a real `rollout collect`: it drains and says how to go on; twice, and it stops."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import write_lines
from chaos import FakeServer, fake_reply, fake_server, running

from rollout.engines.parse_process import INLINE_BYTES
from rollout.reader import open_run

NUM_PROMPTS = 40
COMMAND = [sys.executable, "-c", "from cli.main import cli; cli()"]


@pytest.fixture
def settings(tmp_path: Path, tiny_model_path: Path) -> Path:
    """A config for forty rollouts, four at a time; the URL of the server is still to be given."""
    rows = [{"prompt": f"The {n} statement"} for n in range(NUM_PROMPTS)]
    path = tmp_path / "c.yaml"
    config = {
        "model": str(tiny_model_path),
        "prompts": {"dataset": str(write_lines(tmp_path / "p.jsonl", rows)), "format": "text"},
        "sampling": {"top_k": 40, "max_new_tokens": 6},
        "engine": {"kind": "sglang", "url": "to be given"},
        "concurrency": 4,
    }
    path.write_text(json.dumps(config))
    return path


def start(folder: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
    """A process group of its own, as a terminal makes it; stderr goes to a file."""
    with open(folder / "stderr", "wb") as stderr:
        return subprocess.Popen(
            [*COMMAND, *arguments],
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )


def arguments_for(settings: Path, server: FakeServer) -> list[str]:
    out = settings.parent / "run"
    return ["collect", str(settings), "--out", str(out), "-o", f"engine.url={server.url}"]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, "ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """What Ctrl-C does: everyone in the group hears it."""
    os.killpg(process.pid, signal.SIGINT)


def stored(settings: Path) -> list[str]:
    return sorted(rollout.rollout_id for rollout in open_run(settings.parent / "run"))


@pytest.mark.stress
def test_ctrl_c_finishes_what_is_in_flight_and_the_same_command_goes_on(settings: Path) -> None:
    answered = 0

    async def slow(asked: dict[str, Any]) -> dict[str, Any]:
        nonlocal answered
        await asyncio.sleep(0.25)
        answered += 1
        return fake_reply(asked) | {"text": "." * INLINE_BYTES}  # decoded in the other process

    folder = settings.parent
    with running(fake_server(slow)) as server:
        arguments = arguments_for(settings, server)
        process = start(folder, arguments)
        wait_for(lambda: answered >= 6, process)
        interrupt(process)
        assert process.wait(timeout=60) == 130
        words = (folder / "stderr").read_text()
        assert "stopping: finishing what is in flight" in words
        assert "Traceback" not in words and "Error" not in words
        first = stored(settings)
        assert len(first) == answered == len(server.requests), "drained, and nothing lost"
        assert 6 <= len(first) <= 16 < NUM_PROMPTS

        (line,) = [line for line in words.splitlines() if "to go on: " in line]
        again = shlex.split(line.partition("to go on: ")[2])
        assert again == ["rollout", *arguments]
        process = start(folder, again[1:])
        assert process.wait(timeout=60) == 0, (folder / "stderr").read_text()
        assert stored(settings) == sorted(f"{n}:0" for n in range(NUM_PROMPTS))
        assert len(server.requests) == NUM_PROMPTS, "nothing was asked for twice"


@pytest.mark.stress
def test_a_second_ctrl_c_stops_at_once_and_keeps_what_came(settings: Path) -> None:
    answered = 0

    async def stuck_after_ten(asked: dict[str, Any]) -> dict[str, Any]:
        nonlocal answered
        if len(server.requests) > 10:
            await asyncio.sleep(600)
        answered += 1
        return fake_reply(asked)

    folder = settings.parent
    with running(fake_server(stuck_after_ten)) as server:
        process = start(folder, arguments_for(settings, server))
        wait_for(lambda: answered == 10 and len(server.requests) == 14, process)
        interrupt(process)
        wait_for(lambda: "stopping" in (folder / "stderr").read_text(), process)
        time.sleep(0.5)
        assert process.poll() is None, "the first one waits for what is in flight"
        interrupt(process)
        start_s = time.monotonic()
        assert process.wait(timeout=60) == 130
        assert time.monotonic() - start_s < 10
    words = (folder / "stderr").read_text()
    assert "what was committed is kept" in words and "Traceback" not in words
    assert len(stored(settings)) == answered == 10

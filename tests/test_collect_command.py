"""`rollout collect` against a server in trouble: exit codes, budget, progress, statistics."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from chaos import (
    HANG_UP,
    FakeServer,
    fake_reply,
    fake_server,
    running,
)
from faults import (
    Asked,
    settings_file,
    status,
    stored,
)
from test_cli import run


@pytest.fixture
def one_refused() -> Iterator[FakeServer]:
    """Refuses the third prompt that it sees, however often it comes."""
    seen: dict[str, int] = {}

    def answer(asked: Asked) -> Any:
        number = seen.setdefault(str(asked["input_ids"]), len(seen))
        return status(400, "mask too large")(asked) if number == 2 else fake_reply(asked)

    with running(fake_server(answer)) as server:
        yield server


@pytest.mark.parametrize(
    ("budget", "code"),
    [
        pytest.param("0", 5, id="a count that is too small"),
        pytest.param("1", 0, id="a count"),
        pytest.param("0.05", 5, id="a share that is too small"),
        pytest.param("0.2", 0, id="a share"),
    ],
)
def test_exit_code_follows_the_error_budget(
    tmp_path: Path, tiny_model_path: Path, one_refused: FakeServer, budget: str, code: int
) -> None:
    settings = settings_file(tmp_path, tiny_model_path, one_refused.url, 10)
    out = tmp_path / "run"
    options = ("-o", f"error_budget={budget}", "-o", "concurrency=1")
    result = run("collect", settings, "--out", out, *options, "--json")
    assert result.exit_code == code, result.output
    if code:
        assert result.stdout == "" and "over the error budget" in result.stderr
        assert len(stored(out)) == 2, "it stops, and keeps what came"
        assert "mask too large" in (out / "errors.jsonl").read_text()
    else:
        stats = json.loads(result.stdout)
        assert (stats["rollouts"], stats["failed"]) == (9, {"engine_refused": 1})
        assert stats["complete"]


def test_nothing_at_all_is_no_success(tmp_path: Path, tiny_model_path: Path) -> None:
    with running(fake_server(status(400))) as server:
        settings = settings_file(tmp_path, tiny_model_path, server.url, 3)
        result = run("collect", settings, "--out", tmp_path / "run", "-o", "error_budget=3")
    assert result.exit_code == 3
    assert "ended without a rollout" in result.stderr


def test_a_server_that_goes_away_for_good_exits_4_and_keeps_what_came(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    numbers = count()

    def answer(asked: Asked) -> Any:
        return fake_reply(asked) if next(numbers) < 5 else HANG_UP

    with running(fake_server(answer)) as server:
        settings = settings_file(tmp_path, tiny_model_path, server.url, 20)
        options = ("-o", "engine.down_after_s=1.5", "-o", "error_budget=0")
        result = run("collect", settings, "--out", tmp_path / "run", *options)
    assert result.exit_code == 4, result.output
    assert "no endpoint has answered for" in result.stderr
    assert len(stored(tmp_path / "run")) == 5
    assert json.loads((tmp_path / "run" / "stats.json").read_text())["rollouts"] == 5


def test_retries_are_shown_with_their_causes(tmp_path: Path, tiny_model_path: Path) -> None:
    numbers = count()

    def answer(asked: Asked) -> Any:
        return status(503)(asked) if next(numbers) in (1, 2) else fake_reply(asked)

    with running(fake_server(answer)) as server:
        settings = settings_file(tmp_path, tiny_model_path, server.url, 6)
        result = run("collect", settings, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["retried", "(this", "command)", "2", "engine_busy"] in lines
    stats = json.loads((tmp_path / "run" / "stats.json").read_text())
    assert stats["last_command"]["retried"] == {"engine_busy": 2}


@pytest.mark.stress
def test_fifty_rollouts_in_a_batch_job(tmp_path: Path, tiny_model_path: Path) -> None:
    with running(fake_server()) as server:
        settings = settings_file(tmp_path, tiny_model_path, server.url, 50)
        command = [sys.executable, "-c", "from cli.main import cli; cli()", "collect", settings]
        with open(tmp_path / "log", "wb") as log:
            done = subprocess.run(
                [*command, "--out", tmp_path / "run", "--json"], stdout=subprocess.PIPE, stderr=log
            )
    log_text = (tmp_path / "log").read_bytes()
    assert done.returncode == 0, log_text
    assert json.loads(done.stdout)["rollouts"] == 50
    assert b"\r" not in log_text and b"\x1b" not in log_text
    lines = [line for line in log_text.splitlines() if line.startswith(b"collect ")]
    assert 1 <= len(lines) <= 20
    assert lines[-1].startswith(b"collect 50/50 rollouts")


def test_a_server_that_answers_alike_is_noticed(tmp_path: Path, tiny_model_path: Path) -> None:
    def alike(asked: Asked) -> Asked:
        params = asked["sampling_params"] | {"sampling_seed": 0}
        return fake_reply(asked | {"sampling_params": params})

    with running(fake_server(alike)) as server:
        settings = settings_file(tmp_path, tiny_model_path, server.url, 1)
        override = ("-o", "prompts.rollouts_per_prompt=8")
        result = run("collect", settings, "--out", tmp_path / "run", "--json", *override)
    assert result.exit_code == 0, result.output
    stats = json.loads(result.stdout)
    assert (stats["rollouts"], stats["duplicate_groups"]) == (8, 1)
    assert "1 prompts have only identical rollouts" in result.stderr
    assert len({r["sampling_params"]["sampling_seed"] for r in server.requests}) == 8


def test_a_run_goes_on_after_the_weights_moved(tmp_path: Path, tiny_model_path: Path) -> None:
    out = tmp_path / "run"
    for version, limit in (("default", 2), ("step-1", 4)):
        with running(fake_server(weight_version=version)) as server:
            settings = settings_file(tmp_path, tiny_model_path, server.url, 4)
            result = run("collect", settings, "--out", out, "-o", f"prompts.limit={limit}")
        assert result.exit_code == 0, result.output
    assert sorted(stored(out)) == ["0:0", "1:0", "2:0", "3:0"]

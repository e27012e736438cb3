"""The example of a training loop, on a real server: what both sides say before any weight moves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cli.main import cli

pytestmark = pytest.mark.sglang

ROOT = Path(__file__).parent.parent


def script(name: str, *arguments: str) -> list[dict[str, Any]]:
    """What it prints: an object per line."""
    done = subprocess.run(
        [sys.executable, ROOT / name, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def train(sglang_tiny_url: str, tiny_model_path: Path, tmp_path: Path) -> Any:
    """`train(arm, steps)` of the tiny model into tmp_path/ARM; its metrics by step."""

    def run(arm: str, steps: int, *more: str) -> list[dict[str, Any]]:
        settings = {
            "url": sglang_tiny_url,
            "model": str(tiny_model_path),
            "arm": arm,
            "out": str(tmp_path / arm),
            "steps": str(steps),
            "prompts-per-step": "8",
            "tokens-per-update": "1200",
            "learning-rate": "3e-4",
            "save-every": "1",
            "device": "cpu",
        }
        options = [word for name, value in settings.items() for word in (f"--{name}", value)]
        return script("examples/grpo/train.py", *options, *more)

    return run


def test_with_supports_every_step_is_clean_and_the_ratio_is_one(
    train: Any, tiny_model_path: Path, tmp_path: Path
) -> None:
    steps = train("supports", 2) + train("supports", 3)  # the second goes on behind the first
    assert [s["step"] for s in steps] == [0, 1, 2]
    for step in steps:
        assert (step["verdict"], step["diagnosis"]) == ("consistent", "clean"), step["failed_gates"]
        assert step["ratio_mean"] == pytest.approx(1, abs=0.01)
        assert step["ratio_without"] == pytest.approx(step["kept_mass"], abs=0.01)
        assert step["kept_mass"] < 0.95
        assert step["waiting_s"] < 0.02 * step["update_s"]
    assert any(step["reward"] > 0 for step in steps)

    replay = partial(CliRunner().invoke, cli)
    run = str(tmp_path / "supports" / "step-000")
    assert replay(["replay", run, "--model", str(tiny_model_path)]).exit_code == 0
    # the same run, three updates later
    behind = script("benchmarks/grpo_behind.py", str(tmp_path / "supports"))
    assert [b["steps_behind"] for b in behind] == [1, 2, 3]
    stale = replay(["replay", run, "--model", str(tmp_path / "supports" / "checkpoint"), "--json"])
    assert stale.exit_code == 1
    assert json.loads(stale.stdout)["diagnoses"][0]["code"] == "other_weights"


def test_without_supports_the_ratio_is_the_kept_mass(train: Any) -> None:
    (step,) = train("full", 1)
    assert step["ratio_mean"] == pytest.approx(step["kept_mass"], abs=0.01)
    assert step["kept_mass"] < 0.95


def test_untruncated_the_ratio_is_one(train: Any, tmp_path: Path) -> None:
    (step,) = train("untruncated", 1)
    assert step["ratio_mean"] == pytest.approx(1, abs=0.01)
    assert not list((tmp_path / "untruncated").glob("step-*"))  # never stored as a run

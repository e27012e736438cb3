"""Rewards: functions of the user that score rollouts as they are collected."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from chaos import (
    fake_server,
    make_reply,
    running,
)
from faults import (
    Asked,
    settings_file,
    stored,
)
from test_cli import run

from rollout import errors
from rollout.rewards import load_reward

REWARDS = """
import json

def of_answer(rollout):
    return json.loads(rollout.extra)["answer"] + 0.5 if rollout.prompt_id != "2" else None

async def length(rollout):
    return len(rollout.output_ids)

def words(rollout):
    return "good"

def nan(rollout):
    return float("nan")

TABLE = {}
"""


@pytest.fixture
def reward_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current directory; a name of its own, as modules are imported once."""
    name = f"rewards_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    return name


@pytest.mark.parametrize(
    ("path", "words"),
    [
        pytest.param("math", "must look like module:function", id="no colon"),
        pytest.param(":f", "must look like module:function", id="no module"),
        pytest.param("math:", "must look like module:function", id="no function"),
        pytest.param("not_a_module_here:f", "'not_a_module_here' cannot be imported", id="module"),
        pytest.param("math:nothing", "'math' has no 'nothing'", id="function"),
        pytest.param("math:pi", "math:pi is float, must be a function", id="not callable"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_a_config_error(path: str, words: str) -> None:
    with pytest.raises(errors.ConfigError, match=words):
        load_reward(path)


@pytest.mark.parametrize(
    ("function", "rewards"),
    [
        pytest.param("of_answer", {"0:0": 0.5, "1:0": 1.5, "2:0": None}, id="plain"),
        pytest.param("length", {"0:0": 6.0, "1:0": 6.0, "2:0": 6.0}, id="async"),
    ],
)
def test_a_function_of_the_user_scores_what_is_collected(
    tmp_path: Path,
    tiny_model_path: Path,
    reward_module: str,
    function: str,
    rewards: dict[str, float | None],
) -> None:
    def six_tokens(asked: Asked) -> Asked:
        return make_reply(asked, [7] * 6, [[7]] * 6, [[0.0]] * 6)

    with running(fake_server(six_tokens)) as server:
        settings = settings_file(
            tmp_path, tiny_model_path, server.url, 3, reward=f"{reward_module}:{function}"
        )
        result = run("collect", settings, "--out", tmp_path / "run", "--json")
    assert result.exit_code == 0, result.output
    rollouts = stored(tmp_path / "run")
    assert {i: r.reward for i, r in rollouts.items()} == rewards
    assert {i: json.loads(r.extra) for i, r in rollouts.items()} == {
        f"{n}:0": {"answer": n} for n in range(3)
    }
    given = [value for value in rewards.values() if value is not None]
    assert json.loads(result.stdout)["reward"] == {
        "count": len(given),
        "mean": pytest.approx(np.mean(given)),
    }


@pytest.mark.parametrize("function", ["words", "nan"])
def test_a_reward_that_is_no_number_stops_the_run_and_says_which(
    tmp_path: Path, tiny_model_path: Path, reward_module: str, function: str
) -> None:
    with running(fake_server()) as server:
        settings = settings_file(
            tmp_path, tiny_model_path, server.url, 1, reward=f"{reward_module}:{function}"
        )
        result = run("collect", settings, "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert f"{reward_module}:{function}: for 0:0 it returned" in result.stderr


def test_a_missing_reward_leaves_no_directory(tmp_path: Path, tiny_model_path: Path) -> None:
    settings = settings_file(tmp_path, tiny_model_path, "http://127.0.0.1:9", 1, reward="math:no")
    result = run("collect", settings, "--out", tmp_path / "run")
    assert (result.exit_code, (tmp_path / "run").exists()) == (2, False)

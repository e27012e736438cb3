"""Conditions on rollouts, and the views of a run that they make."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import make_rollout

from rollout import (
    RunWriter,
    WeightSpan,
    finished,
    open_run,
    reward_within,
    sampled_at,
    sampled_by,
)
from rollout.annotate import annotate
from rollout.conditions import Condition
from rollout.record import Rollout


def spans(*versions: str) -> dict[str, Any]:
    return {"weight_versions": tuple(WeightSpan(v, i, i + 1) for i, v in enumerate(versions))}


@pytest.mark.parametrize(
    ("condition", "changes", "holds"),
    [
        pytest.param(finished, {"finish_reason": "stop"}, True, id="stop"),
        pytest.param(finished, {"finish_reason": "length"}, False, id="length"),
        pytest.param(finished, {"finish_reason": "abort"}, False, id="abort"),
        pytest.param(sampled_by("1"), spans("1", "1"), True, id="its version"),
        pytest.param(sampled_by("1"), spans("1", "2"), False, id="weights moved"),
        pytest.param(sampled_by("1", "2"), spans("1", "2"), True, id="both versions"),
        pytest.param(sampled_by("1"), spans(), False, id="weights unknown"),
        pytest.param(sampled_at(0.7), {"temperature": float(np.float32(0.7))}, True, id="float32"),
        pytest.param(sampled_at(0.7), {"temperature": 0.7}, True, id="temperature"),
        pytest.param(sampled_at(0.7), {"temperature": 0.70001}, False, id="other temperature"),
        pytest.param(reward_within(0, 1), {"reward": 1.0}, True, id="reward at the end"),
        pytest.param(reward_within(0, 1), {"reward": 1.5}, False, id="reward above"),
        pytest.param(reward_within(low=0), {"reward": 99.0}, True, id="no upper end"),
        pytest.param(reward_within(high=0), {"reward": 0.5}, False, id="no lower end"),
        pytest.param(reward_within(), {"reward": None}, False, id="no reward"),
        pytest.param(reward_within(), {"reward": math.nan}, False, id="NaN"),
    ],
)
def test_what_meets_a_condition(condition: Condition, changes: dict[str, Any], holds: bool) -> None:
    rollout = make_rollout(**changes)
    assert condition(rollout) is holds
    assert pickle.loads(pickle.dumps(condition))(rollout) is holds


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    with RunWriter(tmp_path / "run", {}) as writer:
        for i in range(6):
            reason = "stop" if i % 2 else "length"
            writer.write(make_rollout(str(i), finish_reason=reason, reward=float(i)))
    return tmp_path / "run"


def ids(rollouts: Any) -> list[str]:
    return [r.prompt_id for r in rollouts]


def test_views_keep_the_order_and_compose(run_path: Path) -> None:
    run = open_run(run_path)
    assert ids(run.where(finished)) == ["1", "3", "5"]
    assert ids(run.where(finished, reward_within(2))) == ["3", "5"]
    assert ids(run.where(finished).where(lambda r: r.prompt_id != "3")) == ["1", "5"]
    assert ids(run.where()) == ids(run)


def test_a_view_reads_only_when_it_is_read(run_path: Path) -> None:
    asked: list[str] = []

    def condition(rollout: Rollout) -> bool:
        asked.append(rollout.prompt_id)
        return True

    view = open_run(run_path).where(condition)
    assert asked == []
    next(iter(view))
    assert asked == ["0"]


def test_conditions_see_later_rewards(run_path: Path) -> None:
    annotate(run_path, {"0:0": 7.0})
    assert ids(open_run(run_path).where(reward_within(6))) == ["0"]

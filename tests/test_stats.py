"""run_stats and `rollout stats`: numbers of a whole run, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from builders import make_rollout
from hypothesis import given
from hypothesis import strategies as st
from test_cli import run

from cli.tables import print_stats
from rollout.record import Rollout, WeightSpan
from rollout.stats import SupportSizes, run_stats
from rollout.writer import RunWriter


def write(path: Path, *rollouts: Rollout) -> Path:
    with RunWriter(path, {}) as writer:
        for rollout in rollouts:
            writer.write(rollout)
    return path


@pytest.fixture
def two_versions(tmp_path: Path) -> Path:
    """Four rollouts of three tokens; weights changed within one, and one does not say."""
    spans = (WeightSpan("v1", 0, 1), WeightSpan("v2", 1, 3))
    return write(
        tmp_path / "two versions",
        make_rollout("a", reward=1.0, attempts=3),
        make_rollout("b", weight_versions=spans, reward=0.0),
        make_rollout("c", weight_versions=(), attempts=2),
        make_rollout("d"),
    )


def test_weight_versions_attempts_and_rewards(two_versions: Path) -> None:
    stats = run_stats(two_versions)
    assert stats["weight_versions"] == {"v1": 7, "v2": 2}, "of 12 tokens, 3 without a span"
    assert stats["attempts"] == {"total": 7, "max": 3, "retried": 2}
    assert stats["reward"] == {"count": 2, "mean": 0.5}
    assert (stats["rollouts"], stats["output_tokens"], stats["prompt_tokens"]) == (4, 12, 8)


def test_a_run_without_rewards_has_no_mean(tmp_path: Path) -> None:
    assert run_stats(write(tmp_path / "run", make_rollout()))["reward"] is None


def test_runs_stand_side_by_side(two_versions: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "[b]other", make_rollout("a", weight_versions=()))
    result = run("stats", two_versions, other)
    assert result.exit_code == 0, result.output
    lines = {line[:24].strip(): line.split() for line in result.stdout.splitlines()}
    assert lines["rollouts"] == ["rollouts", "4", "1"]
    assert lines["singletons"] == ["singletons", "4", "1"]
    assert "7 tokens v1, 2 tokens v2, 3 tokens unknown" in result.stdout
    assert "mean 0.5 of 2" in result.stdout
    assert "[b]other" in result.stdout, "a name is no markup"


def test_json_holds_every_run_by_name(two_versions: Path) -> None:
    result = run("stats", two_versions, "--json")
    assert json.loads(result.stdout) == {
        "runs": [{"run": str(two_versions), **run_stats(two_versions)}]
    }


def test_an_empty_run_has_numbers_too(tmp_path: Path) -> None:
    result = run("stats", write(tmp_path / "run"))
    assert result.exit_code == 0, result.output
    assert "no tokens" in result.stdout


def test_a_collect_also_shows_itself(
    two_versions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_stats(run_stats(two_versions) | {"last_command": {"output_tokens_per_s": 1234.5}})
    lines = capsys.readouterr().out.splitlines()
    assert ["tokens/s", "(this", "command)", "1,234"] in [line.split() for line in lines]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        pytest.param(["nowhere"], 3, id="no such directory"),
        pytest.param([], 2, id="no directory named"),
    ],
)
def test_no_run_no_table(arguments: list[str], code: int) -> None:
    result = run("stats", *arguments)
    assert (result.exit_code, result.stdout) == (code, "")


@given(st.lists(st.tuples(st.integers(0, 12), st.sampled_from([-1, 1, 4, 9])), min_size=1))
def test_the_histogram_gives_what_numpy_gives(tokens: list[tuple[int, int]]) -> None:
    found = SupportSizes()
    for size, top_k in tokens:
        found.add(np.array([size], np.int32), top_k)
    sampled = np.array([size for size, _ in tokens if size > 0])
    got = found.as_dict()
    if not len(sampled):
        assert got == {}
        return
    assert got == {
        "mean": pytest.approx(sampled.mean()),
        "median": pytest.approx(np.median(sampled)),
        "p99": pytest.approx(np.percentile(sampled, 99)),
        "max": sampled.max(),
        "singletons": (sampled == 1).sum(),
        "above_top_k": sum(size > top_k > 0 for size, top_k in tokens),
    }

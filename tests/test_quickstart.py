"""The README's first run, on the real model, in this process."""

from __future__ import annotations

import json
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cli.main import cli

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.smollm2


@pytest.fixture(scope="module")
def demo(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make demo` collects."""
    out = tmp_path_factory.mktemp("demo") / "run"
    with chdir(ROOT):
        command = ["collect", "configs/quickstart.yaml", "--out", str(out), "--json"]
        result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rollouts"] == 16
    return out


def replay(run: Path, model: Path, dtype: str) -> dict[str, Any]:
    """The summary of a replay that exits 0."""
    command = ["replay", str(run), "--model", str(model), "--dtype", dtype, "--json"]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    summary: dict[str, Any] = json.loads(result.stdout)
    return summary


def test_quickstart_agrees_with_itself_in_fp32(demo: Path, smollm2_path: Path) -> None:
    summary = replay(demo, smollm2_path, "float32")
    assert summary["log_ratio_abs"]["max"] <= 1e-4
    assert summary["without_support"]["log_ratio"]["mean"] < -0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quickstart_is_clean(dtype: str, demo: Path, smollm2_path: Path) -> None:
    summary = replay(demo, smollm2_path, dtype)
    assert (summary["verdict"], summary["findings"]) == ("consistent", [])
    assert [d["code"] for d in summary["diagnoses"]] == ["clean"], summary["diagnoses"]

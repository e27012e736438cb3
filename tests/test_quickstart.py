"""The README's first run, on the real model, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.main import cli

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.smollm2


def test_quickstart_agrees_with_itself_in_fp32(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    run, out = CliRunner().invoke, str(tmp_path / "run")
    result = run(cli, ["collect", "configs/quickstart.yaml", "--out", out, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rollouts"] == 16
    result = run(cli, ["replay", out, "--model", str(smollm2_path), "--dtype", "float32", "--json"])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert (summary["verdict"], summary["findings"]) == ("consistent", [])
    assert summary["log_ratio_abs"]["max"] <= 1e-4
    assert summary["without_support"]["log_ratio"]["mean"] < -0.05

"""docs/why.md says what the steps in docs/data say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_tables_of_the_page_are_those_of_the_recorded_steps() -> None:
    command = [sys.executable, "benchmarks/grpo_tables.py", "docs/data/grpo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = [line for line in done.stdout.splitlines() if line]
    page = (ROOT / "docs" / "why.md").read_text().splitlines()
    assert len(rows) == 16
    assert [row for row in rows if row not in page] == []


def test_the_curves_can_be_drawn_from_them(tmp_path: Path) -> None:
    svg = tmp_path / "grpo.svg"
    command = [sys.executable, "benchmarks/grpo_curves.py", "docs/data/grpo", str(svg)]
    subprocess.run(command, cwd=ROOT, check=True)
    text = svg.read_text()
    assert text.startswith("<?xml")
    for words in ("mismatch_kl", "truncated, supports replayed", "entropy"):
        assert words in text

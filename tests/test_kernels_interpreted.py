"""The Triton kernels without a GPU: tests/test_kernels.py under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def interpret(*selection: str) -> None:
    """The interpreter is chosen when triton is imported, so in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *selection],
        cwd=Path(__file__).parent.parent,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_scores_and_gradients() -> None:
    chosen = "every and score and float32 or mirrored or mixed or facts"
    interpret("tests/test_kernels.py", "-k", chosen)


@pytest.mark.stress
def test_everything_that_can_be_interpreted() -> None:
    interpret("tests/test_kernels.py")

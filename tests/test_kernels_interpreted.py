"""The Triton kernels without a GPU: tests/test_kernels.py under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
ROOT = Path(__file__).parent.parent


def interpret(*arguments: str) -> str:
    """The interpreter is chosen when triton is imported, so in a process of its own."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_scores_and_gradients() -> None:
    """Called by hand: pytest would take as long again to start."""
    interpret(
        "-c", "import test_kernels as t; t.test_literal_scores(); t.test_small_batches([0, 1, 2])"
    )


@pytest.mark.stress
def test_everything_that_can_be_interpreted() -> None:
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/test_kernels.py")
    assert " passed" in interpret(*command)

"""A machine that is too small for a replay: one line that says what to do, and no verdict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from pages import synthetic

from cli.main import cli
from replay import Policy
from rollout.writer import RunWriter

Replayed = Callable[..., Result]


@pytest.fixture
def replayed(tmp_path: Path, tiny_model_path: Path) -> Replayed:
    """`rollout replay` of made-up rollouts."""
    with RunWriter(tmp_path / "run", {}) as writer:
        for rollout in synthetic(rollouts=2, tokens=12)[0]:
            writer.write(rollout)
    command = ["replay", str(tmp_path / "run"), "--model", str(tiny_model_path)]
    return lambda: CliRunner().invoke(cli, [*command, "--dtype", "float32"])


ON_GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")
ON_CPU = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 4096 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        pytest.param(ON_GPU, "CUDA out of memory. Tried to allocate 2.00 GiB", id="GPU"),
        pytest.param(ON_CPU, "DefaultCPUAllocator: can't allocate memory: you tried", id="CPU"),
        pytest.param(MemoryError("Unable to allocate 7 PiB"), "Unable to allocate 7", id="NumPy"),
    ],
)
@pytest.mark.parametrize("place", ["load_model", "hidden"])
def test_too_little_memory_is_no_verdict(
    replayed: Replayed, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception, words: str
) -> None:
    """It would end with 1, which says inconsistent."""

    def full(*_: object, **__: object) -> None:
        raise error

    def without_checks(policy: Policy, *_: object) -> None:
        pass

    if place == "load_model":
        monkeypatch.setattr("rollout.engines.hf.load_model", full)
    else:
        monkeypatch.setattr("replay.policy._check_head", without_checks)
        monkeypatch.setattr("replay.policy._check_packing", without_checks)
        monkeypatch.setattr(Policy, "hidden", full)
    result = replayed()
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    advice = {
        "load_model": "in float32 on cpu: " + words,
        "hidden": "replay fewer tokens at once: -o max_tokens=13",
    }
    assert advice[place] in line
    assert words in line


def test_too_little_memory_anywhere_else_is_no_verdict_either(
    replayed: Replayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 7 PiB")

    monkeypatch.setattr("replay.job.render_page", full)
    result = replayed()
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: too little memory: Unable to allocate 7 PiB" in result.stderr


def test_other_errors_of_torch_keep_their_traceback(
    replayed: Replayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr("rollout.engines.hf.load_model", broken)
    assert isinstance(replayed().exception, RuntimeError)

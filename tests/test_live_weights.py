"""Weights that move on a real SGLang server: every rollout names, and fits, the ones it came of."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from live import VOCAB_SIZE, collect_run

from cli.main import cli
from rollout.collect import Outcome, Request, collect_outcomes
from rollout.engines.sglang.control import PauseMode, SGLangControl
from rollout.engines.sglang.engine import SGLangEngine
from rollout.errors import EngineRefused, GenerationAborted
from rollout.prompts import Prompt
from rollout.reader import open_run
from rollout.record import Rollout, WeightSpan
from rollout.retry import RetryConfig
from rollout.rules import check_content, check_format
from rollout.sampling import SamplingParams
from rollout.support import Support
from rollout.writer import RunWriter

pytestmark = [pytest.mark.smollm2, pytest.mark.sglang]

ROOT = Path(__file__).parent.parent
SGLANG_PYTHON = Path("~/.cache/rollout/sglang-0.5.23-cpu/bin/python").expanduser()
PROMPT = Prompt(prompt_id="0", ids=np.array([504, 3575, 282, 4649, 314], np.int32), text="")
REQUEST = Request(PROMPT, 0)
LENGTH = 100
LONG = SamplingParams(top_k=50, top_p=0.95, max_new_tokens=LENGTH, ignore_eos=True)


def restore(url: str, model: Path) -> None:
    async def run() -> None:
        async with SGLangControl(url) as control:
            await control.resume()
            async with control.paused("abort"):
                await control.update_weights_from_disk(model, version="default")

    asyncio.run(run())


@pytest.fixture
def server(sglang_url: str, smollm2_path: Path) -> Iterator[str]:
    """The session's server, with its own weights again afterwards."""
    yield sglang_url
    restore(sglang_url, smollm2_path)


@pytest.fixture(scope="module")
def other_weights(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with noise on one matrix of every layer."""
    import torch
    from safetensors.torch import load_file, save_file

    path = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(smollm2_path, path)
    tensors = load_file(smollm2_path / "model.safetensors")
    random = torch.Generator().manual_seed(0)
    for name, tensor in sorted(tensors.items()):
        if name.endswith("mlp.down_proj.weight"):
            noise = torch.randn(tensor.shape, generator=random) * 0.2 * tensor.float().std()
            tensors[name] = (tensor.float() + noise).to(tensor.dtype)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


async def while_it_runs(
    url: str, act: Callable[[SGLangControl], Coroutine[Any, Any, None]]
) -> Outcome:
    """What became of one long rollout, with `act` in the middle of it."""
    async with SGLangEngine(url, vocab_size=VOCAB_SIZE) as engine, SGLangControl(url) as control:
        collecting = asyncio.create_task(one_outcome(engine))
        await until_it_runs(url, collecting)
        await act(control)
        return await collecting


async def one_outcome(engine: SGLangEngine) -> Outcome:
    once = RetryConfig(attempts=1)
    (outcome,) = [
        outcome async for outcome in collect_outcomes(engine, [REQUEST], LONG, retry=once)
    ]
    return outcome


async def until_it_runs(url: str, generating: asyncio.Task[Any]) -> None:
    """Until the scheduler says that it decodes, and some tokens longer."""
    while await asyncio.to_thread(num_running, url) == 0:
        assert not generating.done(), "it finished before it was seen to run"
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)


def num_running(url: str) -> int:
    with urllib.request.urlopen(f"{url}/v1/loads", timeout=30) as answer:
        return sum(load["num_running_reqs"] for load in json.load(answer)["loads"])


def collect(url: str, model: Path, out: Path) -> None:
    collect_run(
        url, model, out, "prompts.limit=4", "sampling.top_k=50", "sampling.max_new_tokens=16"
    )


def verdict(run: Path, model: Path) -> str:
    """`consistent`, by what is diagnosed: the gates are those of weights without noise on them."""
    result = CliRunner().invoke(cli, ["replay", str(run), "--model", str(model), "--json"])
    assert result.exit_code in (0, 1), result.output
    summary: dict[str, Any] = json.loads(result.stdout)
    assert summary["findings"] == []
    assert result.exit_code == (0 if summary["verdict"] == "consistent" else 1)
    is_clean = summary["diagnoses"][0]["code"] == "clean"
    return "consistent" if is_clean else str(summary["verdict"])


def store(rollout: Rollout, path: Path) -> Path:
    with RunWriter(path, {"engine": {"name": "sglang"}}, vocab_size=VOCAB_SIZE) as writer:
        writer.write(rollout)
    return path


def part(rollout: Rollout, start: int, end: int) -> Rollout:
    """The output tokens [start, end) alone, with those before them as a part of the prompt."""
    first, last = rollout.support.offsets[[start, end]].tolist()
    assert rollout.full_logprobs is not None and rollout.support_logprobs is not None
    return replace(
        rollout,
        prompt_ids=np.concatenate([rollout.prompt_ids, rollout.output_ids[:start]]),
        output_ids=rollout.output_ids[start:end],
        loss_mask=rollout.loss_mask[start:end],
        sampling_logprobs=rollout.sampling_logprobs[start:end],
        full_logprobs=rollout.full_logprobs[start:end],
        support=Support.from_counts(
            rollout.support.ids[first:last], rollout.support.counts[start:end]
        ),
        support_logprobs=rollout.support_logprobs[first:last],
        weight_versions=(),
    )


def whole(outcome: Outcome) -> Rollout:
    assert outcome.rollout is not None, outcome.error
    assert (outcome.rollout.finish_reason, outcome.rollout.num_output_tokens) == ("length", LENGTH)
    return outcome.rollout


def versions(run: Path) -> set[str]:
    return {span.version for rollout in open_run(run) for span in rollout.weight_versions}


def test_each_run_fits_the_weights_it_names(
    server: str,
    smollm2_path: Path,
    other_weights: Path,
    tmp_path: Path,
) -> None:
    async def move(model: Path, version: str) -> str:
        async with SGLangControl(server) as control:
            await control.update_weights_from_disk(model, version=version)
            return await control.weight_version()

    other, back = tmp_path / "other", tmp_path / "back"
    assert asyncio.run(move(other_weights, "step-1")) == "step-1"
    collect(server, smollm2_path, other)
    assert asyncio.run(move(smollm2_path, "step-2")) == "step-2"
    collect(server, smollm2_path, back)

    assert (versions(other), versions(back)) == ({"step-1"}, {"step-2"})
    assert verdict(other, other_weights) == "consistent"
    assert verdict(other, smollm2_path) == "inconsistent"
    assert verdict(back, smollm2_path) == "consistent"
    assert verdict(back, other_weights) == "inconsistent"


def test_a_path_without_a_checkpoint_changes_nothing(server: str, tmp_path: Path) -> None:
    async def run() -> str:
        async with SGLangControl(server) as control:
            with pytest.raises(EngineRefused, match="HTTP 400: Failed to get weights iterator"):
                await control.update_weights_from_disk(tmp_path, version="step-1")
            return await control.weight_version()

    assert asyncio.run(run()) == "default"


def test_a_version_set_in_between_makes_two_spans(
    server: str, smollm2_path: Path, tmp_path: Path
) -> None:
    rollout = whole(asyncio.run(while_it_runs(server, lambda c: c.set_weight_version("step-1"))))
    first, second = rollout.weight_versions
    assert (first.version, first.start) == ("default", 0)
    assert 0 < first.end < LENGTH
    assert second == WeightSpan("step-1", first.end, LENGTH)
    assert verdict(store(rollout, tmp_path / "run"), smollm2_path) == "consistent"


def test_each_span_of_a_retracted_rollout_fits_its_own_weights(
    server: str, smollm2_path: Path, other_weights: Path, tmp_path: Path
) -> None:
    async def act(control: SGLangControl) -> None:
        async with control.paused("retract"):
            await control.update_weights_from_disk(other_weights, version="step-1")

    rollout = whole(asyncio.run(while_it_runs(server, act)))
    first, second = rollout.weight_versions
    assert (first.version, first.start) == ("default", 0)
    assert second == WeightSpan("step-1", first.end, LENGTH)
    before = store(part(rollout, 0, first.end), tmp_path / "before")
    after = store(part(rollout, second.start, LENGTH), tmp_path / "after")
    assert verdict(before, smollm2_path) == "consistent"
    assert verdict(after, other_weights) == "consistent"
    assert verdict(after, smollm2_path) == "inconsistent"


@contextmanager
def trainer(checkpoint: Path, names: list[str]) -> Iterator[int]:
    """A process that broadcasts those tensors; yields the port of its process group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    script = ROOT / "tests" / "sglang_cpu" / "broadcast.py"
    process = subprocess.Popen(
        [SGLANG_PYTHON, script, checkpoint, str(port), *names],
        stdin=subprocess.PIPE,
        env=os.environ | {"SGLANG_USE_CPU_ENGINE": "1"},
    )
    try:
        yield port
    finally:
        process.kill()
        process.communicate()


def test_weights_of_a_process_group_have_their_version_when_all_are_there(
    server: str, smollm2_path: Path, other_weights: Path, tmp_path: Path
) -> None:
    from safetensors import safe_open

    checkpoint = other_weights / "model.safetensors"
    with safe_open(checkpoint, "pt") as tensors:
        shapes = {
            name: tensors.get_slice(name).get_shape()
            for name in sorted(tensors.keys())
            if name.endswith("mlp.down_proj.weight")
        }
    names = list(shapes)

    async def move(port: int) -> list[str]:
        seen = []
        async with SGLangControl(server, timeout_s=120.0) as control:
            await control.init_weights_update_group(
                "127.0.0.1", port, rank_offset=1, world_size=2, backend="gloo"
            )
            async with control.paused("retract"), control.weight_update("step-1") as update:
                for bucket in names[:10], names[10:]:
                    dtypes = ["bfloat16"] * len(bucket)
                    await update.from_distributed(bucket, dtypes, [shapes[n] for n in bucket])
                    seen.append(await control.weight_version())
            await control.destroy_weights_update_group()
            async with SGLangEngine(server, vocab_size=VOCAB_SIZE) as engine:
                store(whole(await one_outcome(engine)), tmp_path / "run")
            return [*seen, await control.weight_version()]

    with trainer(checkpoint, names) as port:
        assert asyncio.run(move(port)) == ["default", "default", "step-1"]
    assert versions(tmp_path / "run") == {"step-1"}
    assert verdict(tmp_path / "run", other_weights) == "consistent"
    assert verdict(tmp_path / "run", smollm2_path) == "inconsistent"


def test_an_aborted_attempt_is_a_rollout_that_replays(
    server: str, smollm2_path: Path, tmp_path: Path
) -> None:
    outcome = asyncio.run(while_it_runs(server, lambda control: control.abort()))
    assert isinstance(outcome.error, GenerationAborted) and outcome.rollout is None
    (aborted,) = outcome.aborted
    assert (aborted.rollout_id, aborted.finish_reason) == ("0:0#abort0", "abort")
    assert 0 < aborted.num_output_tokens < LENGTH
    assert aborted.weight_versions == (WeightSpan("default", 0, aborted.num_output_tokens),)
    check_format(aborted)
    check_content(aborted, VOCAB_SIZE)
    assert verdict(store(aborted, tmp_path / "run"), smollm2_path) == "consistent"


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_rollout_goes_on_after_a_pause(
    server: str, smollm2_path: Path, tmp_path: Path, mode: PauseMode
) -> None:
    async def act(control: SGLangControl) -> None:
        async with control.paused(mode):
            await asyncio.sleep(0.5)

    rollout = whole(asyncio.run(while_it_runs(server, act)))
    assert rollout.weight_versions == (WeightSpan("default", 0, LENGTH),)
    assert verdict(store(rollout, tmp_path / "run"), smollm2_path) == "consistent"

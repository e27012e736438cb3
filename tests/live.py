"""Collecting from a real server and judging what came, through the commands."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from cli.main import cli
from rollout.collect import Request, collect, make_requests
from rollout.config import PromptsConfig
from rollout.engines.sglang.engine import SGLangEngine
from rollout.prompts import load_prompts
from rollout.record import Rollout
from rollout.sampling import SamplingParams
from rollout.writer import RunWriter

ROOT = Path(__file__).parent.parent
VOCAB_SIZE = 49152


def invoke(*arguments: str, exit_code: int = 0) -> Any:
    """The JSON that a command prints."""
    result = CliRunner().invoke(cli, [*arguments, "--json"])
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def collect_run(url: str, model: Path, out: Path, *overrides: str) -> dict[str, Any]:
    """`rollout collect configs/sglang.yaml`: one short rollout per prompt; its statistics."""
    settings = [
        f"model={model}",
        f"prompts.dataset={ROOT / 'configs' / 'prompts.jsonl'}",
        f"engine.url={url}",
        "prompts.rollouts_per_prompt=1",
        "sampling.max_new_tokens=32",
        *overrides,
    ]
    options = [word for setting in settings for word in ("-o", setting)]
    config = str(ROOT / "configs" / "sglang.yaml")
    stats: dict[str, Any] = invoke("collect", config, "--out", str(out), *options)
    assert (stats["failed"], stats["rejected"]) == ({}, {})
    return stats


def replay_run(
    run: Path, model: Path, verdict: str = "consistent", flags: Sequence[str] = ()
) -> dict[str, Any]:
    """`rollout replay`, which must come to `verdict`; its summary."""
    code = 0 if verdict == "consistent" else 1
    command = ["replay", str(run), "--model", str(model), *flags]
    summary: dict[str, Any] = invoke(*command, exit_code=code)
    assert summary["verdict"] == verdict
    return summary


def requests(model: Path, count: int) -> list[Request]:
    """One rollout for each of the first prompts of configs/prompts.jsonl."""
    config = PromptsConfig(dataset=str(ROOT / "configs" / "prompts.jsonl"), limit=count)
    return list(make_requests(load_prompts(config, str(model)).prompts, 1))


def collect_mixed(
    url: str, wanted: Sequence[tuple[Request, SamplingParams]], out: Path
) -> list[Rollout]:
    """Every request with settings of its own, all in flight at once, into one run."""

    async def one(engine: SGLangEngine, request: Request, params: SamplingParams) -> Rollout:
        rollouts: AsyncIterator[Rollout] = collect(engine, [request], params, concurrency=1)
        return [rollout async for rollout in rollouts][0]

    async def gather() -> list[Rollout]:
        async with SGLangEngine(url, vocab_size=VOCAB_SIZE) as engine:
            return await asyncio.gather(*(one(engine, *each) for each in wanted))

    rollouts = asyncio.run(gather())
    with RunWriter(out, {}, vocab_size=VOCAB_SIZE) as writer:
        for rollout in rollouts:
            writer.write(rollout)
    return rollouts

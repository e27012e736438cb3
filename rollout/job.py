"""collect_run(): what `rollout collect` does, from a config to a run directory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.collect import Outcome, collect, make_requests
from rollout.config import CollectConfig, EmbeddedConfig
from rollout.engines.base import Engine
from rollout.errors import ConfigError, DataError, NotARun, OverBudget
from rollout.files import write_json
from rollout.prompts import PromptSet, load_prompts
from rollout.schema import STATS_FILE
from rollout.stats import run_stats
from rollout.writer import RunWriter

MAY_CHANGE = {"concurrency", "attempts", "error_budget", "shards"}
"""Settings that do not change what is collected, so a run may go on with others."""


@dataclass
class Progress:
    """How far a run is; rollouts of earlier sessions are done from the start."""

    total: int
    done: int = 0
    failed: int = 0
    rejected: int = 0
    output_tokens: int = 0  # of this session


async def collect_run(
    config: CollectConfig,
    out: Path,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, Any]:
    """Collect into `out`, or continue there; returns the statistics of the whole run.

    Raises `ConfigError` and `EngineError` before anything is written, `OverBudget` when more than
    `config.error_budget` of the rollouts failed, and `NotARun` when nothing came at all.
    """
    # settings that no server could serve are refused before anything is loaded
    config.sampling.check_replayable()
    prompts = load_prompts(config.prompts, config.model)
    if not prompts.prompts:
        raise ConfigError(f"prompts: {config.prompts.dataset} has no rows to collect")
    async with make_engine(config, prompts.vocab_size) as engine:
        engine.check(config.sampling)
        identity = _identity(config, prompts, engine)
        with RunWriter(
            out, identity, shards=config.shards, vocab_size=prompts.vocab_size
        ) as writer:
            start = time.monotonic()
            progress = await _fill(writer, engine, config, prompts, on_progress)
            elapsed_s = time.monotonic() - start
    stats = run_stats(out) | {
        "duplicate_bos": prompts.doubled_bos,
        "session": {
            "elapsed_s": elapsed_s,
            "output_tokens_per_s": progress.output_tokens / elapsed_s,
        },
    }
    write_json(out / STATS_FILE, stats)
    _judge(progress, config, out)
    return stats


def make_engine(config: CollectConfig, vocab_size: int) -> Engine:
    """The engine that `config` names, not yet entered."""
    if isinstance(config.engine, EmbeddedConfig):
        from rollout.engines.embedded import EmbeddedEngine  # the one that needs torch

        return EmbeddedEngine(config.model, config.engine)
    from rollout.engines.sglang import SGLangEngine

    return SGLangEngine(config.engine.url, vocab_size=vocab_size, timeout_s=config.engine.timeout_s)


async def _fill(
    writer: RunWriter,
    engine: Engine,
    config: CollectConfig,
    prompts: PromptSet,
    on_progress: Callable[[Progress], None],
) -> Progress:
    wanted = list(make_requests(prompts.prompts, config.prompts.rollouts_per_prompt))
    open_requests = [request for request in wanted if request.rollout_id not in writer.done]
    progress = Progress(total=len(wanted), done=len(wanted) - len(open_requests))
    async for outcome in collect(
        engine,
        open_requests,
        config.sampling,
        seed=config.seed,
        concurrency=config.concurrency,
        attempts=config.attempts,
    ):
        _store(writer, outcome, progress)
        on_progress(progress)
        if progress.failed + progress.rejected > config.error_budget * progress.total:
            break
    return progress


def _store(writer: RunWriter, outcome: Outcome, progress: Progress) -> None:
    """Into the shards, rejected.jsonl or errors.jsonl: every outcome leaves a trace."""
    about = {"rollout_id": outcome.request.rollout_id, "attempts": outcome.attempts}
    error = outcome.error
    if outcome.rollout is not None:
        try:
            writer.write(outcome.rollout)
        except DataError as broken_rule:
            error = broken_rule
        else:
            progress.done += 1
            progress.output_tokens += outcome.rollout.num_output_tokens
            return
    assert error is not None, "an outcome is a rollout or an error"
    if isinstance(error, DataError):
        progress.rejected += 1
        writer.reject(error, outcome.body, **about)
    else:
        progress.failed += 1
        writer.fail(error, **about)


def _judge(progress: Progress, config: CollectConfig, out: Path) -> None:
    lost = progress.failed + progress.rejected
    if lost > config.error_budget * progress.total:
        raise OverBudget(
            f"{out}: {progress.failed} rollouts failed and {progress.rejected} were rejected of "
            f"{progress.total}, over the error budget of {config.error_budget:.1%}; "
            "errors.jsonl and rejected.jsonl there say why. What was collected is kept: "
            "the same command goes on from here"
        )
    if progress.done == 0:
        raise NotARun(f"{out}: the run ended without a rollout")


def _identity(config: CollectConfig, prompts: PromptSet, engine: Engine) -> dict[str, Any]:
    """What run.json keeps, and what must be the same to continue a run."""
    settings = config.model_dump(mode="json", exclude=MAY_CHANGE)
    for key in ("url", "timeout_s"):
        settings["engine"].pop(key, None)
    settings["prompts"].pop("limit")
    info = engine.info
    return {
        "config": settings,
        "engine": {"name": info.name, "version": info.version, "model": info.model} | info.details,
        "tokenizer": prompts.tokenizer,
        "vocab_size": prompts.vocab_size,
        "dataset": prompts.dataset,
    }

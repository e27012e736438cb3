"""collect_run(): what `rollout collect` does, from a config to a run directory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rollout.collect import Request, Reward, collect_outcomes, make_requests
from rollout.config import CollectConfig, EmbeddedConfig, SGLangConfig, VLLMConfig
from rollout.engines.base import Engine
from rollout.errors import ConfigError, EngineDown, NotARun, OverBudget
from rollout.files import write_json
from rollout.keeper import Keeper, OnNote, Progress, lost_allowed
from rollout.prompts import PromptSet, load_prompts
from rollout.rewards import load_reward
from rollout.sampling import SamplingParams
from rollout.schema import STATS_FILE
from rollout.stats import run_stats
from rollout.writer import RunWriter

MAY_CHANGE = {"concurrency", "retry", "on_overflow", "error_budget", "shards", "keep_aborted"}
ENGINE_MAY_CHANGE = {
    "url",
    "shared",
    "prefix_affinity",
    "queue_timeout_s",
    "slowest_tokens_per_s",
    "down_after_s",
}
"""Settings that do not change what is collected, so a run may go on with others."""


class Prepared(NamedTuple):
    """All that a request needs; `config` with what only the engine knew filled in."""

    config: CollectConfig
    engine: Engine  # entered
    prompts: PromptSet  # not empty
    reward: Reward | None


@asynccontextmanager
async def prepared(
    config: CollectConfig,
    stop: asyncio.Event | None = None,
    on_note: OnNote = lambda note: None,
) -> AsyncGenerator[Prepared, None]:
    """Load the prompts, enter the engine, and check that it can serve what `config` asks for.

    Raises `ConfigError` and `EngineError`; nothing is written.
    """
    # settings that no server could serve are refused before anything is loaded
    config.sampling.check_replayable()
    reward = None if config.reward is None else load_reward(config.reward)
    prompts = await asyncio.to_thread(load_prompts, config.prompts, config.model)
    if not prompts.prompts:
        raise ConfigError(f"prompts: {config.prompts.dataset} has no rows to collect")
    async with make_engine(config, prompts.vocab_size, stop) as engine:
        asked = config.sampling
        config = config.model_copy(update={"sampling": engine.resolve(asked)})
        engine.check(config.sampling)
        _note_settings(config, asked, prompts, on_note)
        yield Prepared(config, engine, prompts, reward)


async def collect_run(
    config: CollectConfig,
    out: Path,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    stop: asyncio.Event | None = None,
    on_note: OnNote = lambda note: None,
) -> dict[str, Any]:
    """Collect into `out`, or continue there; returns the statistics of the whole run.

    `on_note` hears what a person should know and no error tells, each once, as soon as it is known.

    Setting `stop` ends it early: what is in flight is finished and stored, and the statistics say
    ``"complete": False``. Cancelling it keeps what has come.

    Raises `ConfigError` and `EngineError` before anything is written, `EngineDown` when no endpoint
    answers any more, `OverBudget` when more than `config.error_budget` of the rollouts failed, and
    `NotARun` when nothing came at all.
    """
    async with prepared(config, stop, on_note) as (config, engine, prompts, reward):
        identity = _identity(config, prompts, engine)
        start = time.monotonic()
        wanted = list(make_requests(prompts.prompts, config.prompts.rollouts_per_prompt))
        writing = RunWriter(out, identity, shards=config.shards, vocab_size=prompts.vocab_size)
        try:
            with writing as writer:
                progress = await collect_into(
                    writer,
                    engine,
                    wanted,
                    config,
                    reward=reward,
                    on_progress=on_progress,
                    stop=stop,
                    on_note=on_note,
                )
        except EngineDown:
            write_json(out / STATS_FILE, await asyncio.to_thread(run_stats, out))
            raise
        elapsed_s = time.monotonic() - start
    stats = await asyncio.to_thread(run_stats, out) | {
        "complete": progress.finished == progress.total,
        "top_k": config.sampling.sampler.top_k,
        "duplicate_bos": prompts.doubled_bos,
        "last_command": {
            "elapsed_s": elapsed_s,
            "output_tokens_per_s": progress.output_tokens / elapsed_s,
            "retried": dict(progress.retried),
            "prompts_differ": progress.prompts_differ,
            "overflowed": progress.overflowed,
        },
    }
    write_json(out / STATS_FILE, stats)
    _judge(progress, config, out, stopped=stop is not None and stop.is_set())
    return stats


async def collect_into(
    writer: RunWriter,
    engine: Engine,
    wanted: Sequence[Request],
    config: CollectConfig,
    *,
    reward: Reward | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    stop: asyncio.Event | None = None,
    on_note: OnNote = lambda note: None,
) -> Progress:
    """Collect what of `wanted` is not in the run yet; every outcome leaves a trace there."""
    missing = [request for request in wanted if request.rollout_id not in writer.done]
    progress = Progress(total=len(wanted), done=len(wanted) - len(missing))
    outcomes = collect_outcomes(
        engine,
        missing,
        config.sampling,
        seed=config.seed,
        concurrency=min(config.concurrency, max(1, len(missing))),
        retry=config.retry,
        on_overflow=config.on_overflow,
        single_weight_version=config.single_weight_version,
        reward=reward,
        stop=stop,
        on_retry=lambda error: progress.retried.update([error.code]),
    )
    async with aclosing(outcomes):
        await Keeper(writer, config, progress, on_progress, on_note).keep(outcomes)
    return progress


def make_engine(
    config: CollectConfig, vocab_size: int, stop: asyncio.Event | None = None
) -> Engine:
    """The engine that `config` names, not yet entered; `stop` ends waiting for sick endpoints."""
    engine = config.engine
    if isinstance(engine, EmbeddedConfig):
        from rollout.engines.embedded import EmbeddedEngine  # the one that needs torch

        return EmbeddedEngine(config.model, engine)
    from rollout.engines.pool import EnginePool

    return EnginePool(
        [_server(url, engine, vocab_size) for url in engine.urls],
        prefix_affinity=engine.prefix_affinity,
        down_after_s=engine.down_after_s,
        stop=stop,
    )


def _server(url: str, config: SGLangConfig | VLLMConfig, vocab_size: int) -> Engine:
    """One endpoint."""
    alike: dict[str, Any] = {
        "vocab_size": vocab_size,
        "queue_timeout_s": config.queue_timeout_s,
        "slowest_tokens_per_s": config.slowest_tokens_per_s,
    }
    if isinstance(config, VLLMConfig):
        from rollout.engines.vllm.engine import VLLMEngine

        return VLLMEngine(url, **alike)
    from rollout.engines.sglang.engine import SGLangEngine

    return SGLangEngine(
        url,
        route=config.route,
        support_logprobs=config.support_logprobs,
        shared=config.shared,
        **alike,
    )


def _judge(progress: Progress, config: CollectConfig, out: Path, *, stopped: bool) -> None:
    if progress.lost > lost_allowed(config, progress.total):
        raise OverBudget(
            f"{out}: {progress.failed} rollouts failed and {progress.rejected} were rejected of "
            f"{progress.total}, over the error budget of {config.error_budget}; "
            "errors.jsonl and rejected.jsonl there say why. What was collected is kept: "
            "the same command goes on from here"
        )
    if progress.done == 0 and not stopped:
        raise NotARun(f"{out}: the run ended without a rollout")


def _identity(config: CollectConfig, prompts: PromptSet, engine: Engine) -> dict[str, Any]:
    """What run.json keeps, and what must be the same to continue a run."""
    settings = config.model_dump(mode="json", exclude=MAY_CHANGE)
    for key in ENGINE_MAY_CHANGE:
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


def _note_settings(
    config: CollectConfig, asked: SamplingParams, prompts: PromptSet, on_note: OnNote
) -> None:
    if asked.top_k == "auto":
        on_note(f"top_k auto is {config.sampling.top_k} here")
    if asked.top_p_is_off:
        on_note(f"top_p {asked.top_p} is 1 in float32 and has no effect")
    if prompts.doubled_bos:
        on_note(f"{prompts.doubled_bos} prompts start with BOS twice")

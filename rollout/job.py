"""collect_run(): what `rollout collect` does, from a config to a run directory."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollout.collect import Outcome, Request, Reward, collect_outcomes, make_requests
from rollout.config import CollectConfig, EmbeddedConfig
from rollout.engines.base import Engine
from rollout.errors import ConfigError, DataError, EngineDown, NotARun, OverBudget
from rollout.files import write_json
from rollout.prompts import PromptSet, load_prompts
from rollout.record import make_rollout_id
from rollout.rewards import load_reward
from rollout.schema import STATS_FILE
from rollout.stats import run_stats
from rollout.writer import RunWriter

MAY_CHANGE = {"concurrency", "retry", "error_budget", "shards", "keep_aborted"}
ENGINE_MAY_CHANGE = {
    "url",
    "prefix_affinity",
    "queue_timeout_s",
    "slowest_tokens_per_s",
    "down_after_s",
}
"""Settings that do not change what is collected, so a run may go on with others."""


@dataclass
class Progress:
    """How far a run is; rollouts of earlier commands are done from the start."""

    total: int
    done: int = 0
    failed: int = 0
    rejected: int = 0
    output_tokens: int = 0  # of this command
    retried: Counter[str] = field(default_factory=Counter)  # failures tried again, of this command

    @property
    def lost(self) -> int:
        return self.failed + self.rejected


async def collect_run(
    config: CollectConfig,
    out: Path,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    stop: asyncio.Event | None = None,
) -> dict[str, Any]:
    """Collect into `out`, or continue there; returns the statistics of the whole run.

    Setting `stop` ends it early: what is in flight is finished and stored, and the statistics say
    ``"complete": False``. Cancelling it keeps what has come.

    Raises `ConfigError` and `EngineError` before anything is written, `EngineDown` when no endpoint
    answers any more, `OverBudget` when more than `config.error_budget` of the rollouts failed, and
    `NotARun` when nothing came at all.
    """
    # settings that no server could serve are refused before anything is loaded
    config.sampling.check_replayable()
    reward = None if config.reward is None else load_reward(config.reward)
    prompts = await asyncio.to_thread(load_prompts, config.prompts, config.model)
    if not prompts.prompts:
        raise ConfigError(f"prompts: {config.prompts.dataset} has no rows to collect")
    async with make_engine(config, prompts.vocab_size, stop) as engine:
        config = config.model_copy(update={"sampling": engine.resolve(config.sampling)})
        engine.check(config.sampling)
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
                )
        except EngineDown:
            write_json(out / STATS_FILE, await asyncio.to_thread(run_stats, out))
            raise
        elapsed_s = time.monotonic() - start
    stats = await asyncio.to_thread(run_stats, out) | {
        "complete": progress.done + progress.lost == progress.total,
        "top_k": config.sampling.sampler.top_k,
        "duplicate_bos": prompts.doubled_bos,
        "last_command": {
            "elapsed_s": elapsed_s,
            "output_tokens_per_s": progress.output_tokens / elapsed_s,
            "retried": dict(progress.retried),
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
        reward=reward,
        stop=stop,
        on_retry=lambda error: progress.retried.update([error.code]),
    )
    async with aclosing(outcomes):
        await _Keeper(writer, config, progress, on_progress).keep(outcomes)
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
    from rollout.engines.sglang import SGLangEngine

    urls = [engine.url] if isinstance(engine.url, str) else engine.url
    servers = [
        SGLangEngine(
            url,
            vocab_size=vocab_size,
            support_logprobs=engine.support_logprobs,
            queue_timeout_s=engine.queue_timeout_s,
            slowest_tokens_per_s=engine.slowest_tokens_per_s,
        )
        for url in urls
    ]
    return EnginePool(
        servers,
        prefix_affinity=engine.prefix_affinity,
        down_after_s=engine.down_after_s,
        stop=stop,
    )


class _Keeper:
    """Stores outcomes in a thread, so that neither checks nor disks hold up the event loop."""

    def __init__(
        self,
        writer: RunWriter,
        config: CollectConfig,
        progress: Progress,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._writer = writer
        self._config = config
        self._progress = progress
        self._on_progress = on_progress
        self._writing = asyncio.Lock()  # the writer is for one thread at a time

    async def keep(self, outcomes: Any) -> None:
        """Store until the outcomes end, the budget is spent, or the engine is down."""
        ticking = asyncio.create_task(self._commit_by_age())
        try:
            async for outcome in outcomes:
                if isinstance(outcome.error, EngineDown):
                    raise outcome.error
                async with self._writing:
                    await _in_thread(self._store, outcome)
                self._on_progress(self._progress)
                if ticking.done():
                    ticking.result()  # a disk that failed it will fail us
                if self._progress.lost > lost_allowed(self._config, self._progress.total):
                    return
        finally:
            ticking.cancel()
            await asyncio.wait({ticking})

    async def _commit_by_age(self) -> None:
        """Rollouts that came do not wait for the next one to become durable."""
        while True:
            await asyncio.sleep(1)
            async with self._writing:
                await _in_thread(self._writer.commit_if_old)

    def _store(self, outcome: Outcome) -> None:
        """Into the shards, rejected.jsonl or errors.jsonl: every outcome leaves a trace."""
        progress, request = self._progress, outcome.request
        about = {"rollout_id": request.rollout_id, "attempts": outcome.attempts}
        if self._config.keep_aborted:
            self._store_aborted(outcome)
        error = outcome.error
        if outcome.rollout is not None:
            try:
                self._writer.write(outcome.rollout)
            except DataError as broken_rule:
                error = broken_rule
            else:
                progress.done += 1
                progress.output_tokens += outcome.rollout.num_output_tokens
                return
        assert error is not None, "an outcome is a rollout or an error"
        if isinstance(error, DataError):
            progress.rejected += 1
            self._writer.reject(error, outcome.body, **about)
        else:
            progress.failed += 1
            self._writer.fail(error, **about)

    def _store_aborted(self, outcome: Outcome) -> None:
        number = 0
        for rollout in outcome.aborted:
            while (rollout_id := _abort_id(outcome.request, number)) in self._writer.done:
                number += 1  # of an earlier command
            try:
                self._writer.write(replace(rollout, rollout_id=rollout_id))
            except DataError as broken_rule:
                self._writer.reject(broken_rule, None, rollout_id=rollout_id)


async def _in_thread(function: Callable[..., None], *args: Any) -> None:
    """Run it in a thread. A cancellation waits until it is done: leaving the writer's context in
    the middle of a commit would write the same bytes from two threads."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *args))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()


def _abort_id(request: Request, number: int) -> str:
    return make_rollout_id(request.prompt.prompt_id, request.sample_index, number)


def lost_allowed(config: CollectConfig, total: int) -> float:
    """How many rollouts may be lost: `error_budget` is a count or a share."""
    budget = config.error_budget
    return budget if isinstance(budget, int) else budget * total


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

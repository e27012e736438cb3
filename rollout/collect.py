"""collect(): ask an engine for many rollouts, a bounded number at a time."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
)
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from rollout.engines.base import Completion, Engine
from rollout.errors import (
    EngineError,
    GenerationAborted,
    RolloutError,
    SupportOverflow,
    WeightsMoved,
)
from rollout.prompts import Prompt
from rollout.record import Rollout, make_rollout_id
from rollout.retry import OnOverflow, RetryConfig, pause_s
from rollout.rules import check_content, check_format
from rollout.sampling import SamplingParams, canonical_json

Reward = Callable[[Rollout], Awaitable[float | None]]
OnRetry = Callable[[RolloutError], None]


class Request(NamedTuple):
    """The sample_index-th rollout of a prompt."""

    prompt: Prompt
    sample_index: int

    @property
    def rollout_id(self) -> str:
        return make_rollout_id(self.prompt.prompt_id, self.sample_index)


Requests = Iterable[Request] | AsyncIterable[Request]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of a request: a rollout, or the error that ended the last attempt."""

    request: Request
    rollout: Rollout | None = None
    error: RolloutError | None = None
    attempts: int = 1
    aborted: tuple[Rollout, ...] = ()  # attempts that the server broke off, with their tokens
    body: bytes | None = None  # the engine's reply, for a rollout that breaks a rule


def make_requests(prompts: Iterable[Prompt], rollouts_per_prompt: int) -> Iterator[Request]:
    """Every rollout to collect, prompt by prompt."""
    for prompt in prompts:
        for index in range(rollouts_per_prompt):
            yield Request(prompt, index)


async def collect(
    engine: Engine,
    requests: Requests,
    params: SamplingParams,
    *,
    seed: int | None = None,
    concurrency: int = 64,
    retry: RetryConfig | None = None,
    on_overflow: OnOverflow = "skip",
    single_weight_version: bool = False,
    reward: Reward | None = None,
    on_lost: Callable[[Outcome], None] | None = None,
) -> AsyncGenerator[Rollout, None]:
    """Yield rollouts in the order in which they finish, without touching a disk::

        async with SGLangEngine(url, vocab_size=49152) as engine:
            async for rollout in collect(engine, requests, params):
                ...

    Each follows every rule of docs/format.md. A request that cannot be served goes to `on_lost`;
    without one, its error is raised. With `single_weight_version`, one that the weights changed
    under is asked for again. What `collect_outcomes` says of bounds holds here too.
    """
    async for outcome in collect_outcomes(
        engine,
        requests,
        params,
        seed=seed,
        concurrency=concurrency,
        retry=retry,
        on_overflow=on_overflow,
        single_weight_version=single_weight_version,
        reward=reward,
    ):
        checked = _judged(outcome)
        if checked.rollout is not None:
            yield checked.rollout
        elif on_lost is not None:
            on_lost(checked)
        elif checked.error is not None:
            raise checked.error


def _judged(outcome: Outcome) -> Outcome:
    """The outcome, with a rollout that breaks a rule turned into its error."""
    if outcome.rollout is None:
        return outcome
    try:
        check_format(outcome.rollout)
        check_content(outcome.rollout)
    except RolloutError as error:
        return replace(outcome, rollout=None, error=error)
    return outcome


async def collect_outcomes(
    engine: Engine,
    requests: Requests,
    params: SamplingParams,
    *,
    seed: int | None = None,
    concurrency: int = 64,
    retry: RetryConfig | None = None,
    on_overflow: OnOverflow = "skip",
    single_weight_version: bool = False,
    reward: Reward | None = None,
    stop: asyncio.Event | None = None,
    on_retry: OnRetry = lambda error: None,
) -> AsyncGenerator[Outcome, None]:
    """Yield one `Outcome` per request, in the order in which they finish.

    At most `concurrency` requests are in flight and as many outcomes wait for the consumer, so an
    endless source is fine and a slow consumer slows the engine down. Once `stop` is set no request
    is taken or tried again; those in flight are finished. Closing the iterator cancels them.
    `on_retry` hears of every failure that is not the end of its request.
    """
    source, taking = _as_async(requests), asyncio.Lock()
    stop = stop or asyncio.Event()
    asking = _Asking(
        engine,
        retry or RetryConfig(),
        on_overflow,
        single_weight_version,
        reward,
        stop,
        on_retry,
    )
    results: asyncio.Queue[Outcome] = asyncio.Queue(concurrency)

    async def work() -> None:
        while not stop.is_set():
            async with taking:
                request = await anext(source, None)
            if request is None:
                return
            outcome = await asking.outcome(request, _with_seed(params, seed, request))
            if outcome is not None:
                await results.put(outcome)

    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    finished = asyncio.gather(*workers)
    waiting = asyncio.ensure_future(results.get())
    try:
        while not finished.done():
            either: list[asyncio.Future[Any]] = [waiting, finished]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                yield waiting.result()
                waiting = asyncio.ensure_future(results.get())
        # a bug in an engine or a reward ends one worker: the others take no more, nothing is lost
        for task in (waiting, *workers):
            task.cancel()
        await asyncio.wait({waiting})  # or it would take an outcome out of our hands
        if not waiting.cancelled():
            yield waiting.result()
        while not results.empty():
            yield results.get_nowait()
        finished.result()
    finally:
        for task in (waiting, *workers):
            task.cancel()
        await asyncio.gather(*workers, finished, return_exceptions=True)


async def _as_async(requests: Requests) -> AsyncIterator[Request]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
    else:
        for request in requests:
            yield request


@dataclass(frozen=True, eq=False)
class _Asking:
    """How one request is asked for, until there is a rollout or no reason to ask again."""

    engine: Engine
    retry: RetryConfig
    on_overflow: OnOverflow
    single_weight_version: bool
    reward: Reward | None
    stop: asyncio.Event
    on_retry: OnRetry

    async def outcome(self, request: Request, params: SamplingParams) -> Outcome | None:
        """None if stopped between two attempts."""
        start, attempt = time.monotonic(), 1
        aborted: list[Rollout] = []
        failures: Counter[str] = Counter()
        trials = 0  # of endpoints that were sick; they cost nothing
        while True:
            asked = time.monotonic()
            try:
                completion = await self.engine.generate(request.prompt, params)
                rollout = _record(request, params, completion, attempt, asked)
                if completion.finish_reason == "abort":
                    aborted.append(rollout)
                    raise GenerationAborted(f"{request.rollout_id}: the server aborted it")
                if self.single_weight_version:
                    _check_single_version(rollout)
            except RolloutError as error:
                failures[error.code] += 1
                trials += isinstance(error, EngineError) and not error.counts
                elapsed = time.monotonic() - start
                pause = pause_s(error, attempt - trials, failures[error.code], elapsed, self.retry)
                if isinstance(error, SupportOverflow) and self._may_lower(params):
                    params, pause = _with_lower_top_k(params), 0.0
                if pause is None:
                    return Outcome(request, None, error, attempt, tuple(aborted), error.body)
                self.on_retry(error)
            else:
                if self.reward is not None:
                    rollout = replace(rollout, reward=await self.reward(rollout))
                return Outcome(request, rollout, None, attempt, tuple(aborted), completion.raw)
            if await _set_within(self.stop, pause):
                return None
            attempt += 1

    def _may_lower(self, params: SamplingParams) -> bool:
        return self.on_overflow == "lower_top_k" and params.top_k != 1


def _check_single_version(rollout: Rollout) -> None:
    versions = [span.version for span in rollout.weight_versions]
    if len(set(versions)) != 1:
        found = " and ".join(dict.fromkeys(versions)) or "versions that the server does not tell"
        raise WeightsMoved(
            f"{rollout.rollout_id}: sampled with {found}; single_weight_version is set"
        )


def _with_lower_top_k(params: SamplingParams) -> SamplingParams:
    """Half of it: how many ids tie is not known."""
    assert isinstance(params.top_k, int), "an engine that was asked has resolved it"
    return params.model_copy(update={"top_k": max(1, params.top_k // 2)})


def _record(
    request: Request, params: SamplingParams, completion: Completion, attempt: int, asked: float
) -> Rollout:
    prompt = request.prompt
    theirs = prompt.ids if completion.prompt_ids is None else completion.prompt_ids
    return completion.to_rollout(
        prompt_id=prompt.prompt_id,
        sample_index=request.sample_index,
        prompt_ids=theirs,
        prompt_text=prompt.text if np.array_equal(prompt.ids, theirs) else None,
        params=params,
        abort=attempt - 1,
        sampling_params=canonical_json(params.to_request()),
        latency_ms=1000 * (time.monotonic() - asked),
        attempts=attempt,
        extra=canonical_json(prompt.extra),
    )


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for `event`, at most so long; whether it is set."""
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True


def rollout_seed(seed: int, rollout_id: str) -> int:
    """A seed for one rollout, the same on every machine and in every order of collecting."""
    digest = hashlib.sha256(f"{seed}/{rollout_id}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & 0x7FFF_FFFF


def _with_seed(params: SamplingParams, seed: int | None, request: Request) -> SamplingParams:
    if seed is None:
        return params
    return params.model_copy(update={"sampling_seed": rollout_seed(seed, request.rollout_id)})

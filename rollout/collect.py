"""collect(): ask an engine for many rollouts, a bounded number at a time."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rollout.engines.base import Engine
from rollout.errors import EngineError, GenerationAborted, RolloutError
from rollout.prompts import Prompt
from rollout.record import Rollout, make_rollout_id
from rollout.sampling import SamplingParams, canonical_json

LONGEST_PAUSE_S = 30.0


class Request(NamedTuple):
    """The sample_index-th rollout of a prompt."""

    prompt: Prompt
    sample_index: int

    @property
    def rollout_id(self) -> str:
        return make_rollout_id(self.prompt.prompt_id, self.sample_index)


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of a request: a rollout, or the error that ended the last attempt."""

    request: Request
    rollout: Rollout | None = None
    error: RolloutError | None = None
    attempts: int = 1
    body: bytes | None = None  # the engine's reply, for a rollout that breaks a rule


def make_requests(prompts: Iterable[Prompt], rollouts_per_prompt: int) -> Iterator[Request]:
    """Every rollout to collect, prompt by prompt."""
    for prompt in prompts:
        for index in range(rollouts_per_prompt):
            yield Request(prompt, index)


async def collect(
    engine: Engine,
    requests: Iterable[Request],
    params: SamplingParams,
    *,
    seed: int | None = None,
    concurrency: int = 64,
    attempts: int = 3,
    pause_s: float = 1.0,
) -> AsyncIterator[Outcome]:
    """Yield one `Outcome` per request, in the order in which they finish.

    A request is tried `attempts` times where asking again can help, after a random pause of at most
    `pause_s`, twice that the next time. Requests are taken only when a place is free, so an endless
    source is fine and a slow consumer slows the engine down. Closing the iterator cancels what is
    in flight.
    """
    source = iter(requests)
    running: set[asyncio.Task[Outcome]] = set()
    try:
        while True:
            while len(running) < concurrency and (request := next(source, None)) is not None:
                job = _outcome(
                    engine, request, _with_seed(params, seed, request), attempts, pause_s
                )
                running.add(asyncio.create_task(job))
            if not running:
                return
            finished, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                yield task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _outcome(
    engine: Engine, request: Request, params: SamplingParams, attempts: int, pause_s: float
) -> Outcome:
    """Ask until there is a rollout, an error that asking again cannot cure, or no attempt left."""
    attempt = 1
    while True:
        start = time.monotonic()
        try:
            completion = await engine.generate(request.prompt.ids, params)
            if completion.finish_reason == "abort":
                raise GenerationAborted(f"{request.rollout_id}: the server aborted it")
        except RolloutError as error:
            hopeless = not (isinstance(error, EngineError) and error.retryable)
            if hopeless or attempt == attempts:
                return Outcome(request, error=error, attempts=attempt, body=error.body)
        else:
            latency_ms = 1000 * (time.monotonic() - start)
            rollout = completion.to_rollout(
                prompt_id=request.prompt.prompt_id,
                sample_index=request.sample_index,
                prompt_ids=request.prompt.ids,
                prompt_text=request.prompt.text,
                params=params,
                sampling_params=canonical_json(params.to_request()),
                engine_meta=canonical_json(engine.meta(params)),
                latency_ms=latency_ms,
                attempts=attempt,
            )
            return Outcome(request, rollout=rollout, attempts=attempt, body=completion.raw)
        # full jitter, so that many clients do not come back at the same moment
        await asyncio.sleep(random.uniform(0, min(LONGEST_PAUSE_S, pause_s)))
        attempt, pause_s = attempt + 1, 2 * pause_s


def rollout_seed(seed: int, rollout_id: str) -> int:
    """A seed for one rollout, the same on every machine and in every order of collecting."""
    digest = hashlib.sha256(f"{seed}/{rollout_id}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & 0x7FFF_FFFF


def _with_seed(params: SamplingParams, seed: int | None, request: Request) -> SamplingParams:
    if seed is None:
        return params
    return params.model_copy(update={"sampling_seed": rollout_seed(seed, request.rollout_id)})

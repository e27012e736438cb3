"""EnginePool: several endpoints behind the seam of one engine."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from rollout.engines.base import Completion, Engine, EngineInfo, left_on_error
from rollout.errors import (
    ConfigError,
    EngineBusy,
    EngineDown,
    EngineFailed,
    EngineUnreachable,
    ReplyMalformed,
    RolloutError,
)
from rollout.prompts import Prompt
from rollout.sampling import SamplingParams

SICK_AFTER = 3  # failures in a row
FIRST_REST_S = 1.0
LONGEST_REST_S = 30.0
TRIAL_S = 10.0  # how long the others wait for the one that tries a rested endpoint
STOP_CHECK_S = 1.0
HOME_SLACK = 8  # rollouts that a prompt's own endpoint may have more, beside twice the idlest
PREFIX_TOKENS = 64

_SICKNESS = (EngineUnreachable, EngineBusy, EngineFailed, ReplyMalformed)


@dataclass(eq=False)
class _Endpoint:
    engine: Engine
    entered: bool = False
    in_flight: int = 0
    failures: int = 0  # in a row
    rested_at: float = 0.0
    awake_at: float = 0.0
    on_trial: bool = False
    salt: bytes = field(default=b"")

    def take(self, now: float) -> bool:
        """Give it one more; whether that is a trial: a sick one gets one rollout at a time."""
        self.in_flight += 1
        is_trial = self.failures >= SICK_AFTER
        if is_trial:
            self.on_trial, self.awake_at = True, now + TRIAL_S
        return is_trial

    def note_answer(self) -> None:
        """It is well."""
        self.failures, self.awake_at, self.on_trial = 0, 0.0, False

    def note_failure(self, asked_at: float, now: float) -> None:
        """From the third failure in a row on it rests, longer each time. What was in flight when it
        went to rest says nothing new: a server that restarts breaks many at once."""
        if asked_at < self.rested_at:
            return
        self.failures, self.on_trial = self.failures + 1, False
        if self.failures >= SICK_AFTER:
            rest_s = FIRST_REST_S * 2.0 ** min(self.failures - SICK_AFTER, 64)
            self.rested_at, self.awake_at = now, now + min(LONGEST_REST_S, rest_s)


class EnginePool:
    """Spreads rollouts over engines of the same model; itself an `Engine`.

    A rollout goes to the endpoint with the fewest in flight or, with `prefix_affinity`, to the one
    that prompts beginning alike always go to. An endpoint that fails three times in a row rests and
    is then tried with one rollout. While all rest, rollouts wait and take turns in trying, which
    costs them no attempts. `EngineDown` when that has lasted for `down_after_s`; once `stop` is set
    nobody waits any longer.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        prefix_affinity: bool = False,
        down_after_s: float = 600.0,
        stop: asyncio.Event | None = None,
    ) -> None:
        self._endpoints = [_Endpoint(e, salt=str(i).encode()) for i, e in enumerate(engines)]
        self._prefix_affinity = prefix_affinity
        self._down_after_s = down_after_s
        self._stop = stop or asyncio.Event()
        self._resting_since: float | None = None  # all of them
        self._waiting = 0  # rollouts, while all endpoints rest
        self._news = asyncio.Event()

    async def __aenter__(self) -> Self:
        """Enter every endpoint; one that is not there is an error now, not in the night."""
        async with left_on_error(self):
            for endpoint in self._endpoints:
                await endpoint.engine.__aenter__()
                endpoint.entered = True
            self._check_same_model()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for endpoint in self._endpoints:
            if endpoint.entered:
                endpoint.entered = False
                await endpoint.engine.__aexit__(kind, error, traceback)

    @property
    def info(self) -> EngineInfo:
        """The first endpoint's; the others serve the same model."""
        return self._endpoints[0].engine.info

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """As the most restricted endpoint wants it, so that all of them can serve it."""
        resolved = [endpoint.engine.resolve(params) for endpoint in self._endpoints]
        return min(resolved, key=lambda p: p.top_k if isinstance(p.top_k, int) else 0)

    def check(self, params: SamplingParams) -> None:
        """Every endpoint must be able to serve `params`."""
        for endpoint in self._endpoints:
            endpoint.engine.check(params)

    async def generate(self, prompt: Prompt, params: SamplingParams) -> Completion:
        """Sample at one endpoint; its errors pass unchanged."""
        endpoint = await self._choose(prompt.ids)
        asked_at = time.monotonic()
        is_trial = endpoint.take(asked_at)
        try:
            completion = await endpoint.engine.generate(prompt, params)
        except _SICKNESS as error:
            endpoint.note_failure(asked_at, time.monotonic())
            # others wait to try it next: what fails for all of them is not this rollout's fault
            error.counts = not (is_trial and self._waiting)
            raise
        except RolloutError:
            self._note_answer(endpoint)  # not what was wanted, but it is alive
            raise
        else:
            self._note_answer(endpoint)
            return completion
        finally:
            endpoint.in_flight -= 1
            self._news.set()

    def _note_answer(self, endpoint: _Endpoint) -> None:
        endpoint.note_answer()
        self._resting_since = None

    async def _choose(self, prompt_ids: NDArray[np.int32]) -> _Endpoint:
        while True:
            now = time.monotonic()
            awake = [e for e in self._endpoints if e.awake_at <= now]
            if awake:
                return self._best(awake, prompt_ids)
            if self._resting_since is None:
                self._resting_since = now
            down_s = now - self._resting_since
            if down_s > self._down_after_s and not any(e.on_trial for e in self._endpoints):
                raise EngineDown(
                    f"no endpoint has answered for {down_s:.0f} s; "
                    "what was collected is kept: start the servers and run the same command again"
                )
            if self._stop.is_set():
                raise EngineUnreachable("stopped while every endpoint rests")
            until_awake_s = min(e.awake_at for e in self._endpoints) - now
            await self._wait_for_news(min(until_awake_s, STOP_CHECK_S))

    async def _wait_for_news(self, longest_s: float) -> None:
        self._news.clear()
        self._waiting += 1
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), longest_s)
        finally:
            self._waiting -= 1

    def _best(self, awake: list[_Endpoint], prompt_ids: NDArray[np.int32]) -> _Endpoint:
        idlest = min(awake, key=lambda e: e.in_flight)
        if not self._prefix_affinity:
            return idlest
        # rendezvous hashing: when one endpoint rests, only its own prompts move
        prefix = prompt_ids[:PREFIX_TOKENS].tobytes()
        home = max(awake, key=lambda e: hashlib.blake2b(prefix + e.salt).digest())
        # one system prompt for all must not leave the other endpoints idle
        return home if home.in_flight <= 2 * idlest.in_flight + HOME_SLACK else idlest

    def _check_same_model(self) -> None:
        infos = [endpoint.engine.info for endpoint in self._endpoints]
        models = {(info.model, info.weight_version) for info in infos}
        if len(models) > 1:
            raise ConfigError(
                f"engine.url: the endpoints serve different models or weights: {sorted(models)}"
            )

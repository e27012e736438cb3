"""EnginePool: several endpoints behind the seam of one engine."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from rollout.engines.base import Completion, Engine, EngineInfo
from rollout.errors import ConfigError, EngineBusy, EngineDown, EngineFailed, EngineUnreachable
from rollout.sampling import SamplingParams

SICK_AFTER = 3  # failures in a row
FIRST_REST_S = 1.0
LONGEST_REST_S = 30.0
PREFIX_TOKENS = 64

_SICKNESS = (EngineUnreachable, EngineBusy, EngineFailed)


@dataclass(eq=False)
class _Endpoint:
    engine: Engine
    entered: bool = False
    in_flight: int = 0
    failures: int = 0  # in a row
    awake_at: float = 0.0
    salt: bytes = field(default=b"")

    def note(self, failed: bool, now: float) -> None:
        """A success makes it well; every failure from the third on sends it to rest, longer."""
        self.failures = self.failures + 1 if failed else 0
        if self.failures >= SICK_AFTER:
            rest_s = FIRST_REST_S * 2 ** (self.failures - SICK_AFTER)
            self.awake_at = now + min(LONGEST_REST_S, rest_s)


class EnginePool:
    """Spreads rollouts over engines of the same model; itself an `Engine`.

    A rollout goes to the endpoint with the fewest in flight or, with `prefix_affinity`, to the one
    that prompts beginning alike always go to. An endpoint that fails three times in a row rests and
    is tried again; while all rest, rollouts wait. `EngineDown` when nobody has answered for
    `down_after_s`.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        prefix_affinity: bool = False,
        down_after_s: float = 600.0,
    ) -> None:
        self._endpoints = [_Endpoint(e, salt=str(i).encode()) for i, e in enumerate(engines)]
        self._prefix_affinity = prefix_affinity
        self._down_after_s = down_after_s
        self._last_answer = time.monotonic()

    async def __aenter__(self) -> Self:
        """Enter every endpoint; one that is not there is an error now, not in the night."""
        try:
            for endpoint in self._endpoints:
                await endpoint.engine.__aenter__()
                endpoint.entered = True
            self._check_same_model()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        self._last_answer = time.monotonic()
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

    def check(self, params: SamplingParams) -> None:
        """Every endpoint must be able to serve `params`."""
        for endpoint in self._endpoints:
            endpoint.engine.check(params)

    async def generate(self, prompt_ids: NDArray[np.int32], params: SamplingParams) -> Completion:
        """Sample at one endpoint; its errors pass unchanged."""
        endpoint = await self._choose(prompt_ids)
        endpoint.in_flight += 1
        try:
            completion = await endpoint.engine.generate(prompt_ids, params)
        except _SICKNESS:
            endpoint.note(failed=True, now=time.monotonic())
            raise
        else:
            self._last_answer = time.monotonic()
            endpoint.note(failed=False, now=self._last_answer)
            return completion
        finally:
            endpoint.in_flight -= 1

    async def _choose(self, prompt_ids: NDArray[np.int32]) -> _Endpoint:
        while True:
            now = time.monotonic()
            awake = [e for e in self._endpoints if e.awake_at <= now]
            if awake:
                return self._best(awake, prompt_ids)
            if now - self._last_answer > self._down_after_s:
                raise EngineDown(
                    f"no endpoint has answered for {now - self._last_answer:.0f} s; "
                    "what was collected is kept: start the servers and run the same command again"
                )
            await asyncio.sleep(min(e.awake_at for e in self._endpoints) - now)

    def _best(self, awake: list[_Endpoint], prompt_ids: NDArray[np.int32]) -> _Endpoint:
        if not self._prefix_affinity:
            return min(awake, key=lambda e: e.in_flight)
        # rendezvous hashing: when one endpoint rests, only its own prompts move
        prefix = prompt_ids[:PREFIX_TOKENS].tobytes()
        return max(awake, key=lambda e: hashlib.blake2b(prefix + e.salt).digest())

    def _check_same_model(self) -> None:
        models = {e.engine.info.model for e in self._endpoints}
        if len(models) > 1:
            raise ConfigError(f"engine.url: the endpoints serve different models: {models}")

"""EnginePool: least in flight, affinity, rest for the sick, a clear stop when all are dead."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from builders import ScriptedEngine, make_completion, make_prompt

from rollout import errors
from rollout.engines import pool as pool_module
from rollout.engines.base import Completion, EngineInfo
from rollout.engines.pool import EnginePool
from rollout.prompts import Prompt
from rollout.sampling import SamplingParams

PARAMS = SamplingParams(top_k=4)


class Server(ScriptedEngine):
    """Answers after a pause while it is up; counts its calls."""

    def __init__(self, *, up: bool = True, pause_s: float = 0.0, model: str = "m") -> None:
        super().__init__()
        self.up, self.pause_s, self.model, self.calls = up, pause_s, model, 0

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(name="test", version="1", model=self.model, max_top_k=None)

    async def generate(self, prompt: Prompt, params: SamplingParams) -> Completion:
        self.calls += 1
        await asyncio.sleep(self.pause_s)
        if not self.up:
            raise errors.EngineUnreachable("gone")
        return make_completion()


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "FIRST_REST_S", 0.05)


async def ask(pool: EnginePool, prompt: int, tries: int = 20) -> None:
    for _ in range(tries):
        try:
            await pool.generate(make_prompt(prompt), PARAMS)
        except errors.EngineUnreachable:
            continue
        return


def test_least_in_flight_gets_the_next() -> None:
    slow, fast = Server(pause_s=0.1), Server(pause_s=0.01)

    async def run() -> None:
        async with EnginePool([slow, fast]) as pool:
            waiting = [asyncio.create_task(ask(pool, i)) for i in range(4)]
            await asyncio.sleep(0.05)
            assert (slow.calls, fast.calls) == (2, 2)
            await asyncio.gather(*waiting[2:], *(ask(pool, i) for i in range(4)))
            assert slow.calls == 3, "two still in flight there, so the fast one gets more"

    asyncio.run(run())


def test_affinity_keeps_prompts_that_begin_alike_together() -> None:
    servers = [Server() for _ in range(3)]

    async def home(pool: EnginePool, prompt: list[int]) -> int:
        before = [server.calls for server in servers]
        await pool.generate(make_prompt(*prompt), PARAMS)
        return next(i for i, s in enumerate(servers) if s.calls != before[i])

    async def run() -> None:
        async with EnginePool(servers, prefix_affinity=True) as pool:
            shared = list(range(64))
            assert len({await home(pool, [*shared, tail]) for tail in range(10)}) == 1
            spread = Counter([await home(pool, [first]) for first in range(60)])
            assert len(spread) == 3 and min(spread.values()) > 5

    asyncio.run(run())


def test_a_sick_endpoint_rests_and_is_tried_again() -> None:
    sick, well = Server(up=False), Server()

    async def run() -> None:
        async with EnginePool([sick, well]) as pool:
            for _ in range(10):
                await asyncio.gather(*(ask(pool, i) for i in range(4)))
            assert sick.calls < 12 and well.calls == 40
            sick.up = True
            await asyncio.sleep(0.2)
            calls = sick.calls
            await asyncio.gather(*(ask(pool, i) for i in range(10)))
            assert sick.calls > calls

    asyncio.run(run())


def test_while_all_rest_rollouts_wait_and_then_go_on() -> None:
    only = Server(up=False)

    async def run() -> None:
        async with EnginePool([only]) as pool:
            asyncio.get_running_loop().call_later(0.3, lambda: setattr(only, "up", True))
            await ask(pool, 1)
            assert only.calls < 10, "rests grow: a dead server is not hammered"

    asyncio.run(run())


def test_nobody_for_too_long_is_a_clear_stop() -> None:
    async def run() -> None:
        async with EnginePool([Server(up=False), Server(up=False)], down_after_s=0.2) as pool:
            await ask(pool, 1, tries=100)

    with pytest.raises(errors.EngineDown, match="no endpoint has answered for 0 s"):
        asyncio.run(run())


def test_stopping_does_not_wait_for_the_sick() -> None:
    async def run() -> None:
        stop = asyncio.Event()
        async with EnginePool([Server(up=False)], stop=stop) as pool:
            asyncio.get_running_loop().call_later(0.2, stop.set)
            while not stop.is_set():
                await ask(pool, 1, tries=1)
            with pytest.raises(errors.EngineUnreachable):
                await pool.generate(make_prompt(1), PARAMS)

    asyncio.run(asyncio.wait_for(run(), 10))


def test_one_prefix_for_all_does_not_idle_the_others() -> None:
    servers = [Server(pause_s=0.05) for _ in range(2)]

    async def run() -> None:
        async with EnginePool(servers, prefix_affinity=True) as pool:
            await asyncio.gather(*(ask(pool, 1) for _ in range(60)))

    asyncio.run(run())
    assert min(server.calls for server in servers) >= 15


def test_endpoints_must_serve_one_model() -> None:
    async def run() -> None:
        async with EnginePool([Server(model="a"), Server(model="b")]):
            pass

    with pytest.raises(errors.ConfigError, match="serve different models or weights"):
        asyncio.run(run())


def test_a_refusal_is_not_sickness() -> None:
    refusing = ScriptedEngine(*[errors.EngineRefused("400")] * 9, make_completion())

    async def run() -> None:
        async with EnginePool([refusing]) as pool:
            for _ in range(9):
                with pytest.raises(errors.EngineRefused):
                    await pool.generate(make_prompt(1), PARAMS)
            await pool.generate(make_prompt(1), PARAMS)

    asyncio.run(asyncio.wait_for(run(), 1))

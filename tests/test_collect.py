"""collect(): bounded, retried where it can help, every outcome accounted for."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from builders import ScriptedEngine, make_completion

from rollout import errors
from rollout.collect import Outcome, collect, make_requests, rollout_seed
from rollout.engines.base import Completion
from rollout.prompts import Prompt
from rollout.sampling import SamplingParams

PARAMS = SamplingParams(temperature=0.5, top_k=4, max_new_tokens=2)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(str(i), np.array([i + 1], np.int32), f"p{i}") for i in range(count)]


def run(engine: Any, num_prompts: int, per_prompt: int = 1, **options: Any) -> list[Outcome]:
    async def gather() -> list[Outcome]:
        requests = make_requests(prompts(num_prompts), per_prompt)
        return [
            outcome async for outcome in collect(engine, requests, PARAMS, pause_s=0, **options)
        ]

    return asyncio.run(gather())


def test_a_completion_becomes_a_rollout() -> None:
    (outcome,) = run(ScriptedEngine(make_completion()), 1)
    rollout = outcome.rollout
    assert rollout is not None
    assert (rollout.rollout_id, rollout.prompt_ids.tolist()) == ("0:0", [1])
    assert (rollout.temperature, rollout.top_k, rollout.attempts) == (0.5, 4, 1)
    assert rollout.loss_mask.tolist() == [1, 1]
    assert rollout.engine_meta == '{"engine":"scripted"}'


@pytest.mark.parametrize(
    "failure",
    [errors.EngineUnreachable("gone"), errors.EngineFailed("503"), errors.GenerationAborted("x")],
    ids=lambda error: error.code,
)
def test_what_can_help_is_tried_again(failure: errors.EngineError) -> None:
    (outcome,) = run(ScriptedEngine(failure, failure, make_completion()), 1, attempts=3)
    assert outcome.rollout is not None
    assert (outcome.attempts, outcome.rollout.attempts) == (3, 3)


def test_a_running_abort_is_tried_again() -> None:
    aborted = make_completion(finish_reason="abort")
    (outcome,) = run(ScriptedEngine(aborted, make_completion()), 1)
    assert outcome.rollout is not None and outcome.rollout.finish_reason == "stop"


def test_the_last_attempt_gives_up_with_its_error() -> None:
    engine = ScriptedEngine(*[errors.EngineFailed("503")] * 3)
    (outcome,) = run(engine, 1, attempts=2)
    assert (type(outcome.error), outcome.attempts) == (errors.EngineFailed, 2)
    assert len(engine.asked) == 2


@pytest.mark.parametrize(
    "failure",
    [
        errors.EngineRefused("400"),
        errors.SamplingMaskMissing("x"),
        errors.LengthMismatch("x"),
        errors.IdOutsideVocabulary("x"),
    ],
    ids=lambda error: error.code,
)
def test_what_cannot_help_is_asked_once(failure: errors.RolloutError) -> None:
    engine = ScriptedEngine(failure)
    (outcome,) = run(engine, 1, attempts=5)
    assert (outcome.error, len(engine.asked)) == (failure, 1)


def test_a_bug_in_an_engine_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        run(ScriptedEngine(ZeroDivisionError("bug")), 1)


def test_every_rollout_has_a_seed_of_its_own() -> None:
    engine = ScriptedEngine(*[make_completion()] * 8)
    outcomes = run(engine, 1, per_prompt=8, seed=5)
    sent = [params.sampling_seed for _, params in engine.asked]
    assert len(set(sent)) == 8
    stored = {o.rollout.rollout_id: o.rollout.seed for o in outcomes if o.rollout}
    assert stored == {f"0:{i}": rollout_seed(5, f"0:{i}") for i in range(8)}
    assert sent[0] == rollout_seed(5, "0:0") != rollout_seed(6, "0:0")


def test_without_a_seed_none_is_sent() -> None:
    engine = ScriptedEngine(make_completion())
    (outcome,) = run(engine, 1, seed=None)
    assert engine.asked[0][1].sampling_seed is None
    assert outcome.rollout is not None and outcome.rollout.seed is None


class CountingEngine(ScriptedEngine):
    """Remembers how many calls were ever in flight."""

    in_flight = most = 0

    async def generate(self, prompt_ids: Any, params: SamplingParams) -> Completion:
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            await asyncio.sleep(0.001 * (prompt_ids[0] % 3))
            return make_completion()
        finally:
            self.in_flight -= 1


def test_concurrency_is_a_bound_that_is_used() -> None:
    engine = CountingEngine()
    outcomes = run(engine, 40, concurrency=7)
    assert engine.most == 7
    assert sorted(o.request.rollout_id for o in outcomes) == sorted(f"{i}:0" for i in range(40))


def test_closing_early_cancels_what_is_in_flight_and_takes_no_more() -> None:
    engine = CountingEngine()
    taken = []

    async def first_only() -> None:
        def source() -> Any:
            for request in make_requests(prompts(1000), 1):
                taken.append(request)
                yield request

        stream = collect(engine, source(), PARAMS, concurrency=3)
        await anext(stream)
        await stream.aclose()

    asyncio.run(first_only())
    assert engine.in_flight == 0
    assert len(taken) <= 6

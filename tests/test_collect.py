"""collect(): bounded, retried where it can help, every outcome accounted for."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from builders import ScriptedEngine, make_completion

from rollout import errors
from rollout.collect import (
    Outcome,
    Request,
    collect,
    collect_outcomes,
    make_requests,
    rollout_seed,
)
from rollout.engines.base import Completion
from rollout.prompts import Prompt
from rollout.record import WeightSpan
from rollout.retry import RetryConfig
from rollout.sampling import SamplingParams

PARAMS = SamplingParams(temperature=0.5, top_k=4, max_new_tokens=2)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(str(i), np.array([i + 1], np.int32), f"p{i}") for i in range(count)]


def retry(attempts: int) -> RetryConfig:
    return RetryConfig(attempts=attempts, first_pause_s=0.0)


def run(engine: Any, num_prompts: int, per_prompt: int = 1, **options: Any) -> list[Outcome]:
    async def gather() -> list[Outcome]:
        requests = make_requests(prompts(num_prompts), per_prompt)
        outcomes = collect_outcomes(engine, requests, PARAMS, **({"retry": retry(3)} | options))
        return [outcome async for outcome in outcomes]

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
    [errors.EngineUnreachable("gone"), errors.EngineBusy("503"), errors.GenerationAborted("x")],
    ids=lambda error: error.code,
)
def test_what_can_help_is_tried_again(failure: errors.EngineError) -> None:
    (outcome,) = run(ScriptedEngine(failure, failure, make_completion()), 1)
    assert outcome.rollout is not None
    assert (outcome.attempts, outcome.rollout.attempts) == (3, 3)


def test_a_running_abort_is_tried_again() -> None:
    aborted = make_completion(finish_reason="abort")
    (outcome,) = run(ScriptedEngine(aborted, make_completion()), 1)
    assert outcome.rollout is not None and outcome.rollout.finish_reason == "stop"


def test_the_last_attempt_gives_up_with_its_error() -> None:
    engine = ScriptedEngine(*[errors.EngineBusy("503")] * 5)
    (outcome,) = run(engine, 1, retry=retry(4))
    assert (type(outcome.error), outcome.attempts) == (errors.EngineBusy, 4)
    assert len(engine.asked) == 4


def test_a_server_error_is_tried_once_more() -> None:
    engine = ScriptedEngine(*[errors.EngineFailed("500")] * 5)
    (outcome,) = run(engine, 1, retry=retry(5))
    assert (type(outcome.error), outcome.attempts) == (errors.EngineFailed, 2)


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
    (outcome,) = run(engine, 1, retry=retry(5))
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

    in_flight = most = calls = 0

    async def generate(self, prompt: Prompt, params: SamplingParams) -> Completion:
        self.in_flight += 1
        self.calls += 1
        self.most = max(self.most, self.in_flight)
        try:
            await asyncio.sleep(0.001 * (prompt.ids[0] % 3))
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

        stream = collect_outcomes(engine, source(), PARAMS, concurrency=3)
        await anext(stream)
        await stream.aclose()

    asyncio.run(first_only())
    assert engine.in_flight == 0
    assert len(taken) <= 10, "three in flight, three waiting, few more"


def test_a_slow_consumer_slows_the_engine_down() -> None:
    engine = CountingEngine()

    async def slow() -> int:
        stream = collect_outcomes(engine, make_requests(prompts(100), 1), PARAMS, concurrency=2)
        await anext(stream)
        await asyncio.sleep(0.1)
        asked = engine.calls
        await stream.aclose()
        return asked

    assert asyncio.run(slow()) <= 6, "two waiting, two that cannot hand over, and the first"


def test_prompts_may_come_from_an_async_source() -> None:
    engine = CountingEngine()

    async def source() -> Any:
        for request in make_requests(prompts(5), 2):
            await asyncio.sleep(0)
            yield request

    async def gather() -> list[str]:
        stream = collect_outcomes(engine, source(), PARAMS, concurrency=3)
        return [outcome.request.rollout_id async for outcome in stream]

    assert sorted(asyncio.run(gather())) == [f"{p}:{i}" for p in range(5) for i in range(2)]


def test_stopping_finishes_what_is_in_flight() -> None:
    engine = CountingEngine()

    async def stopped() -> list[Outcome]:
        stop = asyncio.Event()
        requests = make_requests(prompts(100), 1)
        outcomes = []
        async for outcome in collect_outcomes(engine, requests, PARAMS, concurrency=4, stop=stop):
            outcomes.append(outcome)
            stop.set()
        return outcomes

    outcomes = asyncio.run(stopped())
    assert 4 <= len(outcomes) <= 12
    assert all(outcome.rollout is not None for outcome in outcomes)


def test_stopping_does_not_wait_for_a_pause() -> None:
    engine = ScriptedEngine(*[errors.EngineBusy("503")] * 9)

    async def stopped() -> list[Outcome]:
        stop = asyncio.Event()
        patient = RetryConfig(first_pause_s=1000.0, longest_pause_s=1000.0)
        asyncio.get_running_loop().call_later(0.05, stop.set)
        requests = make_requests(prompts(1), 1)
        outcomes = collect_outcomes(engine, requests, PARAMS, retry=patient, stop=stop)
        return [outcome async for outcome in outcomes]

    assert asyncio.run(asyncio.wait_for(stopped(), 5)) == [], "not done, so the next run asks again"


def test_aborted_attempts_come_with_the_outcome() -> None:
    aborted = make_completion(finish_reason="abort")
    (outcome,) = run(ScriptedEngine(aborted, aborted, make_completion()), 1)
    assert [r.rollout_id for r in outcome.aborted] == ["0:0#abort0", "0:0#abort1"]
    assert outcome.rollout is not None and outcome.rollout.rollout_id == "0:0"


def test_rewards_are_part_of_the_rollout() -> None:
    async def reward(rollout: Any) -> float:
        return float(len(rollout.output_ids))

    (outcome,) = run(ScriptedEngine(make_completion()), 1, reward=reward)
    assert outcome.rollout is not None and outcome.rollout.reward == 2.0


@pytest.mark.parametrize("concurrency", [1, 2, 5, 8, 40], ids=str)
def test_a_slow_consumer_gets_every_outcome(concurrency: int) -> None:
    async def gather() -> list[str]:
        engine = ScriptedEngine(*[make_completion()] * 40)
        requests = make_requests(prompts(40), 1)
        came = []
        async for outcome in collect_outcomes(engine, requests, PARAMS, concurrency=concurrency):
            came.append(outcome.request.rollout_id)
            await asyncio.sleep(0.001)
        return came

    assert sorted(asyncio.run(gather())) == sorted(f"{i}:0" for i in range(40))


class FailingEngine(CountingEngine):
    """Has a bug that shows at the tenth call."""

    async def generate(self, prompt: Prompt, params: SamplingParams) -> Completion:
        completion = await super().generate(prompt, params)
        if self.calls == 10:
            raise ZeroDivisionError("bug")
        return completion


def test_a_bug_ends_a_long_run_and_what_came_before_is_still_handed_over() -> None:
    engine = FailingEngine()
    came: list[Outcome] = []

    async def gather() -> None:
        requests = make_requests(prompts(1000), 1)
        async for outcome in collect_outcomes(engine, requests, PARAMS, concurrency=4):
            came.append(outcome)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(asyncio.wait_for(gather(), 20))
    assert 5 <= len(came) <= engine.calls < 1000
    assert engine.in_flight == 0


def test_cancelling_the_consumer_leaves_no_task_behind() -> None:
    async def cancelled() -> set[str]:
        async def consume() -> None:
            stream = collect_outcomes(
                CountingEngine(), make_requests(prompts(10_000), 1), PARAMS, concurrency=4
            )
            async for _ in stream:
                pass

        consumer = asyncio.create_task(consume())
        await asyncio.sleep(0.05)
        consumer.cancel()
        await asyncio.wait({consumer})
        await asyncio.get_running_loop().shutdown_asyncgens()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        return {repr(task) for task in left}

    assert asyncio.run(cancelled()) == set()


def collected(engine: Any, **options: Any) -> list[str]:
    async def gather() -> list[str]:
        requests = [Request(prompt, 0) for prompt in prompts(2)]
        stream = collect(engine, requests, PARAMS, retry=retry(1), concurrency=1, **options)
        return [rollout.rollout_id async for rollout in stream]

    return asyncio.run(gather())


def test_a_trainer_gets_rollouts_and_never_touches_a_disk() -> None:
    assert collected(ScriptedEngine(make_completion(), make_completion())) == ["0:0", "1:0"]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        pytest.param(errors.EngineRefused("400"), errors.EngineRefused, id="engine error"),
        pytest.param(
            make_completion(output_ids=np.array([4, 2], np.int32)),
            errors.SampledOutsideSupport,
            id="broken rule",
        ),
    ],
)
def test_a_trainer_hears_of_what_is_lost_or_is_stopped_by_it(
    answer: Any, error: type[errors.RolloutError]
) -> None:
    lost: list[Outcome] = []
    assert collected(ScriptedEngine(answer, make_completion()), on_lost=lost.append) == ["1:0"]
    assert [type(outcome.error) for outcome in lost] == [error]
    with pytest.raises(error):
        collected(ScriptedEngine(answer, make_completion()))


def spans(*versions: str) -> Completion:
    """Two output tokens, one span each; without a version it is not known."""
    return make_completion(
        weight_versions=tuple(WeightSpan(v, t, t + 1) for t, v in enumerate(versions))
    )


@pytest.mark.parametrize(
    ("first", "words"),
    [
        pytest.param(spans("v1", "v2"), "with v1 and v2", id="two versions"),
        pytest.param(spans(), "does not tell", id="not known"),
    ],
)
def test_a_rollout_that_the_weights_changed_under_can_be_refused(
    first: Completion, words: str
) -> None:
    kept = ScriptedEngine(first)
    (outcome,) = run(kept, 1)
    assert outcome.rollout is not None and outcome.rollout.weight_versions == first.weight_versions

    (outcome,) = run(ScriptedEngine(first, spans("v2", "v2")), 1, single_weight_version=True)
    assert outcome.rollout is not None and outcome.attempts == 2
    assert outcome.rollout.weight_versions[0].version == "v2"

    (outcome,) = run(ScriptedEngine(*[first] * 2), 1, single_weight_version=True, retry=retry(2))
    assert type(outcome.error) is errors.WeightsMoved
    assert words in str(outcome.error)


def test_a_support_over_the_cap_is_skipped_or_asked_for_with_half_the_top_k() -> None:
    overflow = errors.SupportOverflow("ties")
    (outcome,) = run(ScriptedEngine(overflow), 1)
    assert (outcome.error, outcome.attempts) == (overflow, 1)

    engine = ScriptedEngine(overflow, overflow, make_completion())
    heard: list[errors.RolloutError] = []
    (outcome,) = run(engine, 1, on_overflow="lower_top_k", on_retry=heard.append)
    assert outcome.rollout is not None and outcome.attempts == 3
    asked = [params.top_k for _, params in engine.asked]
    assert asked == [PARAMS.top_k, PARAMS.top_k // 2, PARAMS.top_k // 4]
    assert outcome.rollout.top_k == asked[-1]
    assert json.loads(outcome.rollout.sampling_params)["top_k"] == asked[-1]
    assert heard == [overflow, overflow]


def test_a_server_that_overflows_on_anything_is_given_up_at_one_id() -> None:
    engine = ScriptedEngine(*[errors.SupportOverflow("always")] * 9)
    (outcome,) = run(engine, 1, on_overflow="lower_top_k")
    assert type(outcome.error) is errors.SupportOverflow
    assert [params.top_k for _, params in engine.asked] == [4, 2, 1]

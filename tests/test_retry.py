"""Which errors are tried again, how often, and after which pause."""

from __future__ import annotations

import pytest

from rollout import errors
from rollout.retry import RetryConfig, pause_s

CONFIG = RetryConfig(attempts=4, first_pause_s=1.0, longest_pause_s=3.0, budget_s=100.0)


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        pytest.param(errors.EngineUnreachable("x"), 4, id="no answer"),
        pytest.param(errors.EngineBusy("x"), 4, id="busy"),
        pytest.param(errors.GenerationAborted("x"), 4, id="aborted"),
        pytest.param(errors.EngineFailed("x"), 2, id="server error"),
        pytest.param(errors.EngineRefused("x"), 1, id="refused"),
        pytest.param(errors.SamplingMaskMissing("x"), 1, id="no mask"),
        pytest.param(errors.ReplyMalformed("x"), 4, id="malformed"),
        pytest.param(errors.LengthMismatch("x"), 1, id="broken rule"),
        pytest.param(errors.EngineDown("x"), 1, id="down"),
    ],
)
def test_attempts_by_kind_of_error(error: errors.RolloutError, attempts: int) -> None:
    made = 1
    while pause_s(error, made, made, 0.0, CONFIG) is not None:
        made += 1
    assert made == attempts


@pytest.mark.parametrize(("attempt", "bound"), [(1, 1.0), (2, 2.0), (3, 3.0)], ids=str)
def test_pauses_are_drawn_up_to_a_bound_that_doubles(attempt: int, bound: float) -> None:
    busy = errors.EngineBusy("x")
    pauses = [pause_s(busy, attempt, attempt, 0.0, CONFIG) or 0.0 for _ in range(300)]
    assert max(pauses) <= bound
    assert max(pauses) > 0.8 * bound and min(pauses) < 0.2 * bound


def test_a_server_that_names_a_time_is_not_asked_before() -> None:
    busy = errors.EngineBusy("x")
    busy.retry_after_s = 20.0
    assert pause_s(busy, 1, 1, 0.0, CONFIG) == 20.0
    assert pause_s(busy, 1, 1, 81.0, CONFIG) is None, "over the total budget"


def test_a_server_error_after_other_failures_is_still_tried_once_more() -> None:
    failed = errors.EngineFailed("x")
    assert pause_s(failed, 3, 1, 0.0, CONFIG) is not None
    assert pause_s(failed, 3, 2, 0.0, CONFIG) is None


def test_pauses_have_a_bound_after_thousands_of_attempts() -> None:
    patient = RetryConfig(attempts=5000, first_pause_s=1.0, longest_pause_s=3.0)
    pause = pause_s(errors.EngineBusy("x"), 4000, 4000, 0.0, patient)
    assert pause is not None and pause <= 3.0

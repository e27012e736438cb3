"""A server in trouble: what is asked again, what is stored, what is said, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from builders import make_rollout
from chaos import (
    HANG_UP,
    fake_reply,
    fake_server,
    make_reply,
    queue_abort,
    running,
)
from faults import (
    Asked,
    Script,
    aborted_after_one,
    collect,
    reasons,
    requests_for,
    status,
    stored,
)

from rollout import errors
from rollout.engines import pool as pool_module
from rollout.engines.http import retry_after_s
from rollout.engines.parse_process import INLINE_BYTES
from rollout.files import read_lines
from rollout.rules import check_content
from rollout.schema import ERRORS_FILE, REJECTED_FILE

# Aborts


@pytest.mark.parametrize("keep", [False, True], ids=["dropped", "kept"])
def test_an_aborted_reply_is_asked_for_again_and_kept_beside_on_request(
    tmp_path: Path, keep: bool
) -> None:
    def stopped(asked: Asked) -> Asked:
        reply = fake_reply(asked)
        reply["meta_info"]["finish_reason"] = {"type": "stop", "matched": 2}
        return reply

    script = Script(
        p0=[stopped],
        p1=[aborted_after_one, aborted_after_one],
        p2=[lambda asked: queue_abort(), lambda asked: queue_abort([4])],
    )
    with running(fake_server(script)) as server:
        progress = collect(tmp_path, server.url, 4, keep_aborted=keep)
    rollouts = stored(tmp_path)
    kept = {"1:0#abort0", "1:0#abort1"} if keep else set()
    assert rollouts.keys() == {"0:0", "1:0", "2:0", "3:0"} | kept
    assert (progress.done, progress.lost, progress.retried) == (4, 0, {"aborted": 4})
    assert {i: r.finish_reason for i, r in rollouts.items()} == {
        "0:0": "stop",
        "1:0": "length",
        "2:0": "length",
        "3:0": "length",
    } | dict.fromkeys(kept, "abort")
    assert [rollouts[i].attempts for i in ("0:0", "1:0", "2:0", "3:0")] == [1, 3, 3, 1]
    assert all(rollouts[i].num_output_tokens == 1 for i in kept)


def test_what_is_always_aborted_fails_and_does_not_count_as_done(tmp_path: Path) -> None:
    settings = {"keep_aborted": True, "retry": {"attempts": 2, "first_pause_s": 0.0}}
    with running(fake_server(aborted_after_one)) as server:
        assert collect(tmp_path, server.url, 1, **settings).failed == 1
        assert collect(tmp_path, server.url, 1, **settings).failed == 1, "asked for once more"
    assert stored(tmp_path).keys() == {f"0:0#abort{n}" for n in range(4)}
    assert reasons(tmp_path, ERRORS_FILE) == {"0:0": "aborted"}


# Retries


def test_refused_once_busy_as_told_and_hung_up_are_told_apart(tmp_path: Path) -> None:
    busy = status(503, "The request queue is full.", Retry_After="1")
    script = Script(
        p0=[status(403, "forbidden here")] * 9, p1=[busy, busy], p2=[lambda asked: HANG_UP]
    )
    with running(fake_server(script)) as server:
        progress = collect(tmp_path, server.url, 3)
    assert len(requests_for(server, 0)) == 1
    (line,) = read_lines(tmp_path / ERRORS_FILE)
    assert (line["rollout_id"], line["reason"]) == ("0:0", "engine_refused")
    assert "HTTP 403: forbidden here" in line["message"]
    times = requests_for(server, 1)
    assert len(times) == 3 and min(np.diff(times)) >= 1.0
    assert len(requests_for(server, 2)) == 2, "the reply was lost, so it is asked for again"
    assert stored(tmp_path).keys() == {"1:0", "2:0"}
    assert progress.retried == {"engine_busy": 2, "engine_unreachable": 1}


@pytest.mark.parametrize(
    ("answer", "asked", "reason"),
    [
        pytest.param(status(400), 1, "engine_refused", id="400"),
        pytest.param(status(401), 1, "engine_refused", id="401"),
        pytest.param(status(404), 1, "engine_refused", id="404"),
        pytest.param(status(422), 1, "engine_refused", id="422"),
        pytest.param(status(429), 4, "engine_busy", id="429"),
        pytest.param(status(500), 2, "engine_failed", id="500"),
        pytest.param(status(502), 4, "engine_busy", id="502"),
        pytest.param(status(504), 4, "engine_busy", id="504"),
        pytest.param(status(200, "<html>log in"), 4, "reply_malformed", id="a page"),
        pytest.param(lambda asked: HANG_UP, 4, "engine_unreachable", id="hung up"),
    ],
)
def test_how_often_a_reply_is_asked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[Asked], Any],
    asked: int,
    reason: str,
) -> None:
    monkeypatch.setattr(pool_module, "FIRST_REST_S", 0.01)
    with running(fake_server(answer)) as server:
        progress = collect(tmp_path, server.url, 1)
    assert len(server.requests) == asked
    assert reasons(tmp_path, ERRORS_FILE) == {"0:0": reason}
    assert sum(progress.retried.values()) == asked - 1


def test_a_server_error_behind_two_busy_replies_has_its_own_second_try(tmp_path: Path) -> None:
    script = Script(p0=[status(503), status(503), status(500)])
    with running(fake_server(script)) as server:
        assert collect(tmp_path, server.url, 1).done == 1
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        pytest.param(None, 0.0, id="none"),
        pytest.param("7", 7.0, id="seconds"),
        pytest.param("soon", 0.0, id="neither"),
        pytest.param("²", 0.0, id="a digit that is no number"),
        pytest.param("Sun, 06 Nov 1994 08:49:37 GMT", 0.0, id="a date that is over"),
        pytest.param("Sun, 06 Nov 1994 08:49:37 +99999999999999", 0.0, id="no time zone"),
    ],
)
def test_retry_after_in_every_form(header: str | None, seconds: float) -> None:
    assert retry_after_s(header) == seconds


def test_a_date_in_retry_after_is_waited_for(tmp_path: Path) -> None:
    def busy(asked: Asked) -> web.Response:
        until = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
        return status(503, Retry_After=until)(asked)

    with running(fake_server(Script(p0=[busy]))) as server:
        assert collect(tmp_path, server.url, 1).done == 1
    first, second = requests_for(server, 0)
    assert second - first > 0.9, "a date has no fractions of a second"


def test_an_outage_costs_a_rollout_no_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three seconds without a server: four rollouts arrive that may fail three times each, though
    the endpoint was tried more often."""
    monkeypatch.setattr(pool_module, "FIRST_REST_S", 0.1)
    monkeypatch.setattr(pool_module, "LONGEST_REST_S", 0.1)
    back_at = time.monotonic() + 3.0

    def answer(asked: Asked) -> Any:
        return HANG_UP if time.monotonic() < back_at else fake_reply(asked)

    with running(fake_server(answer)) as server:
        progress = collect(tmp_path, server.url, 4)
    assert (progress.done, progress.lost) == (4, 0)
    failed = sum(progress.retried.values())
    assert 4 * 3 < failed <= 4 * 3 + 31, "more than attempts allow, and one at a time"


def test_a_restart_that_breaks_many_at_once_is_one_failure_of_the_endpoint(tmp_path: Path) -> None:
    """Forty connections are lost together; the rest after that is the first, not the longest."""
    numbers, start = count(), time.monotonic()

    def answer(asked: Asked) -> Any:
        return HANG_UP if next(numbers) < 40 else fake_reply(asked)

    with running(fake_server(answer)) as server:
        assert collect(tmp_path, server.url, 40).done == 40
    assert len(server.requests) == 80
    assert time.monotonic() - start < 10.0


def test_an_endpoint_that_answers_nonsense_at_once_does_not_draw_everything(tmp_path: Path) -> None:
    async def slow(asked: Asked) -> Asked:
        await asyncio.sleep(0.02)
        return fake_reply(asked)

    with (
        running(fake_server(slow)) as good,
        running(fake_server(status(200, "<html>log in"))) as nonsense,
    ):
        progress = collect(tmp_path, [good.url, nonsense.url], 100, concurrency=8)
    assert (progress.done, progress.lost) == (100, 0)
    assert 3 <= len(nonsense.requests) <= 20
    assert progress.retried == {"reply_malformed": len(nonsense.requests)}


# What a reply may not hold


def reply_with(logprobs: list[Any]) -> Callable[[Asked], bytes]:
    def answer(asked: Asked) -> bytes:
        mask = [[7 + t, 600 + t] for t in range(len(logprobs))]
        reply = make_reply(asked, [row[0] for row in mask], mask, logprobs)
        return json.dumps(reply).encode()

    return answer


@pytest.mark.parametrize(
    ("logprobs", "reason"),
    [
        pytest.param([-0.1, None], "nonfinite_logprob", id="null"),
        pytest.param([-0.1, float("nan")], "nonfinite_logprob", id="NaN"),
        pytest.param([-0.1, float("-inf")], "nonfinite_logprob", id="-Infinity"),
        pytest.param([-0.1, 0.3], "positive_logprob", id="positive"),
        pytest.param([-0.1, -9999.0], "sentinel_logprob", id="sentinel"),
        pytest.param([-0.0, -1e-9], None, id="-0.0 and -1e-9"),
        pytest.param([-0.1, 1e-6], None, id="rounding above zero"),
    ],
)
def test_a_logprob_that_is_none_is_rejected_with_its_reason(
    tmp_path: Path, logprobs: list[Any], reason: str | None
) -> None:
    answer = reply_with(logprobs)
    with running(fake_server(answer)) as server:
        progress = collect(tmp_path, server.url, 1)
    assert len(server.requests) == 1, "asking again would hide it"
    if reason is None:
        assert progress.done == 1
        return
    (line,) = read_lines(tmp_path / REJECTED_FILE)
    assert (line["rollout_id"], line["reason"]) == ("0:0", reason)
    assert line["body"].encode() == answer(server.requests[0]), "the reply as it came"
    assert stored(tmp_path) == {} and progress.rejected == 1


def test_a_sentinel_in_the_full_logprobs_counts_where_a_token_was_sampled() -> None:
    with pytest.raises(errors.SentinelLogprob, match="full_logprobs holds -9999"):
        check_content(make_rollout(full_logprobs=np.array([-9999, 0, -0.1], np.float32)))
    check_content(make_rollout(full_logprobs=np.array([-1.6, -9999, -0.1], np.float32)))


@pytest.mark.parametrize(
    "padding", [0, INLINE_BYTES], ids=["decoded here", "decoded in the other process"]
)
def test_half_a_character_spoils_neither_its_rollout_nor_the_others(
    tmp_path: Path, padding: int
) -> None:
    texts = {17: "ok \ud83d" + "." * padding, 18: "\ud83d\ude00 \\ud83d is fine"}

    def answer(asked: Asked) -> Asked:
        reply = fake_reply(asked)
        return reply | {"text": texts.get(asked["input_ids"][0], "plain")}

    with running(fake_server(answer)) as server:
        progress = collect(tmp_path, server.url, 100)
        wanted = {r["input_ids"][0]: fake_reply(r)["output_ids"] for r in server.requests}
    rollouts = stored(tmp_path)
    assert (progress.done, len(rollouts)) == (100, 100)
    assert all(r.output_ids.tolist() == wanted[int(r.prompt_id)] for r in rollouts.values())
    assert rollouts["17:0"].output_text == "ok \\ud83d" + "." * padding
    assert json.loads(rollouts["17:0"].extra) == {"escaped": ["output_text"]}
    assert rollouts["18:0"].output_text == "\U0001f600 \\ud83d is fine"
    assert rollouts["18:0"].extra == "{}"

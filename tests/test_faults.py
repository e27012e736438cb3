"""A server in trouble: what is asked again, what is stored, what is said, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from builders import make_rollout, write_lines
from chaos import (
    HANG_UP,
    VOCAB_SIZE,
    FakeServer,
    fake_reply,
    fake_server,
    make_reply,
    queue_abort,
    running,
    running_abort,
)
from test_cli import run

from rollout import errors
from rollout.collect import Request
from rollout.config import CollectConfig
from rollout.engines import pool as pool_module
from rollout.engines.parse_process import INLINE_BYTES, ParseProcess
from rollout.engines.sglang import SGLangEngine
from rollout.engines.sglang_http import retry_after_s
from rollout.files import read_lines
from rollout.job import Progress, collect_into, make_engine
from rollout.prompts import Prompt
from rollout.reader import open_run
from rollout.record import Rollout
from rollout.rewards import load_reward
from rollout.rules import check_content
from rollout.sampling import SamplingParams
from rollout.schema import ERRORS_FILE, REJECTED_FILE
from rollout.writer import RunWriter

Asked = dict[str, Any]
LOG = logging.getLogger(__name__)
"""Numbers, shown with --log-cli-level=info."""


def config_for(url: str | list[str], **settings: Any) -> CollectConfig:
    plain = {
        "model": "none",
        "prompts": {"dataset": "none"},
        "sampling": {"top_k": 40, "max_new_tokens": 6},
        "engine": {"kind": "sglang", "url": url},
        "retry": {"attempts": 4, "first_pause_s": 0.0},
        "error_budget": 1000,
    }
    return CollectConfig.model_validate(plain | settings)


def collect(folder: Path, url: str | list[str], num_prompts: int, **settings: Any) -> Progress:
    """One rollout each for the prompts [0, 5], [1, 5], … into `folder`."""
    config = config_for(url, **settings)
    prompts = [Prompt(str(i), np.array([i, 5], np.int32), "") for i in range(num_prompts)]

    async def gather() -> Progress:
        async with make_engine(config, VOCAB_SIZE) as engine:
            with RunWriter(folder, {}, vocab_size=VOCAB_SIZE) as writer:
                return await collect_into(writer, engine, [Request(p, 0) for p in prompts], config)

    return asyncio.run(gather())


def stored(folder: Path) -> dict[str, Rollout]:
    rollouts = list(open_run(folder))
    assert len({r.rollout_id for r in rollouts}) == len(rollouts)
    return {rollout.rollout_id: rollout for rollout in rollouts}


def reasons(folder: Path, name: str) -> dict[str, str]:
    return {line["rollout_id"]: line["reason"] for line in read_lines(folder / name)}


def requests_for(server: FakeServer, prompt: int) -> list[float]:
    """When the requests for a prompt came."""
    pairs = zip(server.requests, server.times, strict=True)
    return [at for request, at in pairs if request["input_ids"][0] == prompt]


class Script:
    """Answers by prompt, one after another; the usual one where the script has no more."""

    def __init__(self, **answers: list[Callable[[Asked], Any]]) -> None:
        self.answers = {int(name.removeprefix("p")): iter(a) for name, a in answers.items()}

    def __call__(self, asked: Asked) -> Any:
        return next(self.answers.get(asked["input_ids"][0], iter([])), fake_reply)(asked)


def status(code: int, words: str = "no", **headers: str) -> Callable[[Asked], web.Response]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda asked: web.Response(status=code, text=words, headers=named)


def aborted_after_one(asked: Asked) -> Asked:
    return running_abort(fake_reply(asked), 1)


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


# Timeouts and sizes


def test_a_stalled_server_is_given_up_after_the_time_that_the_tokens_take() -> None:
    async def ask(url: str) -> float:
        async with SGLangEngine(
            url, vocab_size=9, queue_timeout_s=0.3, slowest_tokens_per_s=10.0
        ) as engine:
            start = time.monotonic()
            with pytest.raises(errors.EngineUnreachable, match="no answer in 1 s"):
                await engine.generate(np.array([1]), SamplingParams(top_k=5, max_new_tokens=7))
            return time.monotonic() - start

    with running(fake_server(lambda asked: asyncio.sleep(60))) as server:
        assert 0.9 <= asyncio.run(ask(server.url)) < 3.0


def large_reply(asked: Asked, num_tokens: int, size: int, *, support_mode: bool) -> bytes:
    rng = np.random.default_rng(3)
    mask = np.argsort(rng.random((num_tokens, VOCAB_SIZE), np.float32))[:, :size]
    weights = rng.random((num_tokens, size)) + 1e-3
    logprobs = np.log(weights / weights.sum(1, keepdims=True)).astype(np.float32)
    return msgspec.json.encode(
        make_reply(
            asked,
            output_ids=mask[:, 0].tolist(),
            mask=mask.tolist(),
            logprobs=logprobs.tolist() if support_mode else logprobs[:, 0].tolist(),
        )
    )


def test_a_reply_of_five_megabytes(tmp_path: Path) -> None:
    body = large_reply({"input_ids": [0, 5]}, 512, 500, support_mode=True)
    assert len(body) > 5e6
    with running(fake_server(lambda asked: body)) as server:
        assert collect(tmp_path, server.url, 1).done == 1
    assert len(stored(tmp_path)["0:0"].support.ids) == 512 * 500


def test_a_reply_whose_decoder_died_is_asked_for_again_and_gets_a_new_one() -> None:
    body = large_reply({"input_ids": [1]}, 512, 500, support_mode=True)

    async def decode() -> None:
        parser = ParseProcess()
        await parser.parse(200, body, [1])
        asking = asyncio.create_task(parser.parse(200, body, [1]))
        await asyncio.sleep(0)
        assert parser._worker is not None
        parser._worker.kill()
        with pytest.raises(errors.ReplyMalformed, match="the process that decodes replies ended"):
            await asking
        assert len((await parser.parse(200, body, [1])).output_ids) == 512
        await parser.close()

    asyncio.run(decode())


@pytest.mark.stress
def test_sixteen_replies_of_thirty_megabytes_do_not_hold_up_the_loop(tmp_path: Path) -> None:
    body = large_reply({"input_ids": [0, 5]}, 4096, 300, support_mode=True)
    assert 25e6 < len(body) < 40e6
    config = config_for("none", sampling={"top_k": 500, "max_new_tokens": 4096})
    wanted = [Request(Prompt(str(i), np.array([i, 5], np.int32), ""), 0) for i in range(16)]
    late_s: list[float] = []

    async def tick() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.02)
            late_s.append(time.monotonic() - before - 0.02)

    async def gather(url: str) -> Progress:
        async with SGLangEngine(url, vocab_size=VOCAB_SIZE) as engine:
            ticker = asyncio.create_task(tick())
            with RunWriter(tmp_path, {}, vocab_size=VOCAB_SIZE) as writer:
                progress = await collect_into(writer, engine, wanted, config)
                ticker.cancel()
            return progress

    start = time.monotonic()
    with running(fake_server(lambda asked: body)) as server:
        assert asyncio.run(gather(server.url)).done == 16
    p95, most = np.percentile(late_s, 95), max(late_s)
    LOG.info("%.0f MB each, %.1f s", len(body) / 1e6, time.monotonic() - start)
    LOG.info("tick late by p50 %.3f s, p95 %.3f s, max %.3f s", np.median(late_s), p95, most)
    assert p95 < 0.1 and most < 0.5


MEASURED = """
import atexit, re, resource, sys
from cli.main import cli

def report():
    with open("/proc/self/status") as status:
        own = int(re.search(r"VmHWM:\\s+(\\d+)", status.read())[1])
    print(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)

atexit.register(report)
cli()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_a_long_rollout_with_wide_supports_fits_into_memory_and_onto_the_disk(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    """8,192 tokens with 512 ids each in one reply."""
    body = large_reply({"input_ids": [0]}, 8192, 512, support_mode=False)

    def answer(asked: Asked) -> bytes:
        tokens = f'"prompt_tokens":{len(asked["input_ids"])}'.encode()
        return body.replace(b'"prompt_tokens":1', tokens)

    out = tmp_path / "run"
    with running(fake_server(answer)) as server:
        settings = settings_file(tmp_path, tiny_model_path, server.url, 1)
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, "collect", settings, "--out", out, "--json"],
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    own_kb, worker_kb = map(int, done.stderr.split()[-2:])
    per_token = json.loads(done.stdout)["bytes_per_token"]
    LOG.info("%.0f MB: peak %d + %d kB", len(body) / 1e6, own_kb, worker_kb)
    LOG.info("%.0f bytes/token", per_token)
    assert own_kb + worker_kb < 2 * 2**20
    assert per_token <= 2200


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


# Through the command


def settings_file(folder: Path, model: Path, url: str, num_prompts: int, **settings: Any) -> Path:
    """A config (JSON is YAML) for `num_prompts` prompts, each with the column `answer`."""
    rows = [{"prompt": f"The {n} statement", "answer": n} for n in range(num_prompts)]
    dataset = write_lines(folder / "p.jsonl", rows)
    plain = {
        "model": str(model),
        "prompts": {"dataset": str(dataset), "format": "text", "keep": ["answer"]},
        "sampling": {"top_k": 600, "max_new_tokens": 6},
        "engine": {"kind": "sglang", "url": url},
        "retry": {"first_pause_s": 0.01},
    }
    path = folder / "c.yaml"
    path.write_text(json.dumps(plain | settings))
    return path


@pytest.fixture
def one_refused() -> Iterator[FakeServer]:
    """Refuses the third prompt that it sees, however often it comes."""
    seen: dict[str, int] = {}

    def answer(asked: Asked) -> Any:
        number = seen.setdefault(str(asked["input_ids"]), len(seen))
        return status(400, "mask too large")(asked) if number == 2 else fake_reply(asked)

    with running(fake_server(answer)) as server:
        yield server


@pytest.mark.parametrize(
    ("budget", "code"),
    [
        pytest.param("0", 5, id="a count that is too small"),
        pytest.param("1", 0, id="a count"),
        pytest.param("0.05", 5, id="a share that is too small"),
        pytest.param("0.2", 0, id="a share"),
    ],
)
def test_exit_code_follows_the_error_budget(
    tmp_path: Path, tiny_model_path: Path, one_refused: FakeServer, budget: str, code: int
) -> None:
    settings = settings_file(tmp_path, tiny_model_path, one_refused.url, 10)
    out = tmp_path / "run"
    options = ("-o", f"error_budget={budget}", "-o", "concurrency=1")
    result = run("collect", settings, "--out", out, *options, "--json")
    assert result.exit_code == code, result.output
    if code:
        assert result.stdout == "" and "over the error budget" in result.stderr
        assert len(stored(out)) == 2, "it stops, and keeps what came"
        assert "mask too large" in (out / "errors.jsonl").read_text()
    else:
        stats = json.loads(result.stdout)
        assert (stats["rollouts"], stats["failed"]) == (9, {"engine_refused": 1})
        assert stats["complete"]


def test_nothing_at_all_is_no_success(tmp_path: Path, tiny_model_path: Path) -> None:
    with running(fake_server(status(400))) as server:
        settings = settings_file(tmp_path, tiny_model_path, server.url, 3)
        result = run("collect", settings, "--out", tmp_path / "run", "-o", "error_budget=3")
    assert result.exit_code == 3
    assert "ended without a rollout" in result.stderr


def test_a_server_that_goes_away_for_good_exits_4_and_keeps_what_came(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    numbers = count()

    def answer(asked: Asked) -> Any:
        return fake_reply(asked) if next(numbers) < 5 else HANG_UP

    with running(fake_server(answer)) as server:
        settings = settings_file(tmp_path, tiny_model_path, server.url, 20)
        options = ("-o", "engine.down_after_s=1.5", "-o", "error_budget=0")
        result = run("collect", settings, "--out", tmp_path / "run", *options)
    assert result.exit_code == 4, result.output
    assert "no endpoint has answered for" in result.stderr
    assert len(stored(tmp_path / "run")) == 5


def test_retries_are_shown_with_their_causes(tmp_path: Path, tiny_model_path: Path) -> None:
    numbers = count()

    def answer(asked: Asked) -> Any:
        return status(503)(asked) if next(numbers) in (1, 2) else fake_reply(asked)

    with running(fake_server(answer)) as server:
        settings = settings_file(tmp_path, tiny_model_path, server.url, 6)
        result = run("collect", settings, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["retried", "(this", "session)", "2", "engine_busy"] in lines
    stats = json.loads((tmp_path / "run" / "stats.json").read_text())
    assert stats["session"]["retried"] == {"engine_busy": 2}


def test_fifty_rollouts_in_a_batch_job(tmp_path: Path, tiny_model_path: Path) -> None:
    with running(fake_server()) as server:
        settings = settings_file(tmp_path, tiny_model_path, server.url, 50)
        command = [sys.executable, "-c", "from cli.main import cli; cli()", "collect", settings]
        with open(tmp_path / "log", "wb") as log:
            done = subprocess.run(
                [*command, "--out", tmp_path / "run", "--json"], stdout=subprocess.PIPE, stderr=log
            )
    log_text = (tmp_path / "log").read_bytes()
    assert done.returncode == 0, log_text
    assert json.loads(done.stdout)["rollouts"] == 50
    assert b"\r" not in log_text and b"\x1b" not in log_text
    lines = [line for line in log_text.splitlines() if line.startswith(b"collect ")]
    assert 1 <= len(lines) <= 20
    assert lines[-1].startswith(b"collect 50/50 rollouts")


def test_a_server_that_answers_alike_is_noticed(tmp_path: Path, tiny_model_path: Path) -> None:
    def alike(asked: Asked) -> Asked:
        params = asked["sampling_params"] | {"sampling_seed": 0}
        return fake_reply(asked | {"sampling_params": params})

    with running(fake_server(alike)) as server:
        settings = settings_file(tmp_path, tiny_model_path, server.url, 1)
        override = ("-o", "prompts.rollouts_per_prompt=8")
        result = run("collect", settings, "--out", tmp_path / "run", "--json", *override)
    assert result.exit_code == 0, result.output
    stats = json.loads(result.stdout)
    assert (stats["rollouts"], stats["duplicate_groups"]) == (8, 1)
    assert "1 prompts have only identical rollouts" in result.stderr
    assert len({r["sampling_params"]["sampling_seed"] for r in server.requests}) == 8


# Rewards


REWARDS = """
import json

def of_answer(rollout):
    return json.loads(rollout.extra)["answer"] + 0.5 if rollout.prompt_id != "2" else None

async def length(rollout):
    return len(rollout.output_ids)

def words(rollout):
    return "good"

def nan(rollout):
    return float("nan")

TABLE = {}
"""


@pytest.fixture
def reward_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current directory; a name of its own, as modules are imported once."""
    name = f"rewards_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    return name


@pytest.mark.parametrize(
    ("path", "words"),
    [
        pytest.param("math", "must look like module:function", id="no colon"),
        pytest.param(":f", "must look like module:function", id="no module"),
        pytest.param("math:", "must look like module:function", id="no function"),
        pytest.param("not_a_module_here:f", "'not_a_module_here' cannot be imported", id="module"),
        pytest.param("math:nothing", "'math' has no 'nothing'", id="function"),
        pytest.param("math:pi", "math:pi is float, must be a function", id="not callable"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_a_config_error(path: str, words: str) -> None:
    with pytest.raises(errors.ConfigError, match=words):
        load_reward(path)


@pytest.mark.parametrize(
    ("function", "rewards"),
    [
        pytest.param("of_answer", {"0:0": 0.5, "1:0": 1.5, "2:0": None}, id="plain"),
        pytest.param("length", {"0:0": 6.0, "1:0": 6.0, "2:0": 6.0}, id="async"),
    ],
)
def test_a_function_of_the_user_scores_what_is_collected(
    tmp_path: Path,
    tiny_model_path: Path,
    reward_module: str,
    function: str,
    rewards: dict[str, float | None],
) -> None:
    def six_tokens(asked: Asked) -> Asked:
        return make_reply(asked, [7] * 6, [[7]] * 6, [[0.0]] * 6)

    with running(fake_server(six_tokens)) as server:
        settings = settings_file(
            tmp_path, tiny_model_path, server.url, 3, reward=f"{reward_module}:{function}"
        )
        result = run("collect", settings, "--out", tmp_path / "run", "--json")
    assert result.exit_code == 0, result.output
    rollouts = stored(tmp_path / "run")
    assert {i: r.reward for i, r in rollouts.items()} == rewards
    assert {i: json.loads(r.extra) for i, r in rollouts.items()} == {
        f"{n}:0": {"answer": n} for n in range(3)
    }
    given = [value for value in rewards.values() if value is not None]
    assert json.loads(result.stdout)["reward"] == {
        "count": len(given),
        "mean": pytest.approx(np.mean(given)),
    }


@pytest.mark.parametrize("function", ["words", "nan"])
def test_a_reward_that_is_no_number_stops_the_run_and_says_which(
    tmp_path: Path, tiny_model_path: Path, reward_module: str, function: str
) -> None:
    with running(fake_server()) as server:
        settings = settings_file(
            tmp_path, tiny_model_path, server.url, 1, reward=f"{reward_module}:{function}"
        )
        result = run("collect", settings, "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert f"{reward_module}:{function}: for 0:0 it returned" in result.stderr


def test_a_missing_reward_leaves_no_directory(tmp_path: Path, tiny_model_path: Path) -> None:
    settings = settings_file(tmp_path, tiny_model_path, "http://127.0.0.1:9", 1, reward="math:no")
    result = run("collect", settings, "--out", tmp_path / "run")
    assert (result.exit_code, (tmp_path / "run").exists()) == (2, False)

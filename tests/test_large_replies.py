"""Stalled servers, dead decoders, and replies of many megabytes, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from builders import make_prompt
from chaos import (
    VOCAB_SIZE,
    fake_server,
    make_reply,
    running,
)
from faults import (
    LOG,
    Asked,
    collect,
    config_for,
    settings_file,
    stored,
)

from rollout import errors
from rollout.collect import Request
from rollout.engines.parse_process import ParseProcess
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.reply import parse_reply
from rollout.job import collect_into
from rollout.keeper import Progress
from rollout.prompts import Prompt
from rollout.sampling import SamplingParams
from rollout.writer import RunWriter


def test_a_stalled_server_is_given_up_after_the_time_that_the_tokens_take() -> None:
    async def ask(url: str) -> float:
        async with SGLangEngine(
            url, vocab_size=9, queue_timeout_s=0.3, slowest_tokens_per_s=10.0
        ) as engine:
            start = time.monotonic()
            with pytest.raises(errors.EngineUnreachable, match="no answer in 1 s"):
                await engine.generate(make_prompt(1), SamplingParams(top_k=5, max_new_tokens=7))
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

    parse = partial(parse_reply, prompt_ids=[1])

    async def decode() -> None:
        parser = ParseProcess()
        await parser.parse(parse, 200, body)
        asking = asyncio.create_task(parser.parse(parse, 200, body))
        await asyncio.sleep(0)
        assert parser._worker is not None
        parser._worker.kill()
        with pytest.raises(errors.ReplyMalformed, match="the process that decodes replies ended"):
            await asking
        assert len((await parser.parse(parse, 200, body)).output_ids) == 512
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


@pytest.mark.stress
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

"""How fast replies become committed shards: tokens/s, event loop lag, bytes per token, memory.

    python benchmarks/collect.py [--tokens 1000000] [--concurrency 64] [--compression zstd]

A local server in a process of its own answers with prepared replies whose supports have the sizes
that were measured in the field (46 % singletons, mean 8, p99 82, cap 512). Everything behind the
socket is what `rollout collect` runs. JSON on stdout, one object per mode.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from rollout.collect import Request
from rollout.config import CollectConfig
from rollout.engines.sglang.engine import SGLangEngine
from rollout.job import collect_into
from rollout.keeper import Progress
from rollout.prompts import Prompt
from rollout.writer import RunWriter

VOCAB_SIZE = 151_936
PROMPT = list(range(100, 150))
REPLIES = 96  # more than the 64 rows of a batch, or compression would find repetitions
TICK_S = 0.005


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--reply-tokens", type=int, default=1024, help="output tokens of a reply")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--compression", choices=["none", "zstd", "lz4"], default="none")
    parser.add_argument("--modes", nargs="+", default=["selected", "support"])
    options = parser.parse_args()
    for mode in options.modes:
        print(json.dumps(measure(mode, options), indent=2))


def measure(mode: str, options: argparse.Namespace) -> dict[str, Any]:
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=serve, args=(theirs, mode, options.reply_tokens), daemon=True
    )
    server.start()
    port = ours.recv()
    try:
        with tempfile.TemporaryDirectory() as folder:
            return asyncio.run(collect(f"http://127.0.0.1:{port}", Path(folder), mode, options))
    finally:
        server.terminate()
        server.join()


async def collect(url: str, folder: Path, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    config = CollectConfig.model_validate(
        {
            "model": "none",
            "prompts": {"dataset": "none"},
            "sampling": {"top_k": 512, "max_new_tokens": options.reply_tokens},
            "engine": {"kind": "sglang", "url": url},
            "shards": {"compression": options.compression},
            "concurrency": options.concurrency,
        }
    )
    prompt = np.array(PROMPT, np.int32)
    count = options.tokens // options.reply_tokens
    wanted = [Request(Prompt(str(i), prompt, ""), 0) for i in range(count)]
    lags: list[float] = []
    memory: list[float] = []

    def on_progress(progress: Progress) -> None:
        if progress.done % max(1, count // 20) == 0:
            memory.append(resident_mb())

    async with SGLangEngine(url, vocab_size=VOCAB_SIZE) as engine:
        ticker = asyncio.create_task(tick(lags))
        start = time.monotonic()
        with RunWriter(folder, {}, shards=config.shards, vocab_size=VOCAB_SIZE) as writer:
            progress = await collect_into(writer, engine, wanted, config, on_progress=on_progress)
        elapsed_s = time.monotonic() - start
        ticker.cancel()
    assert progress.done == count, f"{progress} of {count}"
    size = sum(path.stat().st_size for path in folder.glob("*.arrow"))
    half = memory[len(memory) // 2 :]
    return {
        "mode": mode,
        "compression": options.compression,
        "tokens": progress.output_tokens,
        "tokens_per_s": round(progress.output_tokens / elapsed_s),
        "loop_lag_ms": {
            f"p{q}": round(1000 * float(np.percentile(lags, q)), 1) for q in (50, 95, 100)
        },
        "bytes_per_token": round(size / progress.output_tokens, 1),
        "resident_mb": {"first": memory[0], "last": memory[-1], "spread": max(half) - min(half)},
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


async def tick(lags: list[float]) -> None:
    """How much later than asked for the event loop comes back."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(TICK_S)
        lags.append(time.monotonic() - before - TICK_S)


def resident_mb() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 2**20


def serve(parent: Connection, mode: str, reply_tokens: int) -> None:
    """A server that answers /generate with prepared bytes."""
    replies = cycle([msgspec.json.encode(reply) for reply in make_replies(mode, reply_tokens)])

    async def generate(request: web.Request) -> web.Response:
        asked = await request.read()
        probe = b'"max_new_tokens":1,' in asked
        body = probe_reply() if probe else next(replies)
        return web.Response(body=body, content_type="application/json")

    async def describe(request: web.Request) -> web.Response:
        return web.json_response({"version": "0.5.23", "sampling_backend": "flashinfer"})

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/generate", generate)
        app.router.add_get("/server_info", describe)
        app.router.add_get("/model_info", describe)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        parent.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


def make_replies(mode: str, reply_tokens: int) -> Iterator[dict[str, Any]]:
    generator = np.random.default_rng(0)
    for _ in range(REPLIES):
        masks, logprobs = [], []
        for size in support_sizes(generator, reply_tokens):
            p = -np.sort(-generator.dirichlet(np.full(size, 0.5))) if size > 1 else np.ones(1)
            p = np.maximum(p, 1e-12) / np.maximum(p, 1e-12).sum()
            masks.append(generator.choice(VOCAB_SIZE, size, replace=False).tolist())
            logprobs.append(np.log(p).astype(np.float32).astype(float).tolist())
        selected = [row[0] for row in logprobs]
        yield reply(
            [mask[0] for mask in masks],
            masks,
            logprobs if mode == "support" else selected,
            selected,
        )


def support_sizes(generator: np.random.Generator, count: int) -> np.ndarray:
    """46 % singletons; the rest log-normal, so that the mean is 8 and p99 82; cap 512."""
    rest = 2 + generator.lognormal(1.62, 1.36, count).astype(int)
    return np.where(generator.random(count) < 0.465, 1, np.minimum(rest, 512))


def reply(output: list[int], masks: Any, sampling: Any, selected: list[float]) -> dict[str, Any]:
    return {
        "output_ids": output,
        "meta_info": {
            "finish_reason": {"type": "length", "length": len(output)},
            "prompt_tokens": len(PROMPT),
            "completion_tokens": len(output),
            "weight_versions": [{"version": "default", "start": 0, "end": len(output)}],
            "output_token_logprobs": [
                [lp - 0.125, y, None] for lp, y in zip(selected, output, strict=True)
            ],
            "output_token_sampling_mask": masks,
            "output_token_sampling_logprobs": sampling,
            "output_token_sampling_mask_length": len(output),
        },
    }


def probe_reply() -> bytes:
    answer = reply([7], [[7]], [0.0], [0.0])
    answer["meta_info"]["prompt_tokens"] = 1
    return msgspec.json.encode(answer)


if __name__ == "__main__":
    main()

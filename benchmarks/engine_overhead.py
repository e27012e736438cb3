"""What it costs a real SGLang server, and its client, to record supports.

    python benchmarks/engine_overhead.py --url http://127.0.0.1:30000 --model PATH [--minutes 1.5]
    python benchmarks/engine_overhead.py --markdown runs/engine_overhead/engine_overhead.json

Needs SGLang 0.5.21 or newer, a server that nobody else uses, and the folder of the model that it
serves. Every arm asks for the same tokens with the same sampling: without logprobs; with the
logprobs that every trainer asks for; with a mask, in both modes; and through the collector into a
run directory. Arms take turns in an order that changes, and each is held against the plain one of
its own repetition. Then a streamed plain request is watched beside a neighbour. Each kind of
request is warmed up and timed before the clock of --minutes starts.

Prints a row as soon as it is measured and writes all of them to engine_overhead.json.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import random
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import overhead_neighbour as neighbours
from overhead_arms import (
    ARMS,
    SETTINGS,
    Arm,
    Load,
    Setting,
    ask,
    collect,
    make_prompts,
    post,
    request_of,
)
from overhead_tables import latencies, summary, tables

from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.http import SERVER_PATHS, SGLangHttp
from rollout.engines.sglang.rules import ServerRules
from rollout.errors import EngineRefused, RolloutError
from rollout.prompts import load_tokenizer, vocabulary_size

WARM_UP_TOKENS = 8
TOLD = (  # what of /server_info bears on speed
    "version",
    "sampling_backend",
    "device",
    "dtype",
    "attention_backend",
    "tp_size",
    "disable_overlap_schedule",
    "disable_radix_cache",
    "max_running_requests",
    "stream_interval",
)
PACKAGES = ("aiohttp", "msgspec", "numpy", "pyarrow", "pysimdjson", "torch", "transformers")


@dataclass
class Run:
    """The server, what it is asked, and what has been measured."""

    http: SGLangHttp
    engines: dict[str, SGLangEngine]  # by mode; entered once, so that no cell pays for it
    vocab_size: int
    load: Load
    out: Path
    about: dict[str, Any]
    ends_s: float = float("inf")
    warm_up: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    streams: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def spent(self) -> bool:
        return time.monotonic() > self.ends_s

    async def cell(self, arm: Arm, setting: Setting, load: Load) -> dict[str, Any]:
        if not arm.collected:
            return await ask(self.http, arm, setting, load)
        assert arm.mode is not None
        engine = self.engines[arm.mode]
        return await collect(engine, self.http.url, setting, load, self.vocab_size)

    def write(self) -> None:
        measured = ("warm_up", "rows", "streams", "left_out")
        report = self.about | {name: getattr(self, name) for name in measured}
        report |= {"summary": summary(self.rows), "latencies": latencies(self.streams)}
        self.out.mkdir(parents=True, exist_ok=True)
        part = self.out / "engine_overhead.json.part"
        part.write_text(json.dumps(report, indent=1) + "\n")
        part.replace(self.out / "engine_overhead.json")


class SettingType(click.ParamType):
    name = "top_k[,top_p]"

    def convert(self, value: Any, param: Any, ctx: Any) -> Setting:
        top_k, _, top_p = str(value).partition(",")
        try:
            return Setting(int(top_k), float(top_p or 1))
        except ValueError:
            self.fail(f"{value!r}: wanted 512 or 512,0.95")


@click.command()
@click.option("--url", help="Of the server.")
@click.option("--model", help="The folder of the model that it serves.")
@click.option(
    "--minutes", default=1.5, show_default=True, help="Stop after these; warming up is not in them."
)
@click.option("--in-flight", default=64, show_default=True, help="Requests at a time.")
@click.option("--requests", type=int, help="Of a cell; two for each in flight if left out.")
@click.option("--prompt-tokens", default=64, show_default=True, help="Of each prompt.")
@click.option("--tokens", default=64, show_default=True, help="New ones in each reply.")
@click.option("--stream-tokens", default=256, show_default=True, help="Of a watched stream.")
@click.option("--repetitions", default=5, show_default=True, help="At most, of everything.")
@click.option("--setting", "settings", type=SettingType(), multiple=True, help="Only these.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/engine_overhead"))
@click.option("--markdown", type=click.Path(path_type=Path), help="Only print tables of this JSON.")
def main(url: str | None, model: str | None, markdown: Path | None, **options: Any) -> None:
    if markdown is not None:
        print(tables(json.loads(markdown.read_text())))
        return
    if url is None or model is None:
        raise click.UsageError("--url and --model say what to measure")
    try:
        asyncio.run(measure(url, model, **options))
    except RolloutError as error:
        raise click.ClickException(str(error)) from error


async def measure(
    url: str,
    model: str,
    minutes: float,
    in_flight: int,
    requests: int | None,
    prompt_tokens: int,
    tokens: int,
    stream_tokens: int,
    repetitions: int,
    settings: tuple[Setting, ...],
    out: Path,
) -> None:
    prompts = make_prompts(model, requests or 2 * in_flight, prompt_tokens)
    load = Load(prompts, in_flight, tokens)
    vocab_size = vocabulary_size(load_tokenizer(model), model)
    settings = settings or SETTINGS
    async with AsyncExitStack() as stack:
        http = SGLangHttp(url)
        http.open()
        stack.push_async_callback(http.close)
        server = await checked_server(http, settings, load)
        about = {
            "model": Path(model).name,
            "device": device_name(server),
            "server": {name: server.get(name) for name in TOLD},
            "client": versions(),
            "load": {
                "in_flight": in_flight,
                "requests": len(prompts),
                "prompt_tokens": prompt_tokens,
                "num_tokens": tokens,
                "stream_tokens": stream_tokens,
            },
        }
        run = Run(http, {}, vocab_size, load, out, about)
        await warm_up(run, settings, stack)
        began = time.monotonic()
        run.ends_s = began + 60 * minutes
        await watch_streams(run, stream_tokens, repetitions)
        await take_turns(run, settings, repetitions)
        run.about["seconds"] = round(time.monotonic() - began, 1)
        run.write()
    print(f"{len(run.rows)} cells in {run.about['seconds']} s; {out}/engine_overhead.json")


async def checked_server(
    http: SGLangHttp, settings: tuple[Setting, ...], load: Load
) -> dict[str, Any]:
    """What the server says of itself, if it can do everything that is measured."""
    _, server = await http.describe_first(*SERVER_PATHS)
    rules = ServerRules.of(server)
    if not rules.has_support_mode:
        raise EngineRefused(f"SGLang {server['version']} has no support mode; it needs 0.5.21")
    for setting in (*settings, neighbours.SETTING):
        rules.check(load.params(setting))
    return server


async def warm_up(run: Run, settings: tuple[Setting, ...], stack: AsyncExitStack) -> None:
    """Each kind of request alone and twice, then all of it small. Whoever is first pays for what
    all of them need; a sampler that is compiled makes the first mask request a long one."""
    few = replace(run.load, num_tokens=WARM_UP_TOKENS)
    every_setting = tuple(dict.fromkeys((*settings, neighbours.SETTING)))
    for setting in every_setting:
        for arm in ARMS:
            if arm.collected:
                continue
            request = request_of(arm, few.prompts[0], few.params(setting))
            first_s, again_s = [await seconds(post(run.http, request)) for _ in range(2)]
            what = f"{arm.name}, top_k {setting}"
            run.warm_up.append({"what": what, "first_s": first_s, "again_s": again_s})
            print(f"first {what}: {first_s:.2f} s, again {again_s:.2f} s", flush=True)
    for mode in ("selected", "support"):
        engine = SGLangEngine(
            run.http.url, vocab_size=run.vocab_size, support_logprobs=mode == "support"
        )
        run.engines[mode] = await stack.enter_async_context(engine)
    began = time.monotonic()
    for setting in every_setting:
        for arm in ARMS:
            await run.cell(arm, setting, few)
    for neighbour in neighbours.NEIGHBOURS.values():
        await neighbours.measure(run.http, neighbour, few, WARM_UP_TOKENS)
    print(f"everything once, with few tokens: {time.monotonic() - began:.1f} s", flush=True)


async def seconds(call: Awaitable[Any]) -> float:
    began = time.perf_counter()
    await call
    return time.perf_counter() - began


async def watch_streams(run: Run, stream_tokens: int, repetitions: int) -> None:
    """Not more than a third of the time; the neighbours take turns."""
    began, ends = time.monotonic(), run.ends_s
    for repetition in range(repetitions):
        if time.monotonic() - began > (ends - began) / 3:
            break
        for beside, arm in neighbours.NEIGHBOURS.items():
            found = await neighbours.measure(run.http, arm, run.load, stream_tokens)
            run.streams.append({"beside": beside, "repetition": repetition, **found})
        run.write()
    for row in latencies(run.streams):
        times = ", ".join(f"{name} {row[name]:.2f}" for name in ("p50", "p95", "p99", "max"))
        print(f"{row['beside']}: ms between tokens {times} ({row['gaps']} gaps)", flush=True)


async def take_turns(run: Run, settings: tuple[Setting, ...], repetitions: int) -> None:
    """Every arm once in each repetition, in an order of its own; the last may be cut short."""
    shuffle = random.Random(0)
    for repetition in range(repetitions):
        for setting in settings:
            for arm in shuffle.sample(ARMS, len(ARMS)):
                if run.spent:
                    run.left_out += [f"{arm.name}, top_k {setting}"] if repetition == 0 else []
                    continue
                row = {"setting": str(setting), "arm": arm.name, "repetition": repetition}
                row |= await run.cell(arm, setting, run.load)
                run.rows.append(row)
                print(line(row), flush=True)
            run.write()
        if run.spent:
            break


def line(row: dict[str, Any]) -> str:
    def number(name: str, pattern: str, width: int) -> str:
        value = row.get(name)
        return f"{'-' if value is None else format(value, pattern):>{width}}"

    return (
        f"{row['repetition']:>2} top_k {row['setting']:<15} {row['arm']:<20}"
        f"{number('tokens_per_s', ',.0f', 9)} tokens/s"
        f"{number('reply_bytes_per_token', ',.0f', 8)} B reply"
        f"{number('shard_bytes_per_token', ',.0f', 7)} B shard"
        f"{number('support_size', '.1f', 7)} ids"
    )


def versions() -> dict[str, str | None]:
    installed = {d.name: d.version for d in importlib.metadata.distributions()}
    return {name: installed.get(name) for name in PACKAGES}


def device_name(server: dict[str, Any]) -> str:
    """Of the server, which runs on this machine."""
    import torch

    on_gpu = server.get("device") == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_name() if on_gpu else f"CPU, {os.cpu_count()} processors"


if __name__ == "__main__":
    main()

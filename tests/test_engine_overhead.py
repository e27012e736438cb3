"""The benchmark of what supports cost an engine: its figures, its tables, what it asks for."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from builders import make_prompt
from click.testing import CliRunner
from endpoints import endpoint, reply, selected_alone

from rollout.errors import LengthMismatch, ReplyMalformed

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
NAMES = ("arms", "neighbour", "tables")
MODULES = ("engine_overhead", "support_markdown", *(f"overhead_{name}" for name in NAMES))


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The modules of the benchmark, which is a script beside them and no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        main = importlib.import_module("engine_overhead")
        found = {name: importlib.import_module(f"overhead_{name}") for name in NAMES}
        yield SimpleNamespace(main=main, **found)
        for name in MODULES:
            sys.modules.pop(name)


def cell(arm: str, repetition: int, tokens_per_s: float, **figures: float) -> dict[str, Any]:
    about = {"setting": "20", "arm": arm, "repetition": repetition}
    return about | {"tokens_per_s": tokens_per_s} | figures


def test_each_arm_is_held_against_the_plain_one_of_its_own_repetition(
    bench: SimpleNamespace,
) -> None:
    """The machine slows down to a tenth: medians move, ratios do not."""
    rows = [
        *(cell("mask, support", i, 750 / 10**i, reply_bytes_per_token=600) for i in range(3)),
        *(cell("plain", i, 1000 / 10**i) for i in range(2)),
    ]
    plain, mask = bench.tables.summary(rows)
    assert (plain["arm"], plain["ratio"], plain["tokens_per_s"]) == ("plain", 1, 550)
    assert mask == {
        "setting": "20",
        "arm": "mask, support",
        "repetitions": 3,
        "tokens_per_s": 75,
        "reply_bytes_per_token": 600,
        "slowest": 7.5,
        "fastest": 750,
        "ratio": 0.75,
    }


def test_an_arm_has_no_ratio_without_a_plain_one_of_its_setting(bench: SimpleNamespace) -> None:
    plain, other = cell("plain", 0, 10), cell("logprob", 0, 5) | {"setting": "512"}
    assert [row["ratio"] for row in bench.tables.summary([plain, other])] == [1, None]


def test_gaps_are_between_chunks_that_bring_tokens(bench: SimpleNamespace) -> None:
    came = [(5.0, 1), (5.5, 2), (5.75, 2), (6.5, 4), (6.5, 5)]
    chunks = [bench.neighbour.Chunk(*chunk) for chunk in came]
    assert bench.neighbour.gaps_ms(chunks) == [500, 1000, 0]
    assert bench.neighbour.gaps_ms(chunks[:1]) == []


def test_waits_are_pooled_over_the_streams_beside_one_neighbour(bench: SimpleNamespace) -> None:
    streams = [
        {"beside": "alone", "gaps_ms": [1.0] * 60, "neighbour_replies": 0},
        {"beside": "beside a mask request", "gaps_ms": [7.0], "neighbour_replies": 3},
        {"beside": "alone", "gaps_ms": [3.0] * 40 + [50.0], "neighbour_replies": 0},
    ]
    alone, beside = bench.tables.latencies(streams)
    assert (alone["p50"], alone["p95"], alone["max"], alone["gaps"]) == (1, 3, 50, 101)
    assert (beside["p50"], beside["neighbour_replies"]) == (7, 3)


def test_prompts_are_as_long_as_asked_and_all_different(
    bench: SimpleNamespace, tiny_model_path: Path
) -> None:
    prompts = bench.arms.make_prompts(str(tiny_model_path), 128, 64)
    assert {len(prompt.ids) for prompt in prompts} == {64}
    assert len({prompt.ids.tobytes() for prompt in prompts}) == 128


def test_arms_differ_in_what_they_ask_for_alone(bench: SimpleNamespace) -> None:
    load = bench.arms.Load([make_prompt(5, 6)], 1, 32)
    params = load.params(bench.arms.Setting(20, 0.9))
    asked = {
        arm.name: bench.arms.request_of(arm, load.prompts[0], params) for arm in bench.arms.ARMS
    }
    for request in asked.values():
        assert request["input_ids"] == [5, 6]
        assert request["sampling_params"] == asked["plain"]["sampling_params"]
    sampling = asked["plain"]["sampling_params"]
    assert [sampling[name] for name in ("top_k", "top_p", "max_new_tokens", "ignore_eos")] == [
        *(20, 0.9, 32, True)
    ]
    assert [request["return_logprob"] for request in asked.values()] == [False] + 5 * [True]
    assert [request.get("sampling_logprobs_mode") for request in asked.values()] == [
        *(None, None, "selected", "support", "selected", "support")
    ]


def test_a_reply_of_another_length_is_not_measured(bench: SimpleNamespace) -> None:
    with pytest.raises(LengthMismatch, match="got 3, asked for 4"):
        bench.arms.check_lengths([b'{"meta_info": {"completion_tokens": 3}}'], 4)


def test_an_error_in_a_stream_is_told(bench: SimpleNamespace) -> None:
    with pytest.raises(ReplyMalformed, match="stream: no more room"):
        bench.neighbour.num_tokens(b'{"error": {"message": "no more room"}}')


def answer(asked: dict[str, Any], knows_modes: bool = True) -> Any:
    """A server's, with as many prompt tokens as were sent, and with streams."""
    if asked["stream"]:
        return stream(asked["sampling_params"]["max_new_tokens"])
    has_support = asked.get("sampling_logprobs_mode") == "support" and knows_modes
    good = reply(asked) if has_support else selected_alone(asked)
    good["meta_info"]["prompt_tokens"] = len(asked["input_ids"])
    return good | {"prompt_token_ids": asked["input_ids"]}


def stream(num_tokens: int) -> web.Response:
    chunks = [
        json.dumps({"meta_info": {"completion_tokens": count + 1}}) for count in range(num_tokens)
    ]
    text = "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"])
    return web.Response(text=text, content_type="text/event-stream")


SMALL = ["--in-flight", "2", "--requests", "3", "--tokens", "4", "--prompt-tokens", "8"]


def measure(bench: SimpleNamespace, model: Path, out: Path, generate: Any, *more: str) -> Any:
    async def run() -> Any:
        async with endpoint(generate) as url:
            arguments = ["--url", url, "--model", str(model), "--out", str(out), *SMALL, *more]
            # it starts an event loop of its own
            return await asyncio.to_thread(CliRunner().invoke, bench.main.main, arguments)

    return asyncio.run(run())


def markdown(bench: SimpleNamespace, out: Path) -> str:
    arguments = ["--markdown", str(out / "engine_overhead.json")]
    return CliRunner().invoke(bench.main.main, arguments, catch_exceptions=False).output


def test_a_run_measures_every_arm_and_prints_its_tables(
    bench: SimpleNamespace, tiny_model_path: Path, tmp_path: Path
) -> None:
    more = ["--repetitions", "2", "--stream-tokens", "5", "--setting", "20", "--setting", "50,0.9"]
    done = measure(bench, tiny_model_path, tmp_path, answer, *more)
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "engine_overhead.json").read_text())
    assert report["left_out"] == []
    assert len(report["rows"]) == 2 * 2 * 6
    assert [len(row["gaps_ms"]) for row in report["streams"]] == 2 * 3 * [4]
    masked = [
        row for row in report["rows"] if row["arm"] in ("mask, support", "collected, support")
    ]
    assert {row["support_size"] for row in masked} == {2}
    replies = [row["reply_bytes_per_token"] for row in report["rows"] if row["arm"] == "plain"]
    assert len(set(replies)) == 1 and 20 < replies[0] < 60
    assert all(
        row["shard_bytes_per_token"] > 33 for row in masked[::2] if "collected" in row["arm"]
    )
    printed = markdown(bench, tmp_path)
    assert "2 in flight, 8 tokens in and 4 out, 3 requests a cell, medians of 2." in printed
    lines = printed.splitlines()
    assert sum(line.startswith(("| 20 | ", "| 50, top_p 0.9 | ")) for line in lines) == 12
    assert sum(line.startswith(("| alone", "| beside")) for line in lines) == 3


def test_a_run_without_time_says_what_it_left_out(
    bench: SimpleNamespace, tiny_model_path: Path, tmp_path: Path
) -> None:
    more = ["--minutes", "0", "--setting", "20", "--stream-tokens", "5"]
    done = measure(bench, tiny_model_path, tmp_path, answer, *more)
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "engine_overhead.json").read_text())
    assert sorted(report["left_out"]) == sorted(f"{arm.name}, top_k 20" for arm in bench.arms.ARMS)
    assert "Left out for lack of time: " in markdown(bench, tmp_path)


def test_a_server_that_ignores_the_mode_is_not_measured(
    bench: SimpleNamespace, tiny_model_path: Path, tmp_path: Path
) -> None:
    ignoring = partial(answer, knows_modes=False)
    done = measure(bench, tiny_model_path, tmp_path, ignoring, "--setting", "20")
    assert done.exit_code == 1
    assert "asked for sampling_logprobs_mode support, got the other" in done.output

"""The ways to ask a server for the same tokens, and what one costs under one load."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rollout.collect import Request
from rollout.config import CollectConfig
from rollout.engines.http import check_status
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.http import SGLangHttp
from rollout.engines.sglang.reply import parse_reply
from rollout.engines.sglang.routes import ROUTES
from rollout.errors import LengthMismatch, OverBudget, ReplyMalformed
from rollout.job import collect_into
from rollout.prompts import Prompt, load_tokenizer
from rollout.sampling import SamplingParams
from rollout.stats import run_stats
from rollout.writer import RunWriter

TEXT = Path(__file__).parent.parent / "docs" / "format.md"
TIMEOUT_S = 600.0
DECODED_REPLIES = 4  # of each cell; enough for a time, few enough not to take any


class Arm(NamedTuple):
    """One way to ask."""

    name: str
    logprob: bool = False  # return_logprob
    mode: str | None = None  # sampling_logprobs_mode, with a mask
    collected: bool = False  # by the collector into a run directory


PLAIN = Arm("plain")
MASKED = Arm("mask, support", True, "support")
ARMS = (
    PLAIN,
    Arm("logprob", True),
    Arm("mask, selected", True, "selected"),
    MASKED,
    Arm("collected, selected", True, "selected", collected=True),
    Arm("collected, support", True, "support", collected=True),
)
"""With a mask the request is the collector's own, which asks for logprobs too."""


class Setting(NamedTuple):
    """How tokens are sampled, the same in every arm."""

    top_k: int
    top_p: float = 1.0

    def __str__(self) -> str:
        return f"{self.top_k}" if self.top_p == 1 else f"{self.top_k}, top_p {self.top_p:g}"


SETTINGS = (Setting(20), Setting(50), Setting(512), Setting(512, 0.95))


@dataclass(frozen=True)
class Load:
    """Equal requests: as many tokens in, as many out."""

    prompts: Sequence[Prompt]
    in_flight: int
    num_tokens: int  # that each reply has, whatever is sampled

    def params(self, setting: Setting) -> SamplingParams:
        return SamplingParams(
            top_k=setting.top_k,
            top_p=setting.top_p,
            max_new_tokens=self.num_tokens,
            ignore_eos=True,
        )

    @property
    def total_tokens(self) -> int:
        return self.num_tokens * len(self.prompts)


def make_prompts(model: str, count: int, num_tokens: int) -> list[Prompt]:
    """Windows of a page of ours: text of one length, no two from the same place."""
    # not verbose: the page is longer than some models' context, no window of it is
    ids = load_tokenizer(model)(TEXT.read_text(), verbose=False)["input_ids"]
    step = (len(ids) - num_tokens) // count
    assert step > 0, f"{TEXT} has {len(ids)} tokens: too few for {count} windows of {num_tokens}"
    return [
        Prompt(str(i), np.array(ids[i * step : i * step + num_tokens], np.int32))
        for i in range(count)
    ]


def request_of(arm: Arm, prompt: Prompt, params: SamplingParams) -> dict[str, Any]:
    if arm.mode is not None:
        return ROUTES["generate"].request(prompt, params, arm.mode, "")
    return {
        "input_ids": prompt.ids.tolist(),
        "sampling_params": params.to_request(),
        "stream": False,
        "return_logprob": arm.logprob,
    }


async def post(http: SGLangHttp, request: Mapping[str, Any]) -> bytes:
    """The body of the reply; raises what the server refuses."""
    answer = await http.post("/generate", request, TIMEOUT_S)
    check_status(answer.status, answer.body)
    return answer.body


async def ask(http: SGLangHttp, arm: Arm, setting: Setting, load: Load) -> dict[str, Any]:
    """Every prompt of the load, straight over HTTP; nothing is decoded while the clock runs."""
    params = load.params(setting)
    waiting = iter([request_of(arm, prompt, params) for prompt in load.prompts])
    bodies: list[bytes] = []

    async def work() -> None:
        for request in waiting:
            bodies.append(await post(http, request))

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(load.in_flight)))
    seconds = time.perf_counter() - began
    check_lengths(bodies, load.num_tokens)
    return {
        "seconds": seconds,
        "tokens_per_s": load.total_tokens / seconds,
        "reply_bytes_per_token": sum(map(len, bodies)) / load.total_tokens,
        **(decoded(arm, bodies[:DECODED_REPLIES]) if arm.mode else {}),
    }


class _Meta(msgspec.Struct):
    completion_tokens: int


class Head(msgspec.Struct):
    """Of a reply, or of a chunk of a stream: how many tokens there are."""

    meta_info: _Meta


decode_head = msgspec.json.Decoder(Head).decode


def check_lengths(bodies: Sequence[bytes], num_tokens: int) -> None:
    for body in bodies:
        got = decode_head(body).meta_info.completion_tokens
        if got != num_tokens:
            raise LengthMismatch(f"completion_tokens: got {got}, asked for {num_tokens}")


def decoded(arm: Arm, bodies: Sequence[bytes]) -> dict[str, Any]:
    """What the collector does with a reply: its time, and the ids that are in it."""
    num_tokens = num_ids = 0
    began = time.perf_counter()
    for body in bodies:
        completion = parse_reply(200, body)
        if (completion.support_logprobs is not None) != (arm.mode == "support"):
            raise ReplyMalformed(f"asked for sampling_logprobs_mode {arm.mode}, got the other")
        num_tokens += len(completion.output_ids)
        num_ids += len(completion.support.ids)
    seconds = time.perf_counter() - began
    return {
        "support_size": num_ids / num_tokens,
        "decode_s_per_million": 1e6 * seconds / num_tokens,
    }


async def collect(
    engine: SGLangEngine, url: str, setting: Setting, load: Load, vocab_size: int
) -> dict[str, Any]:
    """Every prompt of the load through the collector, until it is committed to a disk."""
    config = CollectConfig.model_validate(
        {
            "model": "none",
            "prompts": {"dataset": "none"},
            "sampling": load.params(setting).model_dump(),
            "engine": {"kind": "sglang", "url": url},
            "seed": None,  # the other arms send none
            "concurrency": load.in_flight,
        }
    )
    wanted = [Request(prompt, 0) for prompt in load.prompts]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        with RunWriter(Path(folder), {}, vocab_size=vocab_size) as writer:
            progress = await collect_into(writer, engine, wanted, config)
        seconds = time.perf_counter() - began
        stats = run_stats(Path(folder))
    if stats["output_tokens"] != load.total_tokens:
        raise OverBudget(
            f"collected {progress.done} of {len(wanted)} rollouts, {stats['output_tokens']} of "
            f"{load.total_tokens} tokens: failed {stats['failed']}, rejected {stats['rejected']}"
        )
    return {
        "seconds": seconds,
        "tokens_per_s": load.total_tokens / seconds,
        "shard_bytes_per_token": stats["bytes_per_token"],
        "support_size": stats["support_size"]["mean"],
    }

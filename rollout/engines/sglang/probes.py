"""Questions to one endpoint, each answered as a `Probe`.

No question needs a tokenizer: prompts are the id 1, or one message for the chat route. An answer
that cannot be read makes a probe unknown, never wrong; only an endpoint that does not answer at all
raises, `EngineUnreachable`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from rollout.engines.base import Completion
from rollout.engines.http import Answer, error_words
from rollout.engines.sglang.http import SGLangHttp
from rollout.engines.sglang.reply import parse_reply
from rollout.errors import EngineRefused, RolloutError, SamplingMaskMissing

PROMPT = [1]
TIMEOUT_S = 300.0  # a busy server makes even a few tokens wait
TEMPERATURE = 2.0  # of the request that tells logprobs before temperature from those after it
TOLERANCE = 0.05  # nats; some servers round full logprobs to bfloat16
ANY_TEXT = r"[\s\S]"  # as stop_regex: ends after the first token
DROPPED_TOO = "structural_tag, logit_bias and spaces_between_special_tokens"


@dataclass(frozen=True)
class Probe:
    """One fact about an endpoint.

    `ok` is False where it keeps rollouts from being collected, or costs them something, and None
    where it could not be found out; `detail` says what follows.
    """

    name: str
    value: str
    detail: str = ""
    ok: bool | None = True


@dataclass(frozen=True)
class Sampled:
    """The answer to the request that asks for everything a rollout needs, and more."""

    answer: Answer
    completion: Completion | None
    error: RolloutError | None  # what is wrong with it, where there is no completion

    @property
    def speaks_sglang(self) -> bool:
        """Whether this is what SGLang's `/generate` looks like, with a mask or without."""
        return self.completion is not None or isinstance(self.error, SamplingMaskMissing)


class _Choice(msgspec.Struct):
    meta_info: dict[str, Any] | None = None
    response_token_ids: list[int] | None = None


class _ChatReply(msgspec.Struct):
    choices: list[_Choice]


class _TopMeta(msgspec.Struct):
    output_top_logprobs: list[list[tuple[float | None, int, str | None]]] | None = None


class _TopReply(msgspec.Struct):
    meta_info: _TopMeta


class _Finish(msgspec.Struct):
    type: str
    matched: int | str | list[int] | None = None


class _PlainMeta(msgspec.Struct):
    finish_reason: _Finish


class _PlainReply(msgspec.Struct):
    output_ids: list[int]
    meta_info: _PlainMeta


async def sample(http: SGLangHttp) -> Sampled:
    """Eight tokens of two ids each, with their mask, every logprob, and the likeliest ids."""
    request = {
        "input_ids": PROMPT,
        "sampling_params": {
            "temperature": TEMPERATURE,
            "top_k": 2,
            "top_p": 1.0,
            "min_p": 0.0,
            "max_new_tokens": 8,
            "ignore_eos": True,
        },
        "stream": False,
        "return_logprob": True,
        "top_logprobs_num": 8,
        "return_sampling_mask": True,
        "sampling_logprobs_mode": "support",
    }
    answer = await http.post("/generate", request, TIMEOUT_S)
    try:
        return Sampled(answer, parse_reply(answer.status, answer.body, PROMPT), None)
    except RolloutError as error:
        return Sampled(answer, None, error)


def mask_on_generate(sampled: Sampled, dropped_by: str) -> Probe:
    """`dropped_by` says who would be to blame for a mask that did not come."""
    name = "mask on /generate"
    if sampled.completion is not None:
        return Probe(name, "yes")
    if isinstance(sampled.error, SamplingMaskMissing):
        return Probe(name, "dropped", dropped_by or str(sampled.error), False)
    refused = isinstance(sampled.error, EngineRefused)
    return Probe(name, "refused" if refused else "failed", str(sampled.error), False)


def support_logprobs(sampled: Sampled) -> Probe:
    """Decided by what came: releases before 0.5.21 ignore `sampling_logprobs_mode` silently."""
    name = "support logprobs"
    if sampled.completion is None:
        return Probe(name, "unknown", "no mask to tell it by", None)
    if sampled.completion.support_logprobs is not None:
        return Probe(name, "of every id of the support")
    return Probe(
        name, "of the sampled id alone", "no exact KL over the support; SGLang 0.5.21 has it", False
    )


async def mask_on_chat(http: SGLangHttp, model: str, dropped_by: str) -> Probe:
    """A model without a chat template is a fact, not a failure."""
    name = "mask on /v1/chat/completions"
    request = {
        "model": model,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 2,
        "temperature": 1.0,
        "top_k": 2,
        "top_p": 1.0,
        "min_p": 0.0,
        "stream": False,
        "return_sampling_mask": True,
        "return_meta_info": True,
        "return_token_ids": True,
    }
    answer = await http.post("/v1/chat/completions", request, TIMEOUT_S)
    words = error_words(answer.body)
    if answer.status != 200:
        if "chat template" in words or "chat_template" in words:
            return Probe(name, "no chat template", "render prompts yourself, as prompt ids or text")
        return Probe(name, "refused", f"HTTP {answer.status}: {words}", False)
    try:
        choices = msgspec.json.decode(answer.body, type=_ChatReply).choices
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Probe(name, "unknown", f"not a chat completion: {error}", None)
    choice = choices[0] if choices else _Choice()
    if not isinstance((choice.meta_info or {}).get("output_token_sampling_mask"), list):
        return Probe(name, "dropped", dropped_by or "the chat route has it since 0.5.18", False)
    if choice.response_token_ids is None:
        return Probe(name, "without ids", "no response_token_ids beside the mask", False)
    return Probe(name, "yes")


async def sampling_fields(http: SGLangHttp, router: str | None) -> Probe:
    """Whether `stop_regex` arrives: what drops it also drops other keys that shape a support."""
    name = "sampling_params"
    params = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True, "stop_regex": [ANY_TEXT]}
    reply = await _ask(http, params)
    if isinstance(reply, str):
        return Probe(name, "unknown", reply, None)
    if reply.meta_info.finish_reason.type == "stop":
        return Probe(name, "arrive")
    who = router or "something on the way"
    return Probe(
        name,
        "not all arrive",
        f"{who} drops stop_regex, and likely {DROPPED_TOO}: leave them out",
        False,
    )


async def seeds(http: SGLangHttp, deterministic: bool) -> Probe:
    """The same seed twice and another one, where chance does not repeat sixteen tokens."""
    name = "seeds"
    params = {"temperature": 5.0, "top_k": 100, "max_new_tokens": 16, "ignore_eos": True}
    replies = await asyncio.gather(
        *(_ask(http, params | {"sampling_seed": seed}) for seed in (1, 1, 2))
    )
    drawn = [reply.output_ids for reply in replies if isinstance(reply, _PlainReply)]
    if len(drawn) < len(replies):
        why = next(reply for reply in replies if isinstance(reply, str))
        return Probe(name, "unknown", why, None)
    first, again, other = drawn
    if first != again and deterministic:
        return Probe(name, "ignored", "something on the way drops sampling_seed", False)
    if first != again:
        return Probe(name, "ignored", "needs --enable-deterministic-inference")
    if first == other:
        return Probe(name, "unknown", "two seeds gave the same tokens", None)
    return Probe(name, "honoured")


async def _ask(http: SGLangHttp, params: Mapping[str, Any]) -> _PlainReply | str:
    """One plain `/generate`, or what is wrong with its answer."""
    request = {"input_ids": PROMPT, "sampling_params": params, "stream": False}
    answer = await http.post("/generate", request, TIMEOUT_S)
    if answer.status != 200:
        return f"HTTP {answer.status}: {error_words(answer.body)}"
    try:
        return msgspec.json.decode(answer.body, type=_PlainReply)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"not a /generate reply: {error}"


def full_logprobs(sampled: Sampled) -> Probe:
    """Which of two readings of the full logprobs predicts the sampling logprobs.

    With full logprobs l after temperature, that of y over its support S is l_y - log sum_S exp l.
    With l before it (SGLANG_RETURN_ORIGINAL_LOGPROB), it is the same of l / T.
    """
    name = "full logprobs"
    if sampled.completion is None:
        return Probe(name, "unknown", "no mask to tell it by", None)
    try:
        top = msgspec.json.decode(sampled.answer.body, type=_TopReply).meta_info.output_top_logprobs
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Probe(name, "unknown", f"output_top_logprobs: {error}", None)
    after, before = (_error(sampled.completion, top or [], scale) for scale in (1, 1 / TEMPERATURE))
    if np.isnan(after):
        return Probe(name, "unknown", "no token with the full logprobs of its whole support", None)
    if min(after, before) > TOLERANCE or abs(after - before) <= max(0.001, min(after, before)):
        return Probe(
            name,
            "unknown",
            f"off by {after:.3g} nats if after temperature, by {before:.3g} if before",
            None,
        )
    if after < before:
        return Probe(name, "after temperature")
    return Probe(
        name,
        "before temperature",
        "recorded kept masses would be wrong: start it without SGLANG_RETURN_ORIGINAL_LOGPROB",
        False,
    )


def _error(
    completion: Completion,
    top: Sequence[Sequence[tuple[float | None, int, str | None]]],
    scale: float,
) -> float:
    """Mean distance in nats between sampling logprobs and those predicted; NaN without a token."""
    distances = []
    for t, row in enumerate(top[: len(completion.output_ids)]):
        scaled = {i: scale * logprob for logprob, i, _ in row if logprob is not None}
        ids, sampled = completion.support[t].tolist(), int(completion.output_ids[t])
        if len(ids) < 2 or not scaled.keys() >= {sampled, *ids}:
            continue  # a singleton says nothing; with ties a support may be wider than `top`
        predicted = scaled[sampled] - np.logaddexp.reduce([scaled[i] for i in ids])
        distances.append(abs(predicted - float(completion.sampling_logprobs[t])))
    return float(np.mean(distances)) if distances else float("nan")

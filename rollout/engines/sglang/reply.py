"""The replies of SGLang's `/generate` and chat, as pure functions from bytes to a `Completion`.

Shapes by version: SGLang 0.5.16 to 0.5.23, one prompt, n = 1, not streamed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollout.engines.base import Completion
from rollout.engines.http import check_status
from rollout.engines.json_rows import float_rows, id_rows, ids_array
from rollout.engines.sglang.rules import refusal
from rollout.errors import (
    GenerationAborted,
    LengthMismatch,
    PromptTokenCount,
    ReplyMalformed,
    SampledOutsideSupport,
    SamplingMaskMissing,
)
from rollout.record import WeightSpan
from rollout.support import Support

MASK_MISSING = (
    "the reply has no sampling mask although one was asked for. Likely causes: a router in front "
    "of the server drops the field (sglang-router 0.3 does; ask the server directly), a front end "
    "that does not know it (SGLang's Rust front end; the chat endpoint before 0.5.18), or an abort "
    "while the request was still waiting"
)


_ABSENT = msgspec.Raw(b"null")


class _FinishReason(msgspec.Struct):
    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _MetaInfo(msgspec.Struct):
    finish_reason: _FinishReason
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    weight_version: str | None = None
    weight_versions: list[_Span] | None = None
    # most of the bytes: decoded as flat rows by json_rows
    output_token_sampling_mask: msgspec.Raw = _ABSENT
    # selected mode: one number per token; support mode: one row per token
    output_token_sampling_logprobs: msgspec.Raw = _ABSENT
    output_token_logprobs: msgspec.Raw = _ABSENT  # [logprob, id, null] per token
    output_token_sampling_mask_length: int | None = None


class Reply(msgspec.Struct):
    """The body of a `/generate` reply; fields that nobody needs here are ignored."""

    meta_info: _MetaInfo
    output_ids: list[int]
    text: str | None = None
    prompt_token_ids: list[int] | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    meta_info: _MetaInfo | None = None
    prompt_token_ids: list[int] | None = None
    response_token_ids: list[int] | None = None
    token_ids: list[int] | None = None  # the same, as 0.5.17 spells it


class _ChatReply(msgspec.Struct):
    choices: list[_Choice]


_decode = msgspec.json.Decoder(Reply).decode
_decode_choices = msgspec.json.Decoder(_ChatReply).decode
_numbers = msgspec.json.Decoder(list[float | None]).decode
_logprob_rows = msgspec.json.Decoder(list[tuple[float | None, int, str | None]]).decode
_mask_or_null = msgspec.json.Decoder(list[list[int] | None]).decode

# what Python's json module writes and reads, and JSON does not know
_STRING_OR_NONFINITE = re.compile(rb'"(?:[^"\\]++|\\.)*+"|-?Infinity|NaN', re.DOTALL)
_PAIR_OR_HALF = re.compile(
    rb"\\(?:u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|(u[dD][89a-fA-F]\w\w)|.)", re.DOTALL
)


def parse_reply(status: int, body: bytes, prompt_ids: Sequence[int] | None = None) -> Completion:
    """Turn one reply into a `Completion`, or raise what is wrong with it.

    Raises `EngineBusy`, `EngineRefused` (4xx) and `EngineFailed` (5xx) with the server's words,
    `ReplyMalformed`,
    `SamplingMaskMissing`, `GenerationAborted` (ended before the sampler ran), `PromptTokenCount`
    (needs `prompt_ids`, those that were sent), `LengthMismatch`, and `SampledOutsideSupport` where
    no logprob of the sampled id can be read. What else a rollout must fulfil, rules.py checks.
    """
    check_status(status, body, refusal)
    reply = _decode_leniently(body, _decode, lambda body: body["text"])
    return completion(reply, body, prompt_ids)


def parse_chat_reply(status: int, body: bytes) -> Completion:
    """`parse_reply` for `/v1/chat/completions`: the prompt ids are the server's, in `prompt_ids`.

    The text is that of the message; None where the server took tool calls out of it.
    """
    check_status(status, body, refusal)
    reply = _decode_leniently(
        body, _decode_chat, lambda body: body["choices"][0]["message"]["content"]
    )
    found = completion(reply, body)
    if not reply.prompt_token_ids:
        raise ReplyMalformed("the reply has no prompt_token_ids, which return_token_ids asks for")
    prompt_ids = ids_array(reply.prompt_token_ids, "prompt_token_ids")
    used = reply.meta_info.prompt_tokens
    if used is not None and used != len(prompt_ids):
        raise PromptTokenCount(f"{len(prompt_ids)} prompt_token_ids, but prompt_tokens is {used}")
    return replace(found, prompt_ids=prompt_ids)


def _decode_chat(body: bytes) -> Reply:
    choices = _decode_choices(body).choices
    if len(choices) != 1:
        raise ValueError(f"{len(choices)} choices where one was asked for")
    choice = choices[0]
    if choice.meta_info is None:
        raise SamplingMaskMissing(MASK_MISSING)
    output_ids = choice.response_token_ids
    if output_ids is None:
        output_ids = choice.token_ids
    if output_ids is None:
        if choice.meta_info.output_token_sampling_mask != _ABSENT:
            raise ValueError("no response_token_ids, which return_token_ids asks for")
        output_ids = []  # nothing was sampled, or nothing came through: `completion` tells which
    text = None if choice.message.tool_calls else choice.message.content
    return Reply(choice.meta_info, output_ids, text, choice.prompt_token_ids)


def completion(
    reply: Reply,
    body: bytes | None,
    prompt_ids: Sequence[int] | None = None,
    *,
    unchecked: bool = False,
) -> Completion:
    """The checks of `parse_reply` on a decoded reply.

    `unchecked` lets through a sampled id outside its support, with NaN for its logprob: for those
    who explain what is wrong with a file.
    """
    meta, reason = reply.meta_info, reply.meta_info.finish_reason
    mask = bytes(meta.output_token_sampling_mask)
    logprobs = bytes(meta.output_token_sampling_logprobs)
    if b"null" in (mask, logprobs):
        if reason.type == "abort":
            raise GenerationAborted(f"ended before it was sampled: {reason.message}")
        raise SamplingMaskMissing(MASK_MISSING)
    _check_prompt(reply, prompt_ids)
    output_ids = ids_array(reply.output_ids, "output_ids")
    support = _support(mask)
    counts, values = _logprobs(logprobs)
    _check_lengths(meta, len(output_ids), len(support), len(values if counts is None else counts))
    selected, per_id = values, None
    if counts is not None:
        selected, per_id = _of_sampled(values, counts, support, output_ids, unchecked), values
    return Completion(
        output_ids=output_ids,
        support=support,
        sampling_logprobs=selected,
        full_logprobs=_full_logprobs(bytes(meta.output_token_logprobs), output_ids),
        support_logprobs=per_id,
        finish_reason=reason.type,
        stop_match=None if reason.matched is None else str(reason.matched),
        weight_versions=_spans(meta, len(output_ids)),
        text=reply.text,
        raw=body,
    )


def _decode_leniently(
    body: bytes, decode: Callable[[bytes], Reply], text_of: Callable[[Any], str]
) -> Reply:
    """`body` as JSON, or as Python's json module writes it: NaN and infinities count as null, and
    the text keeps half of a UTF-16 pair (a character cut at the last token): the ids are whole."""
    try:
        try:
            return decode(body)
        except msgspec.DecodeError:
            strict = _STRING_OR_NONFINITE.sub(_as_strict, body)
            if strict == body:
                raise
            reply = decode(strict)
        if reply.text is not None:
            reply.text = text_of(json.loads(body))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ReplyMalformed(f"not a reply of SGLang: {error}; got {body[:200]!r}") from error
    return reply


def _as_strict(match: re.Match[bytes]) -> bytes:
    if not match[0].startswith(b'"'):
        return b"null"
    return _PAIR_OR_HALF.sub(lambda m: b"\\\\" + m[1] if m[1] else m[0], match[0])


def _check_prompt(reply: Reply, prompt_ids: Sequence[int] | None) -> None:
    if prompt_ids is None:
        return
    used = reply.meta_info.prompt_tokens
    if used is not None and used != len(prompt_ids):
        raise PromptTokenCount(f"sent {len(prompt_ids)} prompt tokens, the server used {used}")
    echoed = reply.prompt_token_ids
    if echoed is not None and echoed != list(prompt_ids):
        raise PromptTokenCount("the server used other prompt tokens than the ones that were sent")


def _check_lengths(
    meta: _MetaInfo, num_output_tokens: int, num_masks: int, num_logprobs: int
) -> None:
    lengths = {
        "completion_tokens": meta.completion_tokens,
        "output_token_sampling_mask": num_masks,
        "output_token_sampling_mask_length": meta.output_token_sampling_mask_length,
        "output_token_sampling_logprobs": num_logprobs,
    }
    for name, length in lengths.items():
        if length is not None and length != num_output_tokens:
            raise LengthMismatch(f"{name} is {length} for {num_output_tokens} output_ids")


def _support(mask: bytes) -> Support:
    if b"null" in mask:  # up to 0.5.19, where a row was not captured
        try:
            at = _mask_or_null(mask).index(None)
        except (msgspec.DecodeError, ValueError) as error:
            raise ReplyMalformed(f"output_token_sampling_mask: {error}") from error
        raise SamplingMaskMissing(f"output token {at} has no sampling mask (null)")
    counts, ids = id_rows(mask, "output_token_sampling_mask")
    return Support.from_counts(ids, counts)


def _logprobs(raw: bytes) -> tuple[NDArray[np.int64] | None, NDArray[np.float32]]:
    """Support mode: counts per row and every logprob. Selected mode: None and one per token."""
    name = "output_token_sampling_logprobs"
    if raw[1:].lstrip().startswith(b"["):
        return float_rows(raw, name)
    try:  # null means NaN or infinite: kept as NaN, which no rule lets through
        return None, np.array(_numbers(raw), np.float32)
    except (msgspec.DecodeError, ValueError) as error:
        raise ReplyMalformed(f"{name}: {error}") from error


def _of_sampled(
    logprobs: NDArray[np.float32],
    counts: NDArray[np.int64],
    support: Support,
    output_ids: NDArray[np.int32],
    unchecked: bool,
) -> NDArray[np.float32]:
    """[R] The logprob of each sampled id, out of those of its whole support."""
    if len(wrong := np.flatnonzero(counts != support.counts)):
        t = wrong[0]
        raise LengthMismatch(
            f"output token {t}: {counts[t]} support logprobs for {support.counts[t]} ids"
        )
    rows = support.rows
    is_sampled = support.ids == output_ids[rows]
    at = rows[is_sampled]
    first = np.diff(at, prepend=-1) > 0  # an id that stands twice is for the rules to find
    if first.sum() != len(output_ids) and not unchecked:
        t = np.setdiff1d(np.arange(len(output_ids)), at)[0]
        raise SampledOutsideSupport(
            f"output token {t}: sampled id {output_ids[t]} is not among the "
            f"{support.counts[t]} ids of its support"
        )
    selected = np.full(len(output_ids), np.nan, np.float32)
    selected[at[first]] = logprobs[is_sampled][first]
    return selected


def _full_logprobs(raw: bytes, output_ids: NDArray[np.int32]) -> NDArray[np.float32] | None:
    if raw == b"null":
        return None
    name = "output_token_logprobs"
    if b'"' in raw:  # chat sends each token's text
        return _logprobs_beside_text(raw, name, output_ids)
    # the text is null, as we do not ask for it: numbers alone are decoded faster
    counts, values = float_rows(raw.replace(b",null]", b"]"), name, np.float64)
    width = 3 if (counts == 3).all() else 2
    if not (counts == width).all():
        raise ReplyMalformed(f"{name}: must hold [logprob, id, null] per token")
    if values[1::width].tolist() != output_ids.tolist():
        raise LengthMismatch(f"{name} are for other tokens than output_ids")
    return values[::width].astype(np.float32)


def _logprobs_beside_text(
    raw: bytes, name: str, output_ids: NDArray[np.int32]
) -> NDArray[np.float32]:
    try:
        rows = _logprob_rows(raw)
    except (msgspec.DecodeError, ValueError) as error:
        raise ReplyMalformed(f"{name}: {error}") from error
    if [token for _, token, _ in rows] != output_ids.tolist():
        raise LengthMismatch(f"{name} are for other tokens than output_ids")
    return np.array([logprob for logprob, _, _ in rows], np.float32)  # null is NaN


def _spans(meta: _MetaInfo, num_output_tokens: int) -> tuple[WeightSpan, ...]:
    if meta.weight_versions is not None:
        return tuple(WeightSpan(s.version, s.start, s.end) for s in meta.weight_versions)
    if meta.weight_version is not None:  # before 0.5.19: one version, the one at the end
        return (WeightSpan(meta.weight_version, 0, num_output_tokens),)
    return ()

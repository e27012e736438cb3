"""The replies of vLLM's `/inference/v1/generate`, as pure functions from bytes to a `Completion`.

The shape is that of vLLM 0.28, and of the logprobs of whole supports that came later.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollout.engines.base import Completion
from rollout.engines.http import check_status
from rollout.engines.json_rows import float_rows, id_rows, ids_array
from rollout.errors import (
    EngineFailed,
    GenerationAborted,
    LengthMismatch,
    PromptTokenCount,
    ReplyMalformed,
    SamplingMaskMissing,
)
from rollout.support import Support

FLAGS = "--return-sampling-mask --logprobs-mode processed_logprobs"

MASK_MISSING = (
    f"the reply has no sampling mask; start the server with {FLAGS}, 0.28 or newer, without "
    "VLLM_USE_RUST_FRONTEND, and ask it directly: a router may drop the field"
)

FAILED = (
    "finish_reason is error: the server failed on this request. With "
    "--return-sampling-mask-logprobs that also happens where ids tie at top_k and more than top_k "
    "survive: lower sampling.top_k, or start the server without that flag"
)

_ABSENT = msgspec.Raw(b"null")


class _Logprob(msgspec.Struct):
    token: str
    logprob: float | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    # most of the bytes: decoded as flat rows by json_rows
    sampling_mask: msgspec.Raw = _ABSENT
    sampling_mask_logprobs: msgspec.Raw = _ABSENT


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Reply).decode


def parse_reply(status: int, body: bytes, num_prompt_tokens: int | None = None) -> Completion:
    """Turn one reply into a `Completion`, or raise what is wrong with it.

    Raises `EngineBusy`, `EngineRefused` (4xx) and `EngineFailed` (5xx, or finish_reason error) with
    the server's words, `ReplyMalformed`, `SamplingMaskMissing`, `GenerationAborted` (ended before
    the sampler ran), `PromptTokenCount` (needs `num_prompt_tokens`, those that were sent) and
    `LengthMismatch`. What else a rollout must fulfil, rules.py checks.
    """
    check_status(status, body)
    choice, usage = _only_choice(body)
    if choice.finish_reason == "error":
        raise EngineFailed(FAILED)
    mask = bytes(choice.sampling_mask)
    if mask == b"null":
        if choice.finish_reason == "abort" and not choice.token_ids:
            raise GenerationAborted("ended before it was sampled")
        raise SamplingMaskMissing(MASK_MISSING)
    if choice.token_ids is None or choice.finish_reason is None:
        raise ReplyMalformed(f"no token_ids or no finish_reason; got {body[:200]!r}")
    if num_prompt_tokens is not None and usage.prompt_tokens not in (None, num_prompt_tokens):
        raise PromptTokenCount(
            f"sent {num_prompt_tokens} prompt tokens, the server used {usage.prompt_tokens}"
        )
    output_ids = ids_array(choice.token_ids, "token_ids")
    counts, ids = id_rows(mask, "sampling_mask")
    for name, length in (
        ("completion_tokens", usage.completion_tokens),
        ("sampling_mask", len(counts)),
    ):
        if length is not None and length != len(output_ids):
            raise LengthMismatch(f"{name} is {length} for {len(output_ids)} token_ids")
    support = Support.from_counts(ids, counts)
    return Completion(
        output_ids=output_ids,
        support=support,
        sampling_logprobs=_sampling_logprobs(choice.logprobs, output_ids),
        full_logprobs=None,  # with processed_logprobs there are none
        support_logprobs=_support_logprobs(bytes(choice.sampling_mask_logprobs), support),
        finish_reason=choice.finish_reason,
        raw=body,
    )


def _only_choice(body: bytes) -> tuple[_Choice, _Usage]:
    try:
        reply = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReplyMalformed(f"not a reply of vLLM: {error}; got {body[:200]!r}") from error
    if len(reply.choices) != 1:
        raise ReplyMalformed(f"{len(reply.choices)} choices where one was asked for")
    return reply.choices[0], reply.usage or _Usage()


def _sampling_logprobs(
    logprobs: _Logprobs | None, output_ids: NDArray[np.int32]
) -> NDArray[np.float32]:
    """[R] The logprob of each sampled id; NaN for null, which no rule lets through."""
    content = None if logprobs is None else logprobs.content
    if content is None:
        raise ReplyMalformed("no logprobs, which were asked for")
    if len(content) != len(output_ids):
        raise LengthMismatch(f"{len(content)} logprobs for {len(output_ids)} token_ids")
    for t, (entry, token) in enumerate(zip(content, output_ids.tolist(), strict=True)):
        if entry.token != f"token_id:{token}":
            raise LengthMismatch(
                f"output token {t}: the logprob is of {entry.token!r}, wanted 'token_id:{token}'"
            )
    return np.array([entry.logprob for entry in content], np.float32)


def _support_logprobs(raw: bytes, support: Support) -> NDArray[np.float32] | None:
    """[E] in the order of the support's ids; None where the server was not told to send them."""
    if raw == b"null":
        return None
    counts, values = float_rows(raw, "sampling_mask_logprobs")
    if len(counts) != len(support):
        raise LengthMismatch(f"{len(counts)} sampling_mask_logprobs for {len(support)} token_ids")
    if len(wrong := np.flatnonzero(counts != support.counts)):
        t = wrong[0]
        raise LengthMismatch(
            f"output token {t}: {counts[t]} support logprobs for {support.counts[t]} ids"
        )
    return values

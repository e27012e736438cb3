"""vLLM: what a server with ``--return-sampling-mask`` answered, or `LLM.generate` returned.

A file has one JSON object a line: ``{"request": <body sent>, "response": <body of
/inference/v1/generate>}``, with an optional ``id``. Each choice of a response is a rollout.

vLLM 0.28 holds supports as flat ids with offsets, later releases as a list for each token; both are
read. Every token of vLLM's was sampled: an empty support means nothing there and is refused.
Logprobs must be ``processed_logprobs``: only these are over the support.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollout.adapters.arrays import float32, int32, plain
from rollout.adapters.carried import Int32
from rollout.adapters.facts import ALL_FACTS, SAMPLER, Facts, complete
from rollout.adapters.groups import checked
from rollout.adapters.importing import Reader
from rollout.adapters.lines import Lines
from rollout.adapters.sglang_jsonl import recorded_params
from rollout.engines.base import Completion
from rollout.engines.vllm.request import LOWEST_TEMPERATURE
from rollout.errors import (
    BadOffsets,
    BadValue,
    LengthMismatch,
    NotReplayable,
    NullValue,
    SamplingMaskMissing,
)
from rollout.record import Rollout
from rollout.sampling import canonical_json
from rollout.support import Support

RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
"""Sampling parameters that `SamplingParams` knows by another name."""

HARMLESS = {
    "n",  # each choice is a rollout of its own
    "logprobs",
    "prompt_logprobs",
    "flat_logprobs",
    "detokenize",
    "include_stop_str_in_output",
    "output_kind",
    "skip_reading_prefix_cache",
    # these only exclude ids, which a support records
    "bad_words",
    "allowed_token_ids",
    "structured_outputs",
}
"""Sampling parameters that move no logit of a support."""


class _Logprob(msgspec.Struct):
    logprob: float | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Choice(msgspec.Struct):
    """A choice of a response, or a `CompletionOutput`; what is Any has several forms."""

    token_ids: Any = None
    sampling_mask: Any = None
    sampling_mask_logprobs: Any = None
    logprobs: _Logprobs | list[dict[int, _Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text: str | None = None
    index: Int32 | None = None


class _Request(msgspec.Struct):
    token_ids: Any = None
    sampling_params: dict[str, Any] = {}


class _Response(msgspec.Struct):
    choices: list[_Choice]


class _Exchange(msgspec.Struct):
    request: _Request
    response: _Response
    id: str | int | None = None


class _Output(msgspec.Struct):
    """A `RequestOutput`."""

    outputs: list[_Choice]
    prompt_token_ids: Any = None
    prompt: str | None = None
    request_id: str | None = None


class Answer(NamedTuple):
    """One sampled sequence of vLLM's, whichever way it came."""

    where: str
    prompt_id: str
    sample_index: int
    prompt_ids: Any
    prompt_text: str | None
    params: dict[str, Any]  # the sampling parameters that are known
    choice: _Choice


class Item(NamedTuple):
    """An answer, or why a line holds none; with the line."""

    answer: Answer | BadValue
    line: bytes


def from_vllm(answers: Iterable[Any], facts: Facts | None = None) -> Iterator[Rollout]:
    """The rollouts of what vLLM returned: `RequestOutput`s, or dicts with request and response.

    `facts` say how these were sampled where a request does not: what one leaves out, the server
    takes from the model's generation_config.json. Raises `BadFacts`, `SamplingMaskMissing`, and the
    `DataError` of the first rule that an answer breaks.
    """
    known = facts or Facts()
    return checked(
        _parse(answer, known)
        for number, given in enumerate(answers)
        for answer in _answers(given, f"answer {number}", f"answer-{number:06d}")
    )


def parse(item: Item, number: int, facts: Facts) -> Rollout:
    """The rollout of one answer; raises the `RolloutError` that says why it cannot be one."""
    if isinstance(item.answer, BadValue):
        raise item.answer
    return _parse(item.answer, facts)


def _parse(answer: Answer, facts: Facts) -> Rollout:
    where, choice = answer.where, answer.choice
    for name, ids in (("prompt", answer.prompt_ids), ("output", choice.token_ids)):
        if ids is None:
            raise NullValue(f"{where}: no token_ids of the {name}")
    output = int32(choice.token_ids, f"{where}: token_ids")
    support, support_logprobs = _support(choice, where)
    if len(support) != len(output):
        raise LengthMismatch(f"{where}: a sampling mask of {len(support)} for {len(output)} tokens")
    if len(empty := np.flatnonzero(support.counts == 0)):
        raise BadOffsets(f"{where}: no ids for token {empty[0]}; vLLM samples every token")
    params = {RENAMED.get(name, name): value for name, value in answer.params.items()}
    if params.get("top_k") == 0:
        params["top_k"] = -1  # both are no limit
    reason = choice.finish_reason or "none"
    settings = complete(params | {"finish_reason": reason}, facts, where, ALL_FACTS)
    params |= {name: settings[name] for name in SAMPLER}
    sampled = recorded_params({k: v for k, v in params.items() if k not in HARMLESS})
    if 0 < sampled.temperature < LOWEST_TEMPERATURE:
        raise NotReplayable(
            f"{where}: temperature {sampled.temperature:g} was asked for, and vLLM samples at no "
            f"less than {LOWEST_TEMPERATURE}; say that one if it did"
        )
    completion = Completion(
        output_ids=output,
        support=support,
        sampling_logprobs=_sampling_logprobs(choice, output, support, support_logprobs, where),
        full_logprobs=None,
        support_logprobs=support_logprobs,
        finish_reason=reason,
        stop_match=None if choice.stop_reason is None else str(choice.stop_reason),
        text=choice.text,
        engine_meta={"engine": "vllm", "source": "import"},
    )
    return completion.to_rollout(
        prompt_id=answer.prompt_id,
        sample_index=answer.sample_index,
        prompt_ids=int32(answer.prompt_ids, f"{where}: token_ids of the prompt"),
        prompt_text=answer.prompt_text,
        params=sampled,
        sampling_params=canonical_json(plain(params)),
    )


def _support(choice: _Choice, where: str) -> tuple[Support, NDArray[np.float32] | None]:
    """Supports in either form, and the logprobs of their ids where there are some."""
    mask, logprobs, offsets = choice.sampling_mask, choice.sampling_mask_logprobs, None
    if mask is None:
        raise SamplingMaskMissing(
            f"{where}: no sampling mask; serve with --return-sampling-mask. Releases that shard "
            "sampling over tensor-parallel ranks return null"
        )
    if not isinstance(mask, list):
        held = (
            mask if isinstance(mask, Mapping) else vars(mask) if hasattr(mask, "__dict__") else {}
        )
        mask, offsets = held.get("token_ids"), held.get("offsets")
        logprobs = held.get("logprobs") if logprobs is None else logprobs
    named = f"{where}: sampling mask"
    if offsets is not None:
        support = Support(int32(mask, named), int32(offsets, f"{named}, offsets").astype(np.int64))
    else:
        counts, flat = _rows(mask, named)
        support = Support.from_counts(int32(flat, named), counts)
    if logprobs is None:
        return support, None
    counts, flat = _rows(logprobs, f"{named}, logprobs")
    if not np.array_equal(counts, support.counts):
        raise LengthMismatch(f"{named}: its logprobs are not one for each id")
    return support, float32(flat, f"{named}, logprobs")


def _rows(rows: Any, where: str) -> tuple[NDArray[np.int64], list[Any]]:
    try:
        counts = np.array([len(row) for row in rows], np.int64)
        return counts, list(chain.from_iterable(rows))
    except TypeError as error:
        raise BadValue(f"{where}: must be a list for each token ({error})") from error


def _sampling_logprobs(
    choice: _Choice,
    output: NDArray[np.int32],
    support: Support,
    support_logprobs: NDArray[np.float32] | None,
    where: str,
) -> NDArray[np.float32]:
    """[R] Of the sampled tokens: as returned for them, or else as their supports hold them."""
    given = choice.logprobs
    returned: Any  # a list of what `_logprob` reads
    returned = given.content if isinstance(given, _Logprobs) else given
    if returned is None and support_logprobs is not None:
        is_sampled = support.ids == output[support.rows]
        if not np.array_equal(support.rows[is_sampled], np.arange(len(output))):
            raise BadValue(f"{where}: a sampled id is not once in its sampling mask")
        sampled: NDArray[np.float32] = support_logprobs[is_sampled]
        return sampled
    if returned is None:
        raise NullValue(f"{where}: no logprobs; ask with logprobs 1")
    if len(returned) != len(output):
        raise LengthMismatch(f"{where}: {len(returned)} logprobs for {len(output)} tokens")
    tokens = zip(returned, output.tolist(), strict=True)
    return float32([_logprob(row, token) for row, token in tokens], f"{where}: logprobs")


def _logprob(row: _Logprob | dict[int, _Logprob], token: int) -> float | None:
    """Of the sampled token, where a row has it alone, or among others by their ids."""
    entry = row.get(token) if isinstance(row, dict) else row
    return None if entry is None else entry.logprob


def _answers(given: Any, where: str, default_id: str) -> Iterator[Answer]:
    """Each sequence of what vLLM returned for one prompt; `BadValue` if it is not that."""
    answer: _Exchange | _Output
    try:
        if isinstance(given, Mapping):
            answer = msgspec.convert(given, _Exchange)
        else:
            answer = msgspec.convert(given, _Output, from_attributes=True)
    except msgspec.ValidationError as error:
        raise BadValue(
            f'{where}: must be {{"request": …, "response": …}} or a RequestOutput: {error}'
        ) from error
    params: dict[str, Any] = {}
    prompt_text = None
    prompt_id: str | int | None
    if isinstance(answer, _Exchange):
        prompt_ids, params = answer.request.token_ids, answer.request.sampling_params
        prompt_id, choices = answer.id, answer.response.choices
    else:
        prompt_ids, prompt_text = answer.prompt_token_ids, answer.prompt
        prompt_id, choices = answer.request_id, answer.outputs
    for place, choice in enumerate(choices):
        yield Answer(
            where=where,
            prompt_id=default_id if prompt_id is None else str(prompt_id),
            sample_index=place if choice.index is None else choice.index,
            prompt_ids=prompt_ids,
            prompt_text=prompt_text,
            params={name: value for name, value in params.items() if value is not None},
            choice=choice,
        )


def _items(path: Path) -> Iterator[tuple[int, Item]]:
    for number, line in Lines(path):
        try:
            given = msgspec.json.decode(line)
            answers = list(_answers(given, f"line {number}", f"line-{number:06d}"))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            yield number, Item(BadValue(f"line {number}: not JSON ({error})"), line)
        except BadValue as error:
            yield number, Item(error, line)
        else:
            yield from ((number, Item(answer, line)) for answer in answers)


READER = Reader(
    items=lambda path: list(_items(path)), parse=parse, body=lambda item: item.line, numbers="line"
)

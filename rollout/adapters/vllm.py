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

from rollout.adapters.arrays import float32, int32
from rollout.adapters.facts import Facts, complete
from rollout.adapters.groups import checked
from rollout.adapters.importing import Reader
from rollout.adapters.sglang_jsonl import recorded_params
from rollout.engines.base import Completion
from rollout.errors import (
    BadOffsets,
    BadValue,
    ConfigError,
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

LOWEST_TEMPERATURE = 0.01
"""vLLM samples a positive temperature below this at this (`vllm/sampling_params.py`)."""


class Answer(NamedTuple):
    """One sampled sequence of vLLM's, whichever way it came; `line` is where it stood in a file."""

    where: str
    prompt_id: str
    prompt: Any  # has the prompt: a request, or a `RequestOutput`
    params: Mapping[str, Any]  # the sampling parameters that are known
    choice: Any  # of a response, or a `CompletionOutput`
    sample_index: int
    line: bytes = b""


def from_vllm(answers: Iterable[Any], facts: Facts | None = None) -> Iterator[Rollout]:
    """The rollouts of what vLLM returned: `RequestOutput`s, or dicts with request and response.

    `facts` say how these were sampled where a request does not: what one leaves out, the server
    takes from the model's generation_config.json. Raises `BadFacts`, `SamplingMaskMissing`, and the
    `DataError` of the first rule that an answer breaks.
    """
    known = facts or Facts()
    return checked(
        parse(choice, number, known)
        for number, answer in enumerate(answers)
        for choice in _choices(answer, f"answer {number}", f"answer-{number:06d}")
    )


def parse(answer: Answer, number: int, facts: Facts) -> Rollout:
    """The rollout of one answer; raises the `RolloutError` that says why it cannot be one."""
    where, choice = answer.where, answer.choice
    if choice is None:
        raise BadValue(
            f'{where}: must be {{"request": …, "response": …}}, the response with its choices'
        )
    prompt_ids = _get(answer.prompt, "prompt_token_ids", "token_ids")
    output_ids = _get(choice, "token_ids")
    if prompt_ids is None or output_ids is None:
        raise NullValue(
            f"{where}: no token_ids of the {'prompt' if prompt_ids is None else 'output'}"
        )
    output = int32(output_ids, f"{where}: token_ids")
    support, support_logprobs = _support(choice, where)
    if len(support) != len(output):
        raise LengthMismatch(f"{where}: a sampling mask of {len(support)} for {len(output)} tokens")
    if len(empty := np.flatnonzero(support.counts == 0)):
        raise BadOffsets(f"{where}: no ids for token {empty[0]}; vLLM samples every token")
    params = {RENAMED.get(name, name): value for name, value in answer.params.items()}
    if params.get("top_k") == 0:
        params["top_k"] = -1
    settings = complete(params, facts, where)
    if 0 < settings["temperature"] < LOWEST_TEMPERATURE:
        raise NotReplayable(
            f"{where}: temperature {settings['temperature']:g} was asked for, and vLLM samples at "
            f"no less than {LOWEST_TEMPERATURE}; say that one if it did"
        )
    checked = {name: value for name, value in params.items() if name not in HARMLESS}
    stop = _get(choice, "stop_reason")
    completion = Completion(
        output_ids=output,
        support=support,
        sampling_logprobs=_sampling_logprobs(choice, output, support, support_logprobs, where),
        full_logprobs=None,
        support_logprobs=support_logprobs,
        finish_reason=_get(choice, "finish_reason") or "none",
        stop_match=None if stop is None else str(stop),
        text=_get(choice, "text"),
        engine_meta={"engine": "vllm", "source": "import"},
    )
    return completion.to_rollout(
        prompt_id=answer.prompt_id,
        sample_index=answer.sample_index,
        prompt_ids=int32(prompt_ids, f"{where}: token_ids of the prompt"),
        prompt_text=_get(answer.prompt, "prompt"),
        params=recorded_params(checked | settings),
        sampling_params=canonical_json(params | settings),
    )


def _support(choice: Any, where: str) -> tuple[Support, NDArray[np.float32] | None]:
    """Supports in either form, and the logprobs of their ids where there are some."""
    mask = _get(choice, "sampling_mask")
    logprobs = _get(choice, "sampling_mask_logprobs")
    if mask is None:
        raise SamplingMaskMissing(
            f"{where}: no sampling mask; serve with --return-sampling-mask. Releases that shard "
            "sampling over tensor-parallel ranks return null"
        )
    offsets = None
    if not isinstance(mask, list):
        offsets = _get(mask, "offsets")
        logprobs = _get(mask, "logprobs") if logprobs is None else logprobs
        mask = _get(mask, "token_ids")
    if offsets is not None:
        ends = int32(offsets, f"{where}: offsets of the sampling mask").astype(np.int64)
        support = Support(int32(mask, f"{where}: ids of the sampling mask"), ends)
    else:
        counts, flat = _rows(mask, f"{where}: sampling mask")
        support = Support.from_counts(int32(flat, f"{where}: sampling mask"), counts)
    if logprobs is None:
        return support, None
    counts, flat = _rows(logprobs, f"{where}: logprobs of the sampling mask")
    if not np.array_equal(counts, support.counts):
        raise LengthMismatch(f"{where}: logprobs of the sampling mask are not one for each id")
    return support, float32(flat, f"{where}: logprobs of the sampling mask")


def _rows(rows: Any, where: str) -> tuple[NDArray[np.int64], list[Any]]:
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise BadValue(f"{where}: must be a list for each token")
    return np.array([len(row) for row in rows], np.int64), list(chain.from_iterable(rows))


def _sampling_logprobs(
    choice: Any,
    output: NDArray[np.int32],
    support: Support,
    support_logprobs: NDArray[np.float32] | None,
    where: str,
) -> NDArray[np.float32]:
    """[R] Of the sampled tokens: as returned for them, or else as their supports hold them."""
    returned = _get(choice, "logprobs")
    content = _get(returned, "content") if returned is not None else None
    if content is not None:
        values: list[Any] = [_get(token, "logprob") for token in content]
    elif returned is not None:
        if len(returned) != len(output):
            raise LengthMismatch(f"{where}: {len(returned)} logprobs for {len(output)} tokens")
        found = [_get(row, token) for row, token in zip(returned, output.tolist(), strict=True)]
        values = [_get(entry, "logprob") for entry in found]
    elif support_logprobs is not None:
        is_sampled = support.ids == output[support.rows]
        if is_sampled.sum() != len(output):
            raise BadValue(f"{where}: a sampled id is not once in its sampling mask")
        sampled: NDArray[np.float32] = support_logprobs[is_sampled]
        return sampled
    else:
        raise NullValue(f"{where}: no logprobs; ask with logprobs 1")
    return float32(values, f"{where}: logprobs")


def _get(thing: Any, *names: Any) -> Any:
    """The first of `names` that `thing`, a mapping or an object, has; None if it has none."""
    for name in names:
        if isinstance(thing, Mapping):
            value = thing.get(name)
        else:
            value = getattr(thing, name, None) if isinstance(name, str) else None
        if value is not None:
            return value
    return None


def _choices(answer: Any, where: str, default_id: str, line: bytes = b"") -> Iterator[Answer]:
    """Each sequence of an answer; one without a choice, for `parse` to refuse, if it has none."""
    if isinstance(answer, Mapping):
        request, response = answer.get("request"), answer.get("response")
        choices, params = _get(response, "choices"), _get(request, "sampling_params")
        prompt_id = answer.get("id")
    else:
        request, choices, params = answer, _get(answer, "outputs"), {}
        prompt_id = _get(answer, "request_id")
    if not isinstance(choices, list) or not choices or not isinstance(params or {}, Mapping):
        choices = [None]
    for place, choice in enumerate(choices):
        index = _get(choice, "index")
        yield Answer(
            where=where,
            prompt_id=default_id if prompt_id is None else str(prompt_id),
            prompt=request,
            params={k: v for k, v in (params or {}).items() if v is not None},
            choice=choice,
            sample_index=place if index is None else int(index),
            line=line,
        )


def _items(path: Path) -> Iterator[tuple[int, Answer]]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            for answer in _choices(_decoded(line), f"line {number}", f"line-{number:06d}", line):
                yield number, answer


def _decoded(line: bytes) -> Any:
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # `parse` refuses it


READER = Reader(items=_items, parse=parse, body=lambda answer: answer.line, numbers="line")

"""Import of recorded `/generate` replies.

One line is one rollout: ``{"sampling_params": …, "response": <body of /generate>}``, with optional
``rid`` and ``prompt``. The reply must hold `prompt_token_ids` (ask with `return_prompt_token_ids`):
without the prompt's tokens nothing can be replayed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from rollout.adapters.facts import Facts
from rollout.adapters.importing import Imported, Reader, import_file
from rollout.adapters.lines import Lines
from rollout.blocks import explain
from rollout.engines.json_rows import ids_array
from rollout.engines.sglang.reply import Reply, completion
from rollout.errors import (
    EmptyPrompt,
    NotReplayable,
    ReplyMalformed,
    RolloutError,
)
from rollout.record import Rollout
from rollout.sampling import SamplingParams, canonical_json


class _Line(msgspec.Struct):
    sampling_params: dict[str, Any]
    response: Reply
    rid: str | None = None
    prompt: str | None = None


_decode = msgspec.json.Decoder(_Line).decode


def import_sglang_jsonl(
    file: Path, out: Path, *, vocab_size: int | None = None, tokenizer: dict[str, Any] | None = None
) -> Imported:
    """Convert `file` into the run directory `out`; every line ends in a shard or in rejected.jsonl.

    Raises `ConfigError` if the file cannot be read, or not twice, as a pipe.
    """
    return import_file(
        READER, file, out, name="sglang-jsonl", vocab_size=vocab_size, tokenizer=tokenizer
    )


def parse_line(line: bytes, default_id: str, *, unchecked: bool = False) -> Rollout:
    """One line as a `Rollout`; raises the `RolloutError` that says why it cannot be one.

    `unchecked` lets a sampled id outside its support through, so that a file can be explained.
    """
    try:
        parsed = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReplyMalformed(f"not a recorded reply: {error}") from error
    if not parsed.response.prompt_token_ids:
        raise EmptyPrompt(
            "the reply has no prompt_token_ids; record with return_prompt_token_ids: true"
        )
    params = recorded_params(parsed.sampling_params)
    completed = completion(parsed.response, None, unchecked=unchecked)
    return replace(completed, engine_meta={"engine": "sglang", "source": "import"}).to_rollout(
        prompt_id=parsed.rid or default_id,
        sample_index=0,
        prompt_ids=ids_array(parsed.response.prompt_token_ids, "prompt_token_ids"),
        prompt_text=parsed.prompt,
        params=params,
        sampling_params=canonical_json(parsed.sampling_params),
    )


def _parse(line: bytes, number: int, facts: Facts) -> Rollout:
    return parse_line(line, _default_id(number))


def _unchecked(line: bytes, number: int) -> Rollout | None:
    """What can be read of a line that breaks a rule; None where that is not enough."""
    try:
        return parse_line(line, _default_id(number), unchecked=True)
    except RolloutError:
        return None


def _default_id(number: int) -> str:
    return f"line-{number:06d}"


def recorded_params(sent: dict[str, Any]) -> SamplingParams:
    """The settings of a recorded request. `temperature` must stand there: it is never guessed.

    A missing or -1 `top_k` is no limit (SGLang 0.5.18 served that). `NotReplayable` for what moves
    logits and for what is not known here.
    """
    if "temperature" not in sent:
        raise NotReplayable("sampling_params: no temperature; every logprob depends on it")
    known = {key: _as_list(key, value) for key, value in sent.items() if value is not None}
    try:
        params = SamplingParams.model_validate(known)
    except ValidationError as error:
        raise NotReplayable(f"sampling_params: {explain(error)}") from error
    bounded = params if params.top_k not in (None, -1) else params.model_copy(update={"top_k": 1})
    bounded.check_replayable()
    return params


def _as_list(key: str, value: Any) -> Any:
    """SGLang takes one stop or a list of them."""
    is_stop = key in ("stop", "stop_token_ids", "stop_regex")
    return [value] if is_stop and not isinstance(value, list) else value


READER = Reader(
    items=Lines,
    parse=_parse,
    body=lambda line: line,
    unchecked=_unchecked,
    numbers="line",
    takes_facts=False,
)

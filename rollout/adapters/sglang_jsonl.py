"""Import of recorded `/generate` replies.

One line is one rollout: ``{"sampling_params": …, "response": <body of /generate>}``, with optional
``rid`` and ``prompt``. The reply must hold `prompt_token_ids` (ask with `return_prompt_token_ids`):
without the prompt's tokens nothing can be replayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
from pydantic import ValidationError

from rollout.blocks import explain
from rollout.diagnosis import Diagnosis
from rollout.engines.sglang.json_rows import ids_array
from rollout.engines.sglang.reply import Reply, completion
from rollout.errors import (
    ConfigError,
    ContentError,
    DiskFull,
    EmptyPrompt,
    NotReplayable,
    ReplyMalformed,
    RolloutError,
    SampledOutsideSupport,
)
from rollout.record import Rollout
from rollout.record_faults import RecordJudge, reason_of
from rollout.sampling import SamplingParams, canonical_json
from rollout.writer import RunWriter


class _Line(msgspec.Struct):
    sampling_params: dict[str, Any]
    response: Reply
    rid: str | None = None
    prompt: str | None = None


_decode = msgspec.json.Decoder(_Line).decode


@dataclass(frozen=True)
class Imported:
    """What an import did: rows stored, tokens in them, and rejections by reason.

    `diagnoses` judges the whole file, stored lines and rejected ones: one cause may break several
    rules, and then it is the reason.
    """

    rollouts: int
    output_tokens: int
    rejected: dict[str, int]
    diagnoses: tuple[Diagnosis, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "rollouts": self.rollouts,
            "output_tokens": self.output_tokens,
            "rejected": self.rejected,
            "diagnoses": [d.as_dict() for d in self.diagnoses],
        }


def import_sglang_jsonl(
    file: Path, out: Path, *, vocab_size: int | None = None, tokenizer: dict[str, Any] | None = None
) -> Imported:
    """Convert `file` into the run directory `out`; every line ends in a shard or in rejected.jsonl.

    Raises `ConfigError` if the file cannot be read, or not twice, as a pipe.
    """
    identity = {
        "imported": {"from": "sglang-jsonl", "file": file.name},
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
    }
    rollouts = tokens = 0
    judge, refused = RecordJudge(vocab_size), list[_Refused]()
    with _opened(file) as lines, RunWriter(out, identity, vocab_size=vocab_size) as writer:
        for number, start, line in lines:
            name, rollout = f"line-{number:06d}", None
            try:
                rollout = parse_line(line, name)
                writer.write(rollout)
            except DiskFull:
                raise
            except RolloutError as error:
                if isinstance(error, SampledOutsideSupport):
                    rollout = rollout or _unchecked(line, name)
                if not isinstance(error, ContentError):
                    rollout = None  # not one that can be judged
                judged = None
                if rollout is not None:
                    judge.add(rollout)
                    judged = rollout.rollout_id
                _forget_traceback(error)
                refused.append(_Refused(number, start, error, judged))
            else:
                rollouts += 1
                tokens += rollout.num_output_tokens
                judge.add(rollout, faults=())
        diagnoses = judge.diagnose()
        # the reason is known at the end of the file, so its lines are read once more
        rejected: Counter[str] = Counter()
        for one in refused:
            reason = one.reason(diagnoses)
            rejected[reason] += 1
            body = lines.again(one.start)
            writer.reject(one.error, body, reason=reason, line=one.number)
    return Imported(rollouts, tokens, dict(rejected), tuple(diagnoses))


class _Refused(NamedTuple):
    number: int
    start: int  # of the line in the file
    error: RolloutError
    rollout_id: str | None  # None where too little could be read to judge it with the others

    def reason(self, diagnoses: Sequence[Diagnosis]) -> str:
        if self.rollout_id is None:
            return self.error.code
        return reason_of(self.rollout_id, self.error.code, diagnoses)


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


def _unchecked(line: bytes, default_id: str) -> Rollout | None:
    """What can be read of a line that breaks a rule; None where that is not enough."""
    try:
        return parse_line(line, default_id, unchecked=True)
    except RolloutError:
        return None


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


def _forget_traceback(error: RolloutError) -> None:
    """Let go of what was read: frames hold it as long as the error that came from them."""
    error.__traceback__ = error.__cause__ = error.__context__ = None


class _Lines:
    """The lines of a file that are not blank: number, where it starts, and bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def __iter__(self) -> Iterator[tuple[int, int, bytes]]:
        start = 0
        for number, line in enumerate(self._file, start=1):
            if line.strip():
                yield number, start, line.rstrip(b"\r\n")
            start += len(line)

    def again(self, start: int) -> bytes:
        self._file.seek(start)
        return self._file.readline().rstrip(b"\r\n")


@contextmanager
def _opened(path: Path) -> Iterator[_Lines]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    with file:
        if not file.seekable():
            raise ConfigError(f"{path}: must be a file that can be read twice, got a pipe; save it")
        yield _Lines(file)

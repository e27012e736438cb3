"""import_file(): a file of another tool into a run directory, item by item."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.adapters.facts import Facts
from rollout.diagnosis import Diagnosis
from rollout.errors import BadFacts, DiskFull, RolloutError, SampledOutsideSupport
from rollout.record import Rollout
from rollout.record_faults import explain_record
from rollout.writer import RunWriter

MAX_EXPLAINED = 1000  # rejected rollouts kept in memory to be judged together


@dataclass(frozen=True, kw_only=True)
class Reader:
    """How the files of one format are read.

    `items` raises for a file that is not of this format at all; `parse` raises the `RolloutError`
    that says why one item cannot be a rollout, and leaves the content rules to the writer.
    """

    items: Callable[[Path], Iterable[tuple[int, Any]]]  # with the number that a person would use
    parse: Callable[[Any, int, Facts], Rollout]
    body: Callable[[Any], bytes]  # as rejected.jsonl keeps it
    #: As `parse`, for an item that `parse` refuses, so that the file can be explained.
    unchecked: Callable[[Any, int], Rollout | None] | None = None
    numbers: str = "sample"  # what the number counts: rejected.jsonl's key for it


@dataclass(frozen=True)
class Imported:
    """What an import did: rows stored, tokens in them, and rejections by reason.

    `diagnoses` judges the rejected items together: one cause may break several rules.
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


def import_file(
    reader: Reader,
    file: Path,
    out: Path,
    *,
    name: str,
    facts: Facts | None = None,
    vocab_size: int | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> Imported:
    """Convert `file` into the run directory `out`; every item ends in a shard or in rejected.jsonl.

    Nothing is made before the whole file was read: `ConfigError` if it cannot be, `BadFacts` if
    `facts` lack what the file does not say. `progress` is told items done, of how many, and tokens.
    """
    items = list(reader.items(file))
    parsed = [_attempt(reader, item, number, facts or Facts()) for number, item in items]
    identity = {
        "imported": {"from": name, "file": file.name},
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
    }
    rollouts = tokens = 0
    rejected: Counter[str] = Counter()
    refused: list[Rollout] = []  # as parsed, before the content rules
    with RunWriter(out, identity, vocab_size=vocab_size) as writer:
        for done, ((number, item), result) in enumerate(zip(items, parsed, strict=True), start=1):
            try:
                if isinstance(result, RolloutError):
                    raise result
                writer.write(result)
            except DiskFull:
                raise  # of the directory, not of one item
            except RolloutError as error:
                rejected[error.code] += 1
                shown = _shown(reader, item, number, result)
                if shown is not None and len(refused) < MAX_EXPLAINED:
                    refused.append(shown)
                writer.reject(error, reader.body(item), **{reader.numbers: number})
            else:
                rollouts += 1
                tokens += result.num_output_tokens
            if progress is not None:
                progress(done, len(items), tokens)
    return Imported(rollouts, tokens, dict(rejected), tuple(explain_record(refused)))


def _attempt(reader: Reader, item: Any, number: int, facts: Facts) -> Rollout | RolloutError:
    try:
        return reader.parse(item, number, facts)
    except BadFacts:
        raise  # of the whole file, not of one item
    except RolloutError as error:
        return error


def _shown(
    reader: Reader, item: Any, number: int, parsed: Rollout | RolloutError
) -> Rollout | None:
    """What can be read of an item that was rejected."""
    if isinstance(parsed, Rollout):
        return parsed
    if reader.unchecked is not None and isinstance(parsed, SampledOutsideSupport):
        return reader.unchecked(item, number)
    return None

"""import_file(): a file of another tool into a run directory, item by item."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rollout.adapters.facts import Facts
from rollout.diagnosis import Diagnosis
from rollout.errors import (
    BadFacts,
    ConfigError,
    ContentError,
    DiskFull,
    RolloutError,
    SampledOutsideSupport,
)
from rollout.files import file_sha256
from rollout.record import Rollout
from rollout.record_faults import RecordJudge, reason_of
from rollout.rules import check_content, check_format
from rollout.writer import RunWriter


@dataclass(frozen=True, kw_only=True)
class Reader:
    """How the files of one format are read.

    `items` raises for a file that is not of this format at all, and is gone through more than once;
    `parse` raises the `RolloutError` that says why one item cannot be a rollout, and leaves the
    content rules to the writer.
    """

    items: Callable[[Path], Collection[tuple[int, Any]]]  # with a number that a person would use
    parse: Callable[[Any, int, Facts], Rollout]
    body: Callable[[Any], bytes]  # as rejected.jsonl keeps it
    #: As `parse`, for an item that `parse` refuses, so that the file can be explained.
    unchecked: Callable[[Any, int], Rollout | None] | None = None
    numbers: str = "sample"  # what the number counts: rejected.jsonl's key for it
    takes_facts: bool = True  # False where each item says how it was sampled


@dataclass(frozen=True)
class Imported:
    """What an import did: rows stored, tokens in them, and rejections by reason.

    `already_stored` counts what an earlier import of the same file had stored. `diagnoses` judges
    the whole file, stored items and rejected ones: one cause may break several rules, and then it
    is the reason.
    """

    rollouts: int
    output_tokens: int
    rejected: dict[str, int]
    already_stored: int = 0
    diagnoses: tuple[Diagnosis, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "rollouts": self.rollouts,
            "output_tokens": self.output_tokens,
            "rejected": self.rejected,
            "already_stored": self.already_stored,
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

    Nothing is made before it is known that the file can be read (`ConfigError`), and that `facts`
    say what it does not say (`BadFacts`). The same call again goes on where it stopped; another
    file, or other facts, into the same `out` raise `ConfigChanged`. `progress` is told items done,
    of how many, and tokens.
    """
    facts = facts or Facts()
    if file.is_fifo():
        raise ConfigError(f"{file}: must be a file that can be read twice, got a pipe; save it")
    items = reader.items(file)
    _check_facts(reader, items, facts, name)
    identity = {
        "imported": {
            "from": name,
            "file": file.name,
            "sha256": file_sha256(file),
            "facts": {k: v for k, v in asdict(facts).items() if v is not None},
        },
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
    }
    rollouts = tokens = already_stored = 0
    judge, refused = RecordJudge(vocab_size), dict[int, _Refused]()
    with RunWriter(out, identity, vocab_size=vocab_size) as writer:
        stored = set(writer.done)  # by an earlier import of the same bytes
        for done, (number, item) in enumerate(items, start=1):
            rollout = None
            try:
                rollout = reader.parse(item, number, facts)
                if is_stored := rollout.rollout_id in stored:
                    check_format(rollout)
                    check_content(rollout, vocab_size)
                    stored.remove(rollout.rollout_id)  # a second one of this id is rejected
                else:
                    writer.write(rollout)
            except DiskFull:
                raise  # of the directory, not of one item
            except RolloutError as error:
                refused[done] = _refuse(reader, item, number, rollout, error, judge)
            else:
                already_stored += is_stored
                rollouts += not is_stored
                tokens += 0 if is_stored else rollout.num_output_tokens
                judge.add(rollout, faults=())
            if progress is not None:
                progress(done, len(items), tokens)
        diagnoses = judge.diagnose()
        rejected: Counter[str] = Counter()
        # the reason is known at the end of the file, so that its items are gone through once more
        for done, (number, item) in enumerate(items if refused else (), start=1):
            if (one := refused.get(done)) is not None:
                reason = one.reason(diagnoses)
                rejected[reason] += 1
                where = {reader.numbers: number}
                writer.reject(one.error, reader.body(item), reason=reason, **where)
    return Imported(rollouts, tokens, dict(rejected), already_stored, tuple(diagnoses))


def _check_facts(
    reader: Reader, items: Collection[tuple[int, Any]], facts: Facts, name: str
) -> None:
    if not reader.takes_facts:
        if facts != Facts():
            raise BadFacts(f"{name}: each line says how it was sampled; leave out what says it")
        return
    for number, item in items:
        try:
            reader.parse(item, number, facts)
        except BadFacts:
            raise  # of the whole file, not of one item
        except RolloutError:
            continue  # it is met again


class _Refused(NamedTuple):
    error: RolloutError
    rollout_id: str | None  # None where too little could be read to judge it with the others

    def reason(self, diagnoses: Sequence[Diagnosis]) -> str:
        if self.rollout_id is None:
            return self.error.code
        return reason_of(self.rollout_id, self.error.code, diagnoses)


def _refuse(
    reader: Reader,
    item: Any,
    number: int,
    rollout: Rollout | None,
    error: RolloutError,
    judge: RecordJudge,
) -> _Refused:
    """Why `item` is rejected, after the judge has seen what can be read of it."""
    if isinstance(error, SampledOutsideSupport) and rollout is None and reader.unchecked:
        rollout = reader.unchecked(item, number)
    # frames hold what was read as long as the error that came from them
    error.__traceback__ = error.__cause__ = error.__context__ = None
    if rollout is None or not isinstance(error, ContentError):
        return _Refused(error, None)
    judge.add(rollout)
    return _Refused(error, rollout.rollout_id)

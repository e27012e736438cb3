"""Run: a run directory as a sequence of checked rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from rollout import schema
from rollout.annotations import Annotation, read_annotations, with_annotations
from rollout.conditions import Condition
from rollout.directory import file_name, read_manifest
from rollout.errors import (
    BadRolloutId,
    FormatError,
    NotARun,
    SchemaVersionUnknown,
    ShardDamaged,
)
from rollout.files import read_json
from rollout.record import Rollout
from rollout.rules import check_format
from rollout.shard import check_sha256, read_batches


class Shard(NamedTuple):
    """A shard as it was when its run was opened."""

    name: str
    batch_rows: tuple[int, ...]  # rows of each batch
    size_bytes: int


class Row(NamedTuple):
    """A checked rollout, and where its arrays lie."""

    rollout: Rollout
    batch: int  # place in `Run.batches`
    place: int  # in that batch


@dataclass(frozen=True, eq=False)
class Run:
    """An open run directory, live or finished: what was committed when it was opened.

    Opening checks every shard's hash (finished shards), schema and encoding; iterating checks the
    format rules of each row and raises the `FormatError` of the first that is broken. Arrays are
    views of memory-mapped shards. Shards are mapped one after another and no file stays open, so
    a run may have any number of them.
    """

    path: Path
    info: dict[str, Any]  # run.json
    shards: tuple[Shard, ...]
    annotations: Mapping[str, Annotation]  # by rollout id

    def __len__(self) -> int:
        """Number of rollouts."""
        return sum(sum(shard.batch_rows) for shard in self.shards)

    def __iter__(self) -> Iterator[Rollout]:
        """The rollouts in the order in which they were stored, with their later annotations."""
        return (row.rollout for row in self.rows())

    def where(self, *conditions: Condition) -> View:
        """The rollouts that meet every condition of `rollout.conditions`, or function of yours.

        Nothing is copied and nothing is read before the view is. Views of views are views::

            run.where(finished, reward_within(0.5)).where(lambda r: r.num_output_tokens < 4096)
        """
        return View(self, conditions)

    def stored(self) -> Iterator[Rollout]:
        """The rollouts as the shards hold them."""
        return (row.rollout for row in self._stored())

    def rows(self) -> Iterator[Row]:
        """What iterating yields, and where it lies."""
        for row in self._stored():
            (rollout,) = with_annotations([row.rollout], self.annotations)
            yield row._replace(rollout=rollout)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The Arrow batches, mapped anew; their rows are checked only by iterating over the run."""
        return (batch for _, batch in self._batches())

    def _stored(self) -> Iterator[Row]:
        seen: set[str] = set()
        for number, (where, batch) in enumerate(self._batches()):
            for place, rollout in enumerate(schema.from_batch(batch, where)):
                try:
                    check_format(rollout)
                except FormatError as error:
                    raise type(error)(f"{where}, {error}") from error
                if rollout.rollout_id in seen:
                    raise BadRolloutId(f"{where}, {rollout.rollout_id}: stored twice")
                seen.add(rollout.rollout_id)
                yield Row(rollout, number, place)

    def _batches(self) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Those that were there at opening, with their shard; a writer may have added more."""
        for shard in self.shards:
            path = self.path / shard.name
            batches = read_batches(path).batches[: len(shard.batch_rows)]
            if tuple(batch.num_rows for batch in batches) != shard.batch_rows:
                raise ShardDamaged(f"{path}: changed since the run was opened")
            for batch in batches:
                yield shard.name, batch

    @cached_property
    def vocab_size(self) -> int | None:
        """Vocabulary size of the tokenizer and model that collected, where known."""
        size = self.info.get("vocab_size")
        return int(size) if size is not None else None


@dataclass(frozen=True, eq=False)
class View:
    """Some of the rollouts of a run, in their order; each iteration asks the conditions anew."""

    run: Run
    conditions: tuple[Condition, ...]

    def __iter__(self) -> Iterator[Rollout]:
        return (row.rollout for row in self.rows())

    def rows(self) -> Iterator[Row]:
        """What iterating yields, and where it lies."""
        for row in self.run.rows():
            if all(holds(row.rollout) for holds in self.conditions):
                yield row

    def where(self, *conditions: Condition) -> View:
        """Those of them that meet these conditions too."""
        return View(self.run, self.conditions + conditions)


def open_run(path: str | Path) -> Run:
    """Open a run directory for reading; a writer may be at work in it.

    Raises `NotARun` and the other `FormatError`s.
    """
    path = Path(path)
    if not path.is_dir():
        raise NotARun(f"{path}: no such directory; `rollout collect` and `rollout import` make one")
    info = read_json(path / schema.RUN_FILE)
    if (version := info.get("schema_version")) != schema.SCHEMA_VERSION:
        raise SchemaVersionUnknown(
            f"{path / schema.RUN_FILE}: schema version {version!r}, this release reads "
            f"{schema.SCHEMA_VERSION}; use the release that wrote it, or upgrade"
        )
    hashes = {name: line["sha256"] for name, line in read_manifest(path).items()}
    names = sorted({*_state(path / schema.STATE_FILE), *hashes})
    shards = tuple(_open_shard(path / name, hashes.get(name)) for name in names)
    return Run(path, info, shards, read_annotations(path))


def _open_shard(path: Path, sha256: str | None) -> Shard:
    if sha256 is not None:
        check_sha256(path, sha256)
    content = read_batches(path)
    rows = tuple(batch.num_rows for batch in content.batches)
    return Shard(path.name, rows, content.size_bytes)


def _state(path: Path) -> Iterator[str]:
    """The file name of every shard that its writer has named."""
    entries = read_json(path).get("_data_files")
    if not isinstance(entries, list):
        raise FormatError(f"{path}: _data_files is {entries!r}, must be a list")
    for entry in entries:
        yield file_name(entry, "filename", path)

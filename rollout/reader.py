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
        return with_annotations(self.stored(), self.annotations)

    def stored(self) -> Iterator[Rollout]:
        """The rollouts as the shards hold them."""
        seen: set[str] = set()
        for shard in self.shards:
            for batch in self._batches(shard):
                for rollout in schema.from_batch(batch, shard.name):
                    try:
                        check_format(rollout)
                    except FormatError as error:
                        raise type(error)(f"{shard.name}, {error}") from error
                    if rollout.rollout_id in seen:
                        raise BadRolloutId(f"{shard.name}, {rollout.rollout_id}: stored twice")
                    seen.add(rollout.rollout_id)
                    yield rollout

    def _batches(self, shard: Shard) -> list[pa.RecordBatch]:
        """Those that were there at opening; a writer may have added more."""
        batches = read_batches(self.path / shard.name).batches[: len(shard.batch_rows)]
        if tuple(batch.num_rows for batch in batches) != shard.batch_rows:
            raise ShardDamaged(f"{self.path / shard.name}: changed since the run was opened")
        return batches

    @cached_property
    def vocab_size(self) -> int | None:
        """Vocabulary size of the tokenizer and model that collected, where known."""
        size = self.info.get("vocab_size")
        return int(size) if size is not None else None


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

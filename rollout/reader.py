"""Run: a run directory as a sequence of checked rollouts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from rollout import schema
from rollout.errors import BadRolloutId, FormatError, NotARun, ShardDamaged, ShardHashMismatch
from rollout.files import read_json, read_lines
from rollout.record import Rollout
from rollout.rules import check_format
from rollout.shard import read_batches


@dataclass(frozen=True, eq=False)
class Run:
    """An open run directory, live or finished: what was committed when it was opened.

    Opening checks every shard's hash (finished shards), schema and encoding; iterating checks the
    format rules of each row and raises the `FormatError` of the first that is broken. Arrays are
    views of the memory-mapped shards.
    """

    path: Path
    info: dict[str, Any]  # run.json
    shards: tuple[tuple[str, list[pa.RecordBatch]], ...]  # file name and batches

    def __len__(self) -> int:
        """Number of rollouts."""
        return sum(batch.num_rows for _, batches in self.shards for batch in batches)

    def __iter__(self) -> Iterator[Rollout]:
        seen: set[str] = set()
        for name, batches in self.shards:
            for batch in batches:
                for rollout in schema.from_batch(batch, name):
                    try:
                        check_format(rollout)
                    except FormatError as error:
                        raise type(error)(f"{name}, {error}") from error
                    if rollout.rollout_id in seen:
                        raise BadRolloutId(f"{name}, {rollout.rollout_id}: stored twice")
                    seen.add(rollout.rollout_id)
                    yield rollout

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
    hashes = {line["file"]: line["sha256"] for line in read_lines(path / schema.MANIFEST_FILE)}
    state = read_json(path / "state.json")
    names = sorted({entry["filename"] for entry in state["_data_files"]} | hashes.keys())
    shards = tuple((name, _read_shard(path / name, hashes.get(name))) for name in names)
    return Run(path, info, shards)


def _read_shard(path: Path, sha256: str | None) -> list[pa.RecordBatch]:
    if not path.exists():
        raise ShardDamaged(f"{path}: listed in the run directory, but the file is not there")
    if sha256 is not None:
        with open(path, "rb") as file:
            got = hashlib.file_digest(file, "sha256").hexdigest()
        if got != sha256:
            raise ShardHashMismatch(
                f"{path}: sha256 is {got[:12]}…, the manifest says {sha256[:12]}…; the file was "
                "changed or cut after it was finished: restore it from where it was copied"
            )
    shard_schema, batches = read_batches(path)
    schema.check_schema(shard_schema, path.name)
    return batches

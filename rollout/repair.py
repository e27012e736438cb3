"""repair(): make the run directory of a killed writer final, without going on with the run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from rollout import schema
from rollout.compression import check_sizes
from rollout.directory import (
    file_name,
    locked,
    manifest_line,
    numbered_shards,
    read_manifest,
    write_dataset_info,
    write_state,
)
from rollout.errors import FormatError, ShardDamaged
from rollout.files import (
    append_line,
    disk_full_is_an_error,
    file_sha256,
    mend_last_line,
    read_json,
    sync_directory,
    torn_line_bytes,
    write_lines,
)
from rollout.shard import END_OF_STREAM, count_torn_bytes, cut_torn_tail, was_started

LINE_FILES = (schema.MANIFEST_FILE, schema.ERRORS_FILE, schema.REJECTED_FILE)

Action = Literal[
    "whole",  # finished, and what its manifest line says
    "finished",  # got its manifest line; what stood behind its marker was cut
    "salvaged",  # breaks off: its whole batches were kept, its own bytes moved aside
    "unstarted",  # killed before its schema was written: never a row; its name is used again
    "changed",  # finished and readable, but not what its manifest line says: not touched
    "missing",  # named in the run directory, but not there
    "unreadable",  # not even its schema can be read: not touched
]
PROBLEMS = ("changed", "missing", "unreadable")


@dataclass(frozen=True)
class ShardRepair:
    """What was done about one shard. `bytes_cut` of a salvaged shard stay in `original`."""

    file: str
    action: Action
    rows: int = 0
    bytes_cut: int = 0
    original: str | None = None


@dataclass(frozen=True)
class Repair:
    """What `repair` did, or would do."""

    shards: tuple[ShardRepair, ...]
    lines_cut: dict[str, int]  # bytes of a torn last line, by file
    files_written: tuple[str, ...]  # state.json and what else was not as it must be

    @property
    def problems(self) -> tuple[ShardRepair, ...]:
        """The shards that only a copy from elsewhere can bring back."""
        return tuple(shard for shard in self.shards if shard.action in PROBLEMS)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def repair(path: Path, *, dry_run: bool = False) -> Repair:
    """Cut torn tails, finish what a killed writer left, and salvage shards that break off.

    Nothing is deleted but what a reader never saw: the bytes behind an end-of-stream marker, and
    torn last lines. A shard that breaks off is moved to ``<name>.damaged``; its whole batches
    stand under its name. Killed at any moment, `repair` can be run again. With `dry_run` nothing is
    changed. Raises `NotARun`, `RunLocked`, `DiskFull`, and the `FormatError` of a file that is not
    of this format.
    """
    read_json(path / schema.RUN_FILE)
    busy = "another process is writing here, so nothing is torn; wait until it ends"
    with locked(path, busy=busy):
        plan, listed, names = _examine(path)
        if not dry_run:
            with disk_full_is_an_error(path):
                _apply(path, plan, listed, names)
    return plan


def _examine(path: Path) -> tuple[Repair, dict[str, dict[str, Any]], list[str]]:
    """What is to be done, the manifest lines by file, and the names for state.json."""
    listed = read_manifest(path)
    named = _state_names(path)
    known = {*(named or ()), *listed}
    found = {p.name for _, p in numbered_shards(path)}
    shards = tuple(
        _examine_shard(path / n, listed.get(n), n in known) for n in sorted(known | found)
    )
    torn = {name: torn_line_bytes(path / name) for name in LINE_FILES}
    usable = {s.file for s in shards if s.action in ("whole", "finished", "salvaged")}
    names = sorted(known | usable)  # what is lost stays named, so that a reader says so
    written = []
    if names != named or any(s.action in ("finished", "salvaged") for s in shards):
        written.append(schema.STATE_FILE)
    if not (path / schema.DATASET_INFO_FILE).exists():
        written.append(schema.DATASET_INFO_FILE)
    lines_cut = {name: size for name, size in torn.items() if size}
    return Repair(shards, lines_cut, tuple(written)), listed, names


def _examine_shard(path: Path, line: Mapping[str, Any] | None, is_known: bool) -> ShardRepair:
    if not path.exists():
        return ShardRepair(path.name, "missing")
    scan = _scan(path)
    if scan is None:
        is_unstarted = not is_known and not was_started(path)
        return ShardRepair(path.name, "unstarted" if is_unstarted else "unreadable")
    if scan.decodes and scan.is_marked:
        if line is not None:
            is_same = file_sha256(path) == line["sha256"]
            return ShardRepair(path.name, "whole" if is_same else "changed", scan.rows)
        tail = count_torn_bytes(path, scan.end + len(END_OF_STREAM))
        return ShardRepair(path.name, "finished", scan.rows, tail)
    lost = path.stat().st_size - scan.end
    return ShardRepair(path.name, "salvaged", scan.rows, lost, _name_aside(path).name)


class _Scan(NamedTuple):
    """How far a shard can be read."""

    rows: int
    end: int  # offset behind the last whole batch
    decodes: bool  # nothing broken before the end of the stream
    is_marked: bool  # the end-of-stream marker stands at `end`


def _scan(path: Path) -> _Scan | None:
    """None if not even the schema can be read; raises if it is not a schema of this format."""
    with pa.OSFile(str(path)) as source:
        try:
            shard_schema = pa.ipc.read_schema(pa.ipc.read_message(source))
        except (pa.ArrowException, OSError, EOFError) as error:
            _refuse_other_causes(error)
            return None
        schema.check_schema(shard_schema, str(path))
        rows, end, decodes = 0, source.tell(), True
        try:
            while (batch := _next_batch(source, shard_schema, path)) is not None:
                rows, end = rows + batch.num_rows, source.tell()
        except (pa.ArrowException, OSError, ShardDamaged) as error:
            _refuse_other_causes(error)
            decodes = False
        source.seek(end)
        # Arrow takes the end of a file for the end of a stream, so a cut between batches decodes
        return _Scan(rows, end, decodes, source.read(len(END_OF_STREAM)) == END_OF_STREAM)


def _next_batch(source: Any, shard_schema: pa.Schema, path: Path) -> Any:
    """The batch that `source` stands at; None at the end-of-stream marker or the file's end."""
    try:
        message = pa.ipc.read_message(source)
    except EOFError:
        return None
    check_sizes(message, str(path))
    batch = pa.ipc.read_record_batch(message, shard_schema)
    batch.validate(full=True)
    return batch


def _refuse_other_causes(error: Exception) -> None:
    """A disk that fails, or too little memory, is no reason to cut anything.

    Arrow says OSError for a short file too, but without the system's number.
    """
    is_disk = isinstance(error, OSError) and error.errno is not None
    if is_disk or isinstance(error, pa.ArrowMemoryError):
        raise error


def _apply(
    path: Path, plan: Repair, listed: Mapping[str, Mapping[str, Any]], names: list[str]
) -> None:
    for name in LINE_FILES:
        mend_last_line(path / name)
    salvaged = {shard.file for shard in plan.shards if shard.action == "salvaged"}
    if salvaged & listed.keys():
        # first, so that after a crash here the damaged shards still count as not finished
        write_lines(
            path / schema.MANIFEST_FILE, [v for k, v in listed.items() if k not in salvaged]
        )
    for shard in plan.shards:
        if shard.action == "finished":
            if shard.bytes_cut:
                cut_torn_tail(path / shard.file)
            append_line(path / schema.MANIFEST_FILE, manifest_line(path / shard.file))
        elif shard.action == "salvaged":
            about = _salvage(path / shard.file, shard, listed.get(shard.file))
            append_line(path / schema.MANIFEST_FILE, manifest_line(path / shard.file) | about)
    if schema.STATE_FILE in plan.files_written:
        write_state(path, names)
    if schema.DATASET_INFO_FILE in plan.files_written:
        write_dataset_info(path)
    sync_directory(path)


def _salvage(
    path: Path, shard: ShardRepair, line: Mapping[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """Put the whole batches in place of the shard; the original gets its second name first.

    Returns what the manifest says about it: where the original is, and what it was meant to hold.
    """
    assert shard.original is not None, "a salvaged shard has its original"
    original = path.with_name(shard.original)
    if not original.exists():
        os.link(path, original)
    temporary = path.with_name(f".{path.name}.tmp")
    with open(path, "rb") as source, open(temporary, "wb") as target:
        shutil.copyfileobj(source, target)
        target.truncate(path.stat().st_size - shard.bytes_cut)
        target.seek(0, os.SEEK_END)
        target.write(END_OF_STREAM)
        target.flush()
        os.fsync(target.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)
    about: dict[str, Any] = {"original": original.name, "sha256": file_sha256(original)}
    if line is not None:
        about["manifest_line"] = dict(line)
    return {"salvaged": about}


def _name_aside(path: Path) -> Path:
    """A name for the original that hides no other file; an interrupted salvage finds its own."""
    name, number = path.with_name(f"{path.name}.damaged"), 2
    while name.exists() and not name.samefile(path):
        name, number = path.with_name(f"{path.name}.damaged-{number}"), number + 1
    return name


def _state_names(path: Path) -> list[str] | None:
    """The shards that state.json names; None if it is not there or broken."""
    state = path / schema.STATE_FILE
    try:
        return [file_name(e, "filename", state) for e in read_json(state)["_data_files"]]
    except (FormatError, KeyError, TypeError):
        return None

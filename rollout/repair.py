"""repair(): make the run directory of a killed writer final, without going on with the run."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard

import pyarrow as pa
from filelock import FileLock, Timeout

from rollout import schema
from rollout.compression import check_sizes
from rollout.errors import FormatError, RunLocked, ShardDamaged
from rollout.files import append_line, disk_full_is_an_error, read_json, read_lines, write_json
from rollout.shard import END_OF_STREAM, cut_torn_tail, read_batches, sync_directory, was_started

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
    with _locked(path):
        plan, listed, names = _examine(path)
        if not dry_run:
            with disk_full_is_an_error(path):
                _apply(path, plan, listed, names)
    return plan


def _examine(path: Path) -> tuple[Repair, dict[str, dict[str, Any]], list[str]]:
    """What is to be done, the manifest lines by file, and the names for state.json."""
    listed = _listed(path / schema.MANIFEST_FILE)
    named = _state_names(path)
    known = {*(named or ()), *listed}
    found = {p.name for p in path.iterdir() if re.fullmatch(r"shard-\d{5,}\.arrow", p.name)}
    shards = tuple(
        _examine_shard(path / n, listed.get(n), n in known) for n in sorted(known | found)
    )
    torn = {name: _torn_bytes(path / name) for name in LINE_FILES}
    usable = {s.file for s in shards if s.action in ("whole", "finished", "salvaged")}
    names = sorted(known | usable)  # what is lost stays named, so that a reader says so
    written = []
    if names != named or any(s.action in ("finished", "salvaged") for s in shards):
        written.append("state.json")
    if not (path / "dataset_info.json").exists():
        written.append("dataset_info.json")
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
            is_same = _sha256(path) == line["sha256"]
            return ShardRepair(path.name, "whole" if is_same else "changed", scan.rows)
        tail = path.stat().st_size - scan.end - len(END_OF_STREAM)
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
        _mend_last_line(path / name, plan.lines_cut.get(name, 0))
    salvaged = {shard.file for shard in plan.shards if shard.action == "salvaged"}
    if salvaged & listed.keys():
        # first, so that after a crash here the damaged shards still count as not finished
        _write_lines(
            path / schema.MANIFEST_FILE, [v for k, v in listed.items() if k not in salvaged]
        )
    for shard in plan.shards:
        if shard.action == "finished":
            if shard.bytes_cut:
                cut_torn_tail(path / shard.file)
            append_line(path / schema.MANIFEST_FILE, _manifest_line(path / shard.file))
        elif shard.action == "salvaged":
            about = _salvage(path / shard.file, shard, listed.get(shard.file))
            append_line(path / schema.MANIFEST_FILE, _manifest_line(path / shard.file) | about)
    if "state.json" in plan.files_written:
        write_json(path / "state.json", _state(names))
    if "dataset_info.json" in plan.files_written:
        write_json(path / "dataset_info.json", {"features": schema.hf_features()})
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
    about: dict[str, Any] = {"original": original.name, "sha256": _sha256(original)}
    if line is not None:
        about["manifest_line"] = dict(line)
    return {"salvaged": about}


def _name_aside(path: Path) -> Path:
    """A name for the original that hides no other file; an interrupted salvage finds its own."""
    name, number = path.with_name(f"{path.name}.damaged"), 2
    while name.exists() and not name.samefile(path):
        name, number = path.with_name(f"{path.name}.damaged-{number}"), number + 1
    return name


def _manifest_line(path: Path) -> dict[str, Any]:
    batches = read_batches(path)[1]
    return {
        "file": path.name,
        "rows": sum(b.num_rows for b in batches),
        "output_tokens": sum(len(b.column("output_ids").flatten()) for b in batches),
        "support_ids": sum(len(b.column("support_ids").flatten()) for b in batches),
        "bytes": path.stat().st_size,
        "sha256": _sha256(path),
    }


def _state(names: list[str]) -> dict[str, Any]:
    """What `datasets.load_from_disk` reads; a new fingerprint, or it would serve old caches."""
    return {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": uuid.uuid4().hex[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": "train",
    }


def _listed(path: Path) -> dict[str, dict[str, Any]]:
    """The manifest's lines by the file they describe."""
    listed: dict[str, dict[str, Any]] = {}
    for line in read_lines(path):
        name, sha256 = line.get("file"), line.get("sha256")
        if not _is_file_name(name) or not isinstance(sha256, str):
            raise FormatError(f"{path}: a line names {name!r} with sha256 {sha256!r}, must be both")
        listed[name] = line
    return listed


def _state_names(path: Path) -> list[str] | None:
    """The shards that state.json names; None if it is not there or broken."""
    try:
        names = [entry["filename"] for entry in read_json(path / "state.json")["_data_files"]]
    except (FormatError, KeyError, TypeError):
        return None
    return names if all(map(_is_file_name, names)) else None


def _is_file_name(name: Any) -> TypeGuard[str]:
    """Whether `name` stays inside the directory."""
    return isinstance(name, str) and Path(name).name == name and "\0" not in name


def _last_line(path: Path) -> bytes:
    """What stands behind the last line feed."""
    if not path.exists():
        return b""
    return path.read_bytes().rpartition(b"\n")[2]


def _torn_bytes(path: Path) -> int:
    """Size of a last line that a crash tore: no line feed, and not JSON."""
    line = _last_line(path)
    try:
        json.loads(line)
    except ValueError:
        return len(line)
    return 0


def _mend_last_line(path: Path, torn_bytes: int) -> None:
    """Cut a torn last line; a whole one that lost only its line feed gets it."""
    if not (line := _last_line(path)):
        return
    with open(path, "r+b") as file:
        file.seek(-len(line) if torn_bytes else 0, os.SEEK_END)
        if torn_bytes:
            file.truncate()
        else:
            file.write(b"\n")
        file.flush()
        os.fsync(file.fileno())


def _write_lines(path: Path, lines: list[Mapping[str, Any]]) -> None:
    """Replace a JSON-lines file as a whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = FileLock(path / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RunLocked(
            f"{path}: another process is writing here, so nothing is torn; wait until it ends"
        ) from None
    try:
        yield
    finally:
        lock.release()

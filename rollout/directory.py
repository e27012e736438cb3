"""What every writer of a run directory needs: its lock, its state file, a shard's manifest line."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rollout import schema
from rollout.errors import FormatError, RunLocked
from rollout.files import file_sha256, read_lines, write_json
from rollout.shard import read_batches


@contextmanager
def locked(
    path: Path, name: str = schema.LOCK_FILE, *, timeout_s: float = 0.0, busy: str
) -> Iterator[None]:
    """Hold a lock of the run directory; `RunLocked`, with `busy` as its words, if others do.

    The lock ends with its process, however that ends; the file stays behind.
    """
    lock = FileLock(path / name)
    try:
        lock.acquire(timeout=timeout_s)
    except Timeout:
        raise RunLocked(f"{path}: {busy}") from None
    try:
        yield
    finally:
        lock.release()


def numbered_shards(path: Path) -> list[tuple[int, Path]]:
    """The shard files in the directory, by number; other files mean nothing."""
    found = ((re.fullmatch(r"shard-(\d{5,})\.arrow", p.name), p) for p in path.iterdir())
    return sorted((int(match[1]), p) for match, p in found if match)


def manifest_line(path: Path, sha256: str | None = None) -> dict[str, Any]:
    """What the manifest says of the finished shard `path`, whose hash may be known already."""
    batches = read_batches(path).batches
    return {
        "file": path.name,
        "rows": sum(b.num_rows for b in batches),
        "output_tokens": sum(len(b.column("output_ids").flatten()) for b in batches),
        "support_ids": sum(len(b.column("support_ids").flatten()) for b in batches),
        "bytes": path.stat().st_size,
        "sha256": file_sha256(path) if sha256 is None else sha256,
    }


def read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    """The manifest's lines, by the shard they describe; each has its `sha256`."""
    manifest, lines = path / schema.MANIFEST_FILE, {}
    for line in read_lines(manifest):
        if not isinstance(sha256 := line.get("sha256"), str):
            raise FormatError(f"{manifest}: sha256 is {sha256!r}, must be a string of hex digits")
        lines[file_name(line, "file", manifest)] = line
    return lines


def write_state(path: Path, names: Sequence[str]) -> None:
    """What `datasets.load_from_disk` reads; a new fingerprint, or it would serve old caches."""
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": uuid.uuid4().hex[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": "train",
    }
    write_json(path / schema.STATE_FILE, state)


def write_dataset_info(path: Path) -> None:
    """The column types, for `datasets.load_from_disk`."""
    write_json(path / schema.DATASET_INFO_FILE, {"features": schema.hf_features()})


def file_name(entry: Any, key: str, where: Path) -> str:
    """The name under `key` of an entry of a JSON file; it must stay inside the directory."""
    name = entry.get(key) if isinstance(entry, Mapping) else None
    if not isinstance(name, str) or not name or Path(name).name != name or "\0" in name:
        raise FormatError(f"{where}: {key} is {name!r}, must be the name of a file beside it")
    return name

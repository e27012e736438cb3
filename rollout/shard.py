"""ShardFile: an Arrow IPC stream on disk that is complete and readable at every moment.

A shard is *schema, batch, batch, …, end-of-stream marker*. A reader stops at the first marker, so a
new batch is written behind it first and made visible by overwriting the marker:

    1. [schema][batch 1][marker]
    2. [schema][batch 1][marker][batch 2 without its first 8 bytes][marker]     fsync
    3. [schema][batch 1][batch 2                              ][marker]         fsync

Step 3 is one 8-byte write. Whatever is killed whenever: the file opens, and holds whole batches.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, BinaryIO, Self

import pyarrow as pa

from rollout.errors import ShardDamaged
from rollout.schema import arrow_schema

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class ShardFile:
    """A shard being written. `rows`, `size_bytes` and `sha256` describe what is committed."""

    def __init__(self, path: Path, *, compression: str = "none") -> None:
        """Create `path` with the schema and no rows; durable when this returns."""
        self.path = path
        self.rows = 0
        codec = None if compression == "none" else compression
        self._options = pa.ipc.IpcWriteOptions(compression=codec)
        self._head = _stream([], self._options)
        self._marker_at = len(self._head)
        self._hash = hashlib.sha256(self._head)
        self._file: BinaryIO = open(path, "w+b", buffering=0)  # noqa: SIM115 - closed by close()
        self._write(0, self._head + END_OF_STREAM)
        sync_directory(path.parent)

    def commit(self, batch: pa.RecordBatch) -> None:
        """Append `batch`; when this returns it survives a crash, before that it is invisible."""
        message = _stream([batch], self._options)[len(self._head) :]
        first, rest = message[:8], message[8:]
        self._write(self._marker_at + 8, rest + END_OF_STREAM)
        self._write(self._marker_at, first)
        self._marker_at += len(message)
        self._hash.update(message)
        self.rows += batch.num_rows

    @property
    def size_bytes(self) -> int:
        """Size of the file, its end-of-stream marker included."""
        return self._marker_at + len(END_OF_STREAM)

    @property
    def sha256(self) -> str:
        """Hash of the whole file."""
        whole = self._hash.copy()
        whole.update(END_OF_STREAM)
        return whole.hexdigest()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, offset: int, data: bytes) -> None:
        """All of `data` at `offset`, durably."""
        view = memoryview(data)
        while view:
            done = os.pwrite(self._file.fileno(), view, offset)
            view, offset = view[done:], offset + done
        os.fsync(self._file.fileno())


def was_started(path: Path) -> bool:
    """Whether `path` has its schema: a process killed right after creating it leaves less."""
    return path.stat().st_size >= len(_stream([], None)) + len(END_OF_STREAM)


def cut_torn_tail(path: Path) -> None:
    """Remove what an interrupted commit left behind the end-of-stream marker."""
    with pa.OSFile(str(path)) as source, _opened(source, path) as stream:
        for _ in _batches(stream, path):
            pass
        end = source.tell()
    with open(path, "r+b") as file:
        file.truncate(end)
        os.fsync(file.fileno())


def read_batches(path: Path) -> tuple[pa.Schema, list[pa.RecordBatch]]:
    """Schema and batches of a shard, memory-mapped; raises `ShardDamaged`."""
    if path.stat().st_size == 0:
        raise ShardDamaged(f"{path}: the file is empty, a shard starts with its schema")
    with _opened(pa.memory_map(str(path)), path) as stream:
        return stream.schema, list(_batches(stream, path))


def _opened(source: Any, path: Path) -> Any:
    try:
        return pa.ipc.open_stream(source)
    except (pa.ArrowException, OSError) as error:
        raise ShardDamaged(f"{path}: not an Arrow IPC stream ({error})") from error


def _batches(stream: Any, path: Path) -> Any:
    try:
        for batch in stream:
            batch.validate(full=True)
            yield batch
    except (pa.ArrowException, OSError) as error:
        raise ShardDamaged(
            f"{path}: the stream breaks off or holds impossible values ({error}); the file was "
            "changed or cut after it was written: restore it from where it was copied"
        ) from error


def sync_directory(path: Path) -> None:
    """Make a new name in `path` survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _stream(batches: list[pa.RecordBatch], options: Any) -> bytes:
    """A whole stream without its end-of-stream marker."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, arrow_schema(), options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data[: -len(END_OF_STREAM)]

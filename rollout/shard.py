"""ShardFile: an Arrow IPC stream on disk that is complete and readable at every moment.

A shard is *schema, batch, batch, …, end-of-stream marker*. A reader stops at the first marker, so a
new batch is written behind it first and made visible by overwriting the marker:

    1. [schema][batch 1][marker]
    2. [schema][batch 1][marker][batch 2 without its first 8 bytes][marker]     fsync
    3. [schema][batch 1][batch 2                              ][marker]         fsync

Step 3 is one 8-byte write. Whatever is killed whenever: the file opens, and holds whole batches.

A reader that has mapped the file and not yet reached the marker finds a batch there instead, so the
batch must lie inside its map: a shard is written into a file that is larger from the start. What is
behind the marker is a hole, which takes no space, and close() cuts it.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import pyarrow as pa

from rollout.compression import check_sizes
from rollout.errors import ShardDamaged, ShardHashMismatch
from rollout.files import disk_full_is_an_error, file_sha256, sync_directory, write_at
from rollout.schema import arrow_schema, check_schema

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"

_FILE_MAGIC = b"ARROW1"
_CHANGED = (
    "the file was changed or cut after it was written: restore it from where it was copied, or "
    "see `rollout repair`"
)


class ShardFile:
    """A shard being written. `rows`, `size_bytes` and `sha256` describe what is committed."""

    def __init__(
        self, path: Path, *, compression: str = "none", reserved_bytes: int = 2**20
    ) -> None:
        """Create `path` with the schema and no rows; durable when this returns.

        Until it is closed the file has at least `reserved_bytes`, most of them a hole.
        """
        self.path = path
        self._reserved_bytes = reserved_bytes
        self.rows = 0
        codec = None if compression == "none" else compression
        self._options = pa.ipc.IpcWriteOptions(compression=codec)
        self._head = _stream([], self._options)
        self._marker_at = len(self._head)
        self._hash = hashlib.sha256(self._head)
        with disk_full_is_an_error(path):
            self._file: BinaryIO = open(path, "w+b", buffering=0)  # noqa: SIM115 - close() does
            try:
                write_at(self._file.fileno(), 0, self._head + END_OF_STREAM)
                self._reserve()
                sync_directory(path.parent)
            except OSError:
                self._file.close()
                raise

    def commit(self, batch: pa.RecordBatch) -> None:
        """Append `batch`; when this returns it survives a crash, before that it is invisible.

        When it raises, the shard is what it was before, and a commit can be tried again.
        """
        message = _stream([batch], self._options)[len(self._head) :]
        first, rest = message[:8], message[8:]
        with disk_full_is_an_error(self.path):
            try:
                write_at(self._file.fileno(), self._marker_at + 8, rest + END_OF_STREAM)
                write_at(self._file.fileno(), self._marker_at, first)
            except BaseException:  # Ctrl-C too
                os.pwrite(self._file.fileno(), END_OF_STREAM, self._marker_at)
                self._file.truncate(self.size_bytes)
                self._reserve()
                raise
        self._marker_at += len(message)
        self._hash.update(message)
        self.rows += batch.num_rows

    @property
    def size_bytes(self) -> int:
        """Size of the stream, its end-of-stream marker included; of the file once it is closed."""
        return self._marker_at + len(END_OF_STREAM)

    @property
    def sha256(self) -> str:
        """Hash of the whole stream."""
        whole = self._hash.copy()
        whole.update(END_OF_STREAM)
        return whole.hexdigest()

    def close(self) -> None:
        """Cut the file to its stream; closing again does nothing."""
        if self._file.closed:
            return
        with self._file:
            self._file.truncate(self.size_bytes)
            os.fsync(self._file.fileno())

    def _reserve(self) -> None:
        self._file.truncate(max(self._reserved_bytes, self.size_bytes))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def was_started(path: Path) -> bool:
    """Whether `path` has its schema: a process killed right after creating it leaves less."""
    return path.stat().st_size >= len(_stream([], None)) + len(END_OF_STREAM)


def cut_torn_tail(path: Path) -> None:
    """Remove what an interrupted commit left behind the end-of-stream marker."""
    end = _read(path).size_bytes
    with open(path, "r+b") as file:
        file.truncate(end)
        os.fsync(file.fileno())


def count_torn_bytes(path: Path, end: int) -> int:
    """How much an interrupted commit left behind offset `end`; the hole there does not count."""
    torn = 0
    with open(path, "rb") as file:
        file.seek(end)
        while block := file.read(2**20):
            if data := block.rstrip(b"\0"):
                torn = file.tell() - end - len(block) + len(data)
    return torn


def check_sha256(path: Path, sha256: str) -> None:
    """Raise `ShardHashMismatch` unless the file `path` has this hash."""
    try:
        got = file_sha256(path)
    except FileNotFoundError as error:
        raise _lost(path) from error
    if got != sha256:
        raise ShardHashMismatch(
            f"{path}: sha256 is {got[:12]}…, the manifest says {sha256[:12]}…; the file was "
            "changed or cut after it was finished: restore it from where it was copied"
        )


class Content(NamedTuple):
    """What a shard holds. `size_bytes` ends with its marker; the file may be larger."""

    schema: pa.Schema
    batches: list[pa.RecordBatch]
    size_bytes: int


def read_batches(path: Path) -> Content:
    """Schema and batches of a shard, all values checked against their types.

    The batches are views of a memory map that lives as long as they do; no file stays open. A
    writer may be at work: what it committed before the call is there. Raises `ShardDamaged`, and
    `SchemaMismatch` or `SchemaVersionUnknown` if this is not a shard of this format.
    """
    while True:
        try:
            size = path.stat().st_size
            return _read(path)
        except FileNotFoundError as error:
            raise _lost(path) from error
        except ShardDamaged:
            # a commit between mapping the file and reading its marker leads beyond the map
            if path.stat().st_size <= size:
                raise


def _read(path: Path) -> Content:
    if path.stat().st_size == 0:
        raise ShardDamaged(f"{path}: the file is empty, a shard starts with its schema")
    with pa.memory_map(str(path)) as file:
        shard_schema = _read_schema(file, path)
        batches = []
        try:
            while (message := _next_message(file)) is not None:
                check_sizes(message, str(path))
                batch = pa.ipc.read_record_batch(message, shard_schema)
                batch.validate(full=True)
                batches.append(batch)
            end = file.tell()
        except pa.ArrowMemoryError:
            raise  # too little memory says nothing about the shard
        except EOFError as error:  # a cut between two batches
            raise ShardDamaged(
                f"{path}: no end-of-stream marker, so it breaks off; {_CHANGED}"
            ) from error
        except (pa.ArrowException, OSError) as error:
            raise ShardDamaged(
                f"{path}: the stream breaks off or holds impossible values ({error}); {_CHANGED}"
            ) from error
        return Content(shard_schema, batches, end)


def _read_schema(file: Any, path: Path) -> pa.Schema:
    no_schema = f"{path}: not an Arrow IPC stream (no schema)"
    try:
        message = _next_message(file)
        if message is None:
            raise ShardDamaged(no_schema)
        shard_schema = pa.ipc.read_schema(message)
        check_schema(shard_schema, str(path))
    except pa.ArrowMemoryError:
        raise
    except EOFError as error:
        raise ShardDamaged(no_schema) from error
    except (pa.ArrowException, OSError) as error:
        file.seek(0)
        if file.read(len(_FILE_MAGIC)) == _FILE_MAGIC:
            raise ShardDamaged(
                f"{path}: not an Arrow IPC stream but an Arrow IPC file (with a footer); "
                "give the shard as it was written, or copy it with pyarrow.ipc.new_stream"
            ) from error
        raise ShardDamaged(f"{path}: not an Arrow IPC stream ({error})") from error
    except UnicodeDecodeError as error:
        raise ShardDamaged(f"{path}: a name in its schema is not UTF-8; {_CHANGED}") from error
    return shard_schema


def _next_message(file: Any) -> Any:
    """The message that `file` stands at; None at the end-of-stream marker, which is passed.

    The marker is looked at once: a commit may put a batch in its place at any moment. `EOFError` at
    the end of the file, which Arrow alone takes for the end of the stream.
    """
    start = file.tell()
    if file.read(len(END_OF_STREAM)) == END_OF_STREAM:
        return None
    file.seek(start)
    return pa.ipc.read_message(file)


def _lost(path: Path) -> ShardDamaged:
    return ShardDamaged(f"{path}: listed in the run directory, but the file is not there")


def _stream(batches: list[pa.RecordBatch], options: Any) -> bytes:
    """A whole stream without its end-of-stream marker."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, arrow_schema(), options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data[: -len(END_OF_STREAM)]

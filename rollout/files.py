"""The small files of a run directory: JSON written atomically, JSON lines appended durably."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollout.errors import DiskFull, FormatError, NotARun

# half of a UTF-16 pair, which no UTF-8 can hold, becomes its JSON escape: nothing is lost
_LONE_SURROGATES = "backslashreplace"


@contextmanager
def disk_full_is_an_error(path: Path) -> Iterator[None]:
    """Turn the operating system's word for a full disk, met while writing `path`, into ours."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFull(f"{path}: cannot be written ({error.strerror}); make room there") from error


def is_missing_folder(name: str) -> bool:
    """Whether `name` is written as a path, not as a hub id, and nothing is there."""
    return name.startswith(("/", ".", "~")) and not os.path.exists(name)


def write_at(descriptor: int, offset: int, data: bytes) -> None:
    """All of `data` at `offset`, durably."""
    view = memoryview(data)
    while view:
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done
    os.fsync(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Replace `path` as a whole, durably: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with disk_full_is_an_error(path):
        try:
            with open(temporary, "wb", buffering=0) as file:
                write_at(file.fileno(), 0, data)
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)  # on a full disk its space is needed
            raise
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make a new name in `path` survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """`replace_file` with an object."""
    replace_file(path, _encoded(json.dumps(value, indent=2, ensure_ascii=False)))


def write_lines(path: Path, values: Iterable[Mapping[str, Any]]) -> None:
    """`replace_file` with one object per line."""
    replace_file(path, b"".join(_encoded(json.dumps(v, ensure_ascii=False)) for v in values))


def _encoded(text: str) -> bytes:
    return (text + "\n").encode("utf-8", errors=_LONE_SURROGATES)


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; `NotARun` if there is none, `FormatError` if it is broken."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise NotARun(f"{path.parent}: no {path.name}, so not a run directory") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path}: must hold an object, got {type(value).__name__}")
    return value


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """Append one JSON line; durable when this returns, not there at all when it raises."""
    with disk_full_is_an_error(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            end = _cut_torn_line(descriptor)
            try:
                write_at(descriptor, end, _encoded(json.dumps(value, ensure_ascii=False)))
            except OSError:
                os.ftruncate(descriptor, end)
                raise
        finally:
            os.close(descriptor)


def mend_last_line(path: Path) -> None:
    """Cut a last line that a crash tore; a whole one that lost only its line feed gets it."""
    if path.exists():
        descriptor = os.open(path, os.O_RDWR)
        try:
            _cut_torn_line(descriptor)
        finally:
            os.close(descriptor)


def torn_line_bytes(path: Path) -> int:
    """Size of a last line that a crash tore: no line feed, and not JSON."""
    if not path.exists():
        return 0
    line = path.read_bytes().rpartition(b"\n")[2]
    return 0 if _is_json(line) else len(line)


def _cut_torn_line(descriptor: int) -> int:
    """Remove what a killed process left of a last line, or end that line; the file's new size."""
    size = os.fstat(descriptor).st_size
    if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
        return size
    with open(descriptor, "rb", closefd=False) as file:
        start = file.read().rfind(b"\n") + 1
    if _is_json(os.pread(descriptor, size - start, start)):
        write_at(descriptor, size, b"\n")
        return size + 1
    os.ftruncate(descriptor, start)
    return start


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Every object of a JSON-lines file; a file that does not exist has none."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    return  # torn by a crash: its event was never reported as done
                raise FormatError(f"{path}:{number}: not JSON ({error})") from error
            if not isinstance(value, dict):
                raise FormatError(
                    f"{path}:{number}: must hold an object, got {type(value).__name__}"
                )
            yield value

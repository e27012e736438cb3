"""The small files of a run directory: JSON written atomically, JSON lines appended durably."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
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


def write_at(descriptor: int, offset: int, data: bytes) -> None:
    """All of `data` at `offset`, durably."""
    view = memoryview(data)
    while view:
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done
    os.fsync(descriptor)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace `path` as a whole: a reader sees the old file or the new one."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    temporary = path.with_name(f".{path.name}.tmp")
    with disk_full_is_an_error(path):
        try:
            with open(temporary, "wb", buffering=0) as file:
                write_at(file.fileno(), 0, text.encode("utf-8", errors=_LONE_SURROGATES))
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)  # on a full disk its space is needed
            raise


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
    text = json.dumps(value, ensure_ascii=False) + "\n"
    with disk_full_is_an_error(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            end = _cut_torn_line(descriptor)
            try:
                write_at(descriptor, end, text.encode("utf-8", errors=_LONE_SURROGATES))
            except OSError:
                os.ftruncate(descriptor, end)
                raise
        finally:
            os.close(descriptor)


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

"""The small files of a run directory: JSON written atomically, JSON lines appended durably."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollout.errors import FormatError, NotARun


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace `path` as a whole: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; `NotARun` if there is none, `FormatError` if it is broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NotARun(f"{path.parent}: no {path.name}, so not a run directory") from error
    except ValueError as error:
        raise FormatError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path}: must hold an object, got {type(value).__name__}")
    return value


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """Append one JSON line; durable when this returns."""
    line = json.dumps(value, ensure_ascii=False) + "\n"
    with open(path, "ab") as file:
        file.write(line.encode("utf-8", errors="backslashreplace"))
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Every object of a JSON-lines file; a file that does not exist has none."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield json.loads(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return  # torn by a crash: its event was never reported as done
                raise FormatError(f"{path}:{number}: not JSON ({error})") from error

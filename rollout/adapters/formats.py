"""FORMATS: the files of other tools, by the name that `rollout import` and `export` use.

A new format is a row here: what writes a file, what reads one, or both.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollout.adapters import sglang_jsonl
from rollout.adapters.exporting import Write
from rollout.adapters.importing import Reader


@dataclass(frozen=True, kw_only=True)
class Format:
    """What can be done with one kind of file."""

    write: Write | None = None
    read: Reader | None = None
    needs_torch: bool = False


FORMATS = {
    "sglang-jsonl": Format(read=sglang_jsonl.READER),
}

READABLE = tuple(name for name, format in FORMATS.items() if format.read is not None)
WRITABLE = tuple(name for name, format in FORMATS.items() if format.write is not None)

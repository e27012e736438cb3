"""FORMATS: the files of other tools, by the name that `rollout import` and `export` use.

A new format is a row here: what writes a file, what reads one, or both.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollout.adapters import miles, prime_rl, sglang_jsonl, slime, vllm
from rollout.adapters.exporting import Write
from rollout.adapters.importing import Reader


@dataclass(frozen=True, kw_only=True)
class Format:
    """What can be done with one kind of file."""

    write: Write | None = None
    read: Reader | None = None
    needs_torch: bool = False


FORMATS = {
    "miles": Format(write=miles.LAYOUT.write, read=miles.LAYOUT.reader(), needs_torch=True),
    "prime-rl": Format(write=prime_rl.write, read=prime_rl.READER),
    "sglang-jsonl": Format(read=sglang_jsonl.READER),
    "slime": Format(write=slime.LAYOUT.write, read=slime.LAYOUT.reader(), needs_torch=True),
    "vllm": Format(read=vllm.READER),
}

READABLE = tuple(name for name, format in FORMATS.items() if format.read is not None)
WRITABLE = tuple(name for name, format in FORMATS.items() if format.write is not None)

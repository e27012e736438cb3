"""FORMATS: the files of other tools, by the name that `rollout import` and `export` use.

A new format is a row here: what writes a file, what reads one, or both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rollout.adapters import (
    miles,
    openrlhf,
    prime_rl,
    sglang_jsonl,
    skyrl,
    slime,
    trl,
    verl,
    vllm,
)
from rollout.adapters.exporting import Write
from rollout.adapters.importing import Reader
from rollout.errors import ConfigError
from rollout.record import Rollout

WritePadded = Callable[[Iterable[Rollout], Path, int], tuple[str, ...]]
"""As `Write`, with the id that the file is padded with."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """What can be done with one kind of file."""

    write: Write | None = None
    write_padded: WritePadded | None = None  # in place of `write`
    read: Reader | None = None
    needs_torch: bool = False


FORMATS = {
    "miles": Format(write=miles.LAYOUT.write, read=miles.LAYOUT.reader(), needs_torch=True),
    "openrlhf": Format(write=openrlhf.write_openrlhf, needs_torch=True),
    "prime-rl": Format(write=prime_rl.write, read=prime_rl.READER),
    "sglang-jsonl": Format(read=sglang_jsonl.READER),
    "skyrl": Format(write=skyrl.write_skyrl, read=skyrl.READER, needs_torch=True),
    "slime": Format(write=slime.LAYOUT.write, read=slime.LAYOUT.reader(), needs_torch=True),
    "trl": Format(write=trl.write_trl),
    "verl": Format(write_padded=verl.write_verl, needs_torch=True),
    "vllm": Format(read=vllm.READER),
}

READABLE = tuple(name for name, format in FORMATS.items() if format.read is not None)
WRITABLE = tuple(name for name, format in FORMATS.items() if format.write or format.write_padded)


def writer(name: str, pad_id: int | None) -> Write:
    """What writes files of the format `name`, which must be one of `WRITABLE`.

    Raises `ConfigError` if it pads and `pad_id` is None, or the other way round.
    """
    format = FORMATS[name]
    if format.write_padded is not None:
        if pad_id is None:
            raise ConfigError(
                f"{name}: its rows are padded, and with which id is never guessed; give --pad-id, "
                "the pad_token_id of the tokenizer"
            )
        padded = format.write_padded
        return lambda rollouts, path: padded(rollouts, path, pad_id)
    if pad_id is not None:
        raise ConfigError(f"{name}: its rows are not padded; leave out --pad-id")
    assert format.write is not None, "only names of WRITABLE are asked for"
    return format.write

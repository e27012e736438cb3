"""export_run(): the rollouts of a run directory as a file of a trainer's."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollout.conditions import sampled_at
from rollout.errors import ConfigError, NotARun
from rollout.files import disk_full_is_an_error, sync_directory
from rollout.reader import open_run
from rollout.record import Rollout
from rollout.words import counts_in_words, float32_in_words

Write = Callable[[Iterable[Rollout], Path], tuple[str, ...]]
"""Writes one file, and returns what its reader should be told: a sentence each."""


@dataclass(frozen=True)
class Exported:
    """What an export did; `notes` are sentences about what the format does with these rollouts."""

    rollouts: int
    output_tokens: int
    bytes: int
    left_out: dict[str, int]  # rollouts that were not asked for, by what they are
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def export_run(
    write: Write,
    run: Path,
    out: Path,
    *,
    overwrite: bool = False,
    without_aborted: bool = False,
    temperature: float | None = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> Exported:
    """Write the rollouts of the run directory `run` to the file `out`, which appears as a whole.

    With `temperature` only those that were sampled at it. Raises `ConfigError` if `out` is there
    and `overwrite` is not set, and if all are left out; `NotExpressible` where the format cannot
    say what a rollout says; and the `FormatError` of a run that cannot be read or is empty.
    """
    if out.is_dir() or (out.exists() and not overwrite):
        raise ConfigError(f"{out}: is there already; choose another --out, or give --overwrite")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent}: no such directory; make it first")
    opened = open_run(run)
    count = tokens = 0
    left_out: Counter[str] = Counter()
    is_wanted = sampled_at(temperature) if temperature is not None else None

    def kept() -> Iterator[Rollout]:
        nonlocal count, tokens
        for done, rollout in enumerate(opened, start=1):
            if is_wanted is not None and not is_wanted(rollout):
                left_out[f"at temperature {float32_in_words(rollout.temperature)}"] += 1
            elif without_aborted and rollout.finish_reason == "abort":
                left_out["aborted"] += 1
            else:
                count, tokens = count + 1, tokens + rollout.num_output_tokens
                yield rollout
            if progress is not None:
                progress(done, len(opened), tokens)
        if not count and left_out:
            raise ConfigError(
                f"{run}: nothing is left to export, these are left out: "
                f"{counts_in_words(left_out)}; choose others"
            )
        if not count:
            raise NotARun(f"{run}: must hold a rollout to export, got none")

    temporary = out.with_name(f".{out.name}.tmp")
    with disk_full_is_an_error(out):
        try:
            notes = write(kept(), temporary)
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
                size = os.fstat(file.fileno()).st_size
            os.replace(temporary, out)
        finally:
            temporary.unlink(missing_ok=True)  # not there after the rename
        sync_directory(out.parent)
    return Exported(count, tokens, size, dict(left_out), notes)

"""merge_runs(): one run directory out of several."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollout.annotations import Annotation, write_annotations
from rollout.errors import BadRolloutId, ConfigError, ContentError
from rollout.reader import Run, open_run
from rollout.record import Rollout
from rollout.support import Support
from rollout.writer import RunWriter

SHARED = ("config", "engine", "dataset")
"""What run.json of a merged run keeps where all sources agree."""


@dataclass(frozen=True)
class Merged:
    """What a merge did: rows stored, rows that another source had too, rejections by reason."""

    rollouts: int
    duplicates: int
    annotations: int
    rejected: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def merge_runs(out: Path, sources: Sequence[Path]) -> Merged:
    """Copy the rollouts and annotations of `sources` into the new run directory `out`.

    A rollout that several sources hold is stored once. Everything is compared before `out` is made:
    `ConfigError` if it exists or tokenizers differ, and `BadRolloutId` if one id stands for two
    different rollouts. A rollout that breaks a content rule goes to
    rejected.jsonl of `out`. Failures and rejections of the sources stay with them.
    """
    if out.exists() and any(out.iterdir()):
        raise ConfigError(
            f"{out}: is there already, and a merge makes a new run; choose another, or remove it "
            "if it is what an unfinished merge left"
        )
    runs = [open_run(source) for source in sources]
    identity = _identity(runs)
    total = _check_rollouts(runs)
    annotations = _merge_annotations(runs)
    rejected: Counter[str] = Counter()
    with RunWriter(out, identity, vocab_size=identity["vocab_size"]) as writer:
        seen: set[str] = set()
        for run in runs:
            for rollout in run.stored():
                if rollout.rollout_id in seen:
                    continue
                seen.add(rollout.rollout_id)
                try:
                    writer.write(rollout)
                except ContentError as error:
                    rejected[error.code] += 1
                    about = {"rollout_id": rollout.rollout_id, "source": run.path.name}
                    writer.reject(error, None, **about, run_id=run.info.get("run_id"))
        stored = set(writer.done)
    kept = {key: value for key, value in annotations.items() if key in stored}
    if kept:
        write_annotations(out, kept)
    return Merged(len(stored), total - len(seen), len(kept), dict(rejected))


def _identity(runs: Sequence[Run]) -> dict[str, Any]:
    """run.json of the merged run; raises the error of the first difference that matters."""
    first = runs[0]
    for run in runs:
        for name, there, here in (
            ("tokenizer.vocabulary_sha256", _vocabulary(first), _vocabulary(run)),
            ("vocab_size", first.vocab_size, run.vocab_size),
        ):
            if there != here:
                raise ConfigError(
                    f"{run.path}: {name} is {here!r}, but {there!r} in {first.path}; "
                    "one run has one tokenizer, so merge only runs that agree"
                )
    same = {
        key: first.info[key]
        for key in SHARED
        if key in first.info and all(run.info.get(key) == first.info[key] for run in runs)
    }
    return {
        "merged": [{"path": run.path.name, "run_id": run.info.get("run_id")} for run in runs],
        **same,
        "tokenizer": first.info.get("tokenizer"),
        "vocab_size": first.vocab_size,
    }


def _vocabulary(run: Run) -> Any:
    return (run.info.get("tokenizer") or {}).get("vocabulary_sha256")


def _check_rollouts(runs: Sequence[Run]) -> int:
    """Number of rows of all runs; raises `BadRolloutId` for an id with two contents."""
    seen: dict[str, tuple[bytes, Path]] = {}
    total = 0
    for run in runs:
        for rollout in run.stored():
            total += 1
            content = _digest(rollout)
            before, where = seen.setdefault(rollout.rollout_id, (content, run.path))
            if before != content:
                raise BadRolloutId(
                    f"{rollout.rollout_id}: {where} and {run.path} hold different rollouts of this "
                    "id; an id stands for one rollout, so merge only one of them"
                )
    return total


def _merge_annotations(runs: Sequence[Run]) -> dict[str, Annotation]:
    """Annotations of all runs; raises `BadRolloutId` where two say different things."""
    merged: dict[str, tuple[Annotation, Path]] = {}
    for run in runs:
        for rollout_id, annotation in run.annotations.items():
            before, where = merged.setdefault(rollout_id, (annotation, run.path))
            if before != annotation:
                raise BadRolloutId(
                    f"{rollout_id}: annotated differently in {where} and {run.path}; "
                    "annotate both alike, or merge only one of them"
                )
    return {rollout_id: annotation for rollout_id, (annotation, _) in merged.items()}


def _digest(rollout: Rollout) -> bytes:
    """Equal for equal content: every field, bit by bit."""
    digest = hashlib.sha256()
    fields: Mapping[str, Any] = vars(rollout)
    for name, value in fields.items():
        parts = (value.ids, value.offsets) if isinstance(value, Support) else (value,)
        for part in parts:
            data = part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode()
            digest.update(f"{name}:{len(data)}:".encode())
            digest.update(data)
    return digest.digest()

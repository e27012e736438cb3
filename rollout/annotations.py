"""Annotations: scores that come after collecting, beside the shards, by rollout id.

`annotations.arrow` is one Arrow IPC stream, replaced as a whole: rollout_id string, reward float64
(may be null), extra string (may be null; a JSON object). Finished shards never change.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from filelock import FileLock, Timeout

from rollout.errors import (
    BadRolloutId,
    BadValue,
    NullValue,
    RunLocked,
    SchemaMismatch,
    ShardDamaged,
)
from rollout.files import disk_full_is_an_error
from rollout.reader import open_run
from rollout.record import Rollout
from rollout.sampling import canonical_json
from rollout.shard import END_OF_STREAM, sync_directory

ANNOTATIONS_FILE = "annotations.arrow"
LOCK_TIMEOUT_S = 30.0

FIELDS = pa.schema(
    [
        pa.field("rollout_id", pa.string()),
        pa.field("reward", pa.float64()),
        pa.field("extra", pa.string()),
    ]
)


@dataclass(frozen=True)
class Annotation:
    """What is known about a rollout since it was stored; None = nothing new."""

    reward: float | None = None
    extra: str | None = None  # canonical JSON object


def annotate(
    path: str | Path,
    rewards: Mapping[str, float],
    *,
    extra: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Annotation]:
    """Store rewards, and keys for `extra`, by rollout id; returns all annotations of the run.

    Later values win: a reward over an earlier one, a key of `extra` over the same key. A collect
    may be at work in the directory. Raises `BadRolloutId` for ids that are not in the run and
    `BadValue` for a reward that is not finite, and then stores nothing.
    """
    path = Path(path)
    extra = extra or {}
    _check_rewards(path, rewards)
    _check_ids(path, rewards.keys() | extra.keys())
    with _locked(path):
        annotations = read_annotations(path)
        for rollout_id in rewards.keys() | extra.keys():
            new = Annotation(
                reward=float(rewards[rollout_id]) if rollout_id in rewards else None,
                extra=canonical_json(dict(extra[rollout_id])) if rollout_id in extra else None,
            )
            before = annotations.get(rollout_id, Annotation())
            annotations[rollout_id] = _later(before, new, f"{path}, {rollout_id}")
        write_annotations(path, annotations)
    return annotations


def read_annotations(path: str | Path) -> dict[str, Annotation]:
    """Annotations by rollout id, none where there is no file; raises the `FormatError`s."""
    file = Path(path) / ANNOTATIONS_FILE
    if not file.exists():
        return {}
    table = _read_table(file)
    if not table.schema.equals(FIELDS):
        raise SchemaMismatch(
            f"{file}: columns are {_columns(table.schema)}, must be {_columns(FIELDS)}"
        )
    annotations: dict[str, Annotation] = {}
    for row in table.to_pylist():
        rollout_id = row.pop("rollout_id")
        if rollout_id is None:
            raise NullValue(f"{file}: column rollout_id holds a null")
        if rollout_id in annotations:
            raise BadRolloutId(f"{file}, {rollout_id}: stored twice")
        if row["extra"] is not None:
            _object(row["extra"], f"{file}, {rollout_id}")
        annotations[rollout_id] = Annotation(**row)
    return annotations


def with_annotations(
    rollouts: Iterable[Rollout], annotations: Mapping[str, Annotation]
) -> Iterator[Rollout]:
    """Each rollout with its later reward, and the later keys of its `extra`."""
    for rollout in rollouts:
        later = annotations.get(rollout.rollout_id)
        if later is None:
            yield rollout
            continue
        before = Annotation(rollout.reward, rollout.extra)
        now = _later(before, later, rollout.rollout_id)
        assert now.extra is not None, "the shard's is always there"
        yield replace(rollout, reward=now.reward, extra=now.extra)


def write_annotations(path: Path, annotations: Mapping[str, Annotation]) -> None:
    """Replace the file as a whole, durably; a reader sees the old one or the new one."""
    ids = sorted(annotations)
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array(ids, pa.string()),
            pa.array([annotations[i].reward for i in ids], pa.float64()),
            pa.array([annotations[i].extra for i in ids], pa.string()),
        ],
        schema=FIELDS,
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, FIELDS) as stream:
        stream.write_batch(batch)
    temporary = path / f".{ANNOTATIONS_FILE}.tmp"
    with disk_full_is_an_error(path / ANNOTATIONS_FILE):
        with open(temporary, "wb") as file:
            file.write(sink.getvalue())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path / ANNOTATIONS_FILE)
        sync_directory(path)


def _later(before: Annotation, after: Annotation, where: str) -> Annotation:
    """Both, `after` where they differ; `extra` key by key."""
    extra = before.extra
    if after.extra is not None:
        extra = canonical_json(_object(before.extra or "{}", where) | _object(after.extra, where))
    return Annotation(before.reward if after.reward is None else after.reward, extra)


def _check_rewards(path: Path, rewards: Mapping[str, float]) -> None:
    for rollout_id, reward in rewards.items():
        if not math.isfinite(reward):
            raise BadValue(f"{path}, {rollout_id}: reward is {reward}, must be finite")


def _check_ids(path: Path, wanted: set[str]) -> None:
    unknown = sorted(wanted - {rollout.rollout_id for rollout in open_run(path)})
    if unknown:
        raise BadRolloutId(
            f"{path}, {unknown[0]}: no such rollout in this run "
            f"({len(unknown)} of {len(wanted)} ids are unknown); nothing was stored. "
            f"`rollout inspect {path}` lists its ids"
        )


def _object(extra: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(extra)
    except ValueError as error:
        raise BadValue(f"{where}: extra is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise BadValue(f"{where}: extra must hold an object, got {type(value).__name__}")
    return value


def _read_table(file: Path) -> pa.Table:
    data = file.read_bytes()
    try:
        table = pa.ipc.open_stream(data).read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise ShardDamaged(
            f"{file}: not an Arrow IPC stream, or it breaks off ({error})"
        ) from error
    if not data.endswith(END_OF_STREAM):
        raise ShardDamaged(f"{file}: no end-of-stream marker, so it breaks off")
    return table


def _columns(found: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in found)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A lock of its own: scores may come while a collect holds the run's."""
    lock = FileLock(path / ".annotations.lock")
    try:
        lock.acquire(timeout=LOCK_TIMEOUT_S)
    except Timeout:
        raise RunLocked(
            f"{path}: another process has been annotating for {LOCK_TIMEOUT_S:.0f} s; wait for it"
        ) from None
    try:
        yield
    finally:
        lock.release()

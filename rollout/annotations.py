"""Annotations: scores that come after collecting, beside the shards, by rollout id.

`annotations.arrow` is one Arrow IPC stream, replaced as a whole: rollout_id string, reward float64
(may be null), extra string (may be null; a JSON object). Shards never change; readers join.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from rollout.errors import BadRolloutId, BadValue, NullValue, SchemaMismatch, ShardDamaged
from rollout.files import replace_file
from rollout.record import Rollout
from rollout.sampling import canonical_json
from rollout.schema import ANNOTATIONS_FILE
from rollout.shard import END_OF_STREAM

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


def annotated(rollout: Rollout, annotations: Mapping[str, Annotation]) -> Rollout:
    """`rollout` with its later reward, and the later keys of its `extra`."""
    later = annotations.get(rollout.rollout_id)
    if later is None:
        return rollout
    before = Annotation(rollout.reward, rollout.extra)
    now = both(before, later, rollout.rollout_id)
    assert now.extra is not None, "the shard's is always there"
    return replace(rollout, reward=now.reward, extra=now.extra)


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
    replace_file(path / ANNOTATIONS_FILE, sink.getvalue().to_pybytes())


def both(before: Annotation, after: Annotation, where: str) -> Annotation:
    """What both say, `after` where they differ; `extra` key by key."""
    extra = before.extra
    if after.extra is not None:
        extra = canonical_json(_object(before.extra or "{}", where) | _object(after.extra, where))
    return Annotation(before.reward if after.reward is None else after.reward, extra)


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

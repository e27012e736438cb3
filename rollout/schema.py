"""The Arrow schema of a shard, version 1, and the names of the files of a run directory.

docs/format.md is the specification; this module is the only place that spells it in code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rollout.errors import BadOffsets, NullValue, SchemaMismatch, SchemaVersionUnknown
from rollout.record import Rollout, WeightSpan
from rollout.support import Support

SCHEMA_VERSION = 1
METADATA_KEY = b"rollout"

RUN_FILE = "run.json"
STATE_FILE = "state.json"
DATASET_INFO_FILE = "dataset_info.json"
MANIFEST_FILE = "manifest.jsonl"
ERRORS_FILE = "errors.jsonl"
REJECTED_FILE = "rejected.jsonl"
STATS_FILE = "stats.json"
ANNOTATIONS_FILE = "annotations.arrow"
LOCK_FILE = ".lock"
ANNOTATIONS_LOCK_FILE = ".annotations.lock"
REPORTS_DIR = "reports"


def shard_name(index: int) -> str:
    return f"shard-{index:05d}.arrow"


_SPANS = pa.list_(pa.struct([("version", pa.string()), ("start", pa.int32()), ("end", pa.int32())]))

NULLABLE = {
    "prompt_text",
    "output_text",
    "full_logprobs",
    "support_logprobs",
    "seed",
    "stop_match",
    "reward",
}
"""Columns that may hold nulls. Arrow's own flag is not used: nothing enforces it, and `datasets`
would copy every column to drop it."""

FIELDS = pa.schema(
    [
        pa.field("rollout_id", pa.string()),
        pa.field("prompt_id", pa.string()),
        pa.field("sample_index", pa.int32()),
        pa.field("prompt_ids", pa.list_(pa.int32())),
        pa.field("output_ids", pa.list_(pa.int32())),
        pa.field("prompt_text", pa.string()),
        pa.field("output_text", pa.string()),
        pa.field("loss_mask", pa.list_(pa.int8())),
        pa.field("sampling_logprobs", pa.list_(pa.float32())),
        pa.field("full_logprobs", pa.list_(pa.float32())),
        pa.field("support_counts", pa.list_(pa.int32())),
        pa.field("support_ids", pa.large_list(pa.int32())),
        pa.field("support_logprobs", pa.large_list(pa.float32())),
        pa.field("temperature", pa.float32()),
        pa.field("top_p", pa.float32()),
        pa.field("top_k", pa.int32()),
        pa.field("min_p", pa.float32()),
        pa.field("max_new_tokens", pa.int32()),
        pa.field("seed", pa.int64()),
        pa.field("sampling_params", pa.string()),
        pa.field("finish_reason", pa.string()),
        pa.field("stop_match", pa.string()),
        pa.field("weight_versions", _SPANS),
        pa.field("engine_meta", pa.string()),
        pa.field("reward", pa.float64()),
        pa.field("created_us", pa.int64()),
        pa.field("latency_ms", pa.float32()),
        pa.field("attempts", pa.int32()),
        pa.field("extra", pa.string()),
    ]
)


@cache
def arrow_schema() -> pa.Schema:
    """The schema with its metadata: our version, and the features that `datasets` looks for."""
    own = {"schema_version": SCHEMA_VERSION}
    features = {"info": {"features": hf_features()}}
    return FIELDS.with_metadata(
        {METADATA_KEY: json.dumps(own).encode(), b"huggingface": json.dumps(features).encode()}
    )


@cache
def hf_features() -> dict[str, Any]:
    """The columns in the words of Hugging Face `datasets`."""
    from datasets import Features  # takes a second to import: only writers pay it

    features: dict[str, Any] = Features.from_arrow_schema(FIELDS).to_dict()
    return features


def check_schema(schema: pa.Schema, where: str) -> None:
    """Raise unless `schema` is version 1 of ours, column by column."""
    own = (schema.metadata or {}).get(METADATA_KEY)
    if own is None:
        raise SchemaMismatch(
            f"{where}: not a shard of this format (no 'rollout' metadata); "
            "`rollout import` converts dumps of other origin"
        )
    if (version := _schema_version(own, where)) != SCHEMA_VERSION:
        raise SchemaVersionUnknown(
            f"{where}: written as schema version {version}, this release reads version "
            f"{SCHEMA_VERSION}; use the release that wrote it, or upgrade"
        )
    for wanted in FIELDS:
        if schema.get_field_index(wanted.name) == -1:
            raise SchemaMismatch(f"{where}: column {wanted.name} is missing")
        if (got := schema.field(wanted.name).type) != wanted.type:
            raise SchemaMismatch(f"{where}: column {wanted.name} is {got}, must be {wanted.type}")
    if extra := set(schema.names) - set(FIELDS.names):
        raise SchemaMismatch(f"{where}: unknown columns {sorted(extra)}")


def _schema_version(metadata: bytes, where: str) -> object:
    try:
        return json.loads(metadata)["schema_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SchemaMismatch(f"{where}: its 'rollout' metadata is broken") from error


def to_batch(rollouts: Sequence[Rollout]) -> pa.RecordBatch:
    """Rows for a shard. The rollouts must have passed the rules; the reader checks them again."""
    columns = [_column(field, rollouts) for field in FIELDS]
    return pa.RecordBatch.from_arrays(columns, schema=arrow_schema())


def _column(field: pa.Field, rollouts: Sequence[Rollout]) -> pa.Array:
    values: list[Any]
    match field.name:
        case "support_counts":
            values = [r.support.counts for r in rollouts]
        case "support_ids":
            values = [r.support.ids for r in rollouts]
        case "weight_versions":
            values = [[span._asdict() for span in r.weight_versions] for r in rollouts]
        case name:
            values = [getattr(r, name) for r in rollouts]
    if pa.types.is_list(field.type) and not pa.types.is_struct(field.type.value_type):
        return _list_column(values, field.type, np.int32)
    if pa.types.is_large_list(field.type):
        return _list_column(values, field.type, np.int64)
    return pa.array(values, field.type)


def _list_column(
    arrays: Sequence[NDArray[Any] | None], kind: pa.DataType, offset: type[np.integer]
) -> pa.Array:
    """A list column from one numpy array per row, without going through Python numbers."""
    present = [a for a in arrays if a is not None]
    dtype = kind.value_type.to_pandas_dtype()
    flat = np.concatenate([np.empty(0, dtype), *present]).astype(dtype, copy=False)
    offsets = np.zeros(len(arrays) + 1, offset)
    np.cumsum([0 if a is None else len(a) for a in arrays], out=offsets[1:])
    absent = np.fromiter((a is None for a in arrays), bool, len(arrays))
    mask = pa.array(absent) if absent.any() else None
    make = pa.LargeListArray if offset is np.int64 else pa.ListArray
    return make.from_arrays(pa.array(offsets), pa.array(flat), type=kind, mask=mask)


def from_batch(batch: pa.RecordBatch, where: str) -> list[Rollout]:
    """The rollouts of a batch, their arrays as views of it; nulls where none may be raise."""
    for field in FIELDS:
        column = batch.column(field.name)
        if column.null_count and field.name not in NULLABLE:
            raise NullValue(f"{where}: column {field.name} holds {column.null_count} nulls")
        if pa.types.is_nested(field.type) and _has_nulls(column.values):
            raise NullValue(f"{where}: the lists of column {field.name} hold nulls")
    rows = {field.name: _values(batch.column(field.name)) for field in FIELDS}
    counts = rows.pop("support_counts")
    ids = rows.pop("support_ids")
    spans = rows.pop("weight_versions")
    supports = [
        _support(ids[i], counts[i], f"{where}, {rows['rollout_id'][i]}")
        for i in range(batch.num_rows)
    ]
    return [
        Rollout(
            support=supports[i],
            weight_versions=tuple(WeightSpan(**span) for span in spans[i]),
            **{name: values[i] for name, values in rows.items()},
        )
        for i in range(batch.num_rows)
    ]


def _support(ids: NDArray[np.int32], counts: NDArray[np.int32], where: str) -> Support:
    try:
        return Support.from_counts(ids, counts)
    except BadOffsets as error:
        raise BadOffsets(f"{where}: {error}") from error


def _has_nulls(items: pa.Array) -> bool:
    """Whether an item of a list, or a field of one, is null."""
    fields = items.flatten() if pa.types.is_struct(items.type) else []
    return items.null_count > 0 or any(field.null_count for field in fields)


def _values(column: pa.Array) -> list[Any]:
    """One Python value per row; lists of numbers as numpy views."""
    kind = column.type
    if not pa.types.is_nested(kind) or pa.types.is_struct(kind.value_type):
        values: list[Any] = column.to_pylist()
        return values
    flat = column.values.to_numpy(zero_copy_only=True)
    offsets = column.offsets.to_numpy()
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    return [
        flat[start:end] if ok else None
        for start, end, ok in zip(offsets[:-1], offsets[1:], valid, strict=True)
    ]

"""The columns that a trainer's sample has no place for, carried in its free-form slot.

They stand under one key, `KEY`, as plain containers (JSON can hold them), so that what comes back
from a trainer's dump is the rollout that went in.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollout.adapters.arrays import plain
from rollout.errors import BadValue, SchemaVersionUnknown
from rollout.record import Rollout, WeightSpan
from rollout.schema import SCHEMA_VERSION

KEY = "rollout"

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Carried(msgspec.Struct, kw_only=True):
    """Columns of docs/format.md; arrays as base64 of their little-endian bytes."""

    schema_version: int
    rollout_id: str
    prompt_id: str
    sample_index: Int32
    full_logprobs: bytes | None
    support_logprobs: bytes | None
    temperature: float
    top_p: float
    top_k: Int32
    min_p: float
    max_new_tokens: Int32
    seed: Int64 | None
    sampling_params: str
    stop_match: str | None
    weight_versions: list[tuple[str, Int32, Int32]]
    engine_meta: str
    prompt_text: str | None
    output_text: str | None
    created_us: Int64
    latency_ms: float
    attempts: Int32
    extra: str
    forced: list[int] | None = None  # where a format writes forced tokens as singletons


def carry(rollout: Rollout, *, forced: bool = False) -> dict[str, Any]:
    """The columns of `rollout`, but for tokens, supports, their logprobs, reward, finish reason.

    `forced` adds the positions of forced tokens.
    """
    special: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "full_logprobs": _bytes(rollout.full_logprobs),
        "support_logprobs": _bytes(rollout.support_logprobs),
        "weight_versions": [tuple(span) for span in rollout.weight_versions],
        "forced": np.flatnonzero(rollout.is_forced).tolist() if forced else None,
    }
    others: dict[str, Any] = {
        f: getattr(rollout, f) for f in Carried.__struct_fields__ if f not in special
    }
    carried: dict[str, Any] = msgspec.to_builtins(Carried(**special, **others))
    return carried


def read_carried(metadata: Any, where: str) -> Carried | None:
    """What `carry` left in a sample's free-form slot; None where there is nothing of ours.

    Raises `BadValue` for what is not in its form, `SchemaVersionUnknown` for a later one.
    """
    if not isinstance(metadata, dict) or KEY not in metadata:
        return None
    try:
        carried = msgspec.convert(plain(metadata[KEY]), Carried)
    except msgspec.ValidationError as error:
        raise BadValue(f"{where}: metadata[{KEY!r}] is not what an export left: {error}") from error
    if carried.schema_version != SCHEMA_VERSION:
        raise SchemaVersionUnknown(
            f"{where}: exported from schema version {carried.schema_version}, this release reads "
            f"{SCHEMA_VERSION}; use the release that wrote it, or upgrade"
        )
    return carried


def restore(carried: Carried, **said: Any) -> Rollout:
    """The rollout of `carried` and what the sample itself `said`: the other fields of `Rollout`."""
    fields = {f: getattr(carried, f) for f in Carried.__struct_fields__}
    del fields["schema_version"], fields["forced"]
    arrays = {
        f: _float32(fields[f], f"{carried.rollout_id}: carried {f}")
        for f in ("full_logprobs", "support_logprobs")
    }
    spans = tuple(WeightSpan(*span) for span in carried.weight_versions)
    return Rollout(**(fields | arrays | {"weight_versions": spans} | said))


def _bytes(array: NDArray[np.float32] | None) -> bytes | None:
    return None if array is None else array.astype("<f4").tobytes()


def _float32(data: bytes | None, where: str) -> NDArray[np.float32] | None:
    if data is None:
        return None
    if len(data) % 4:
        raise BadValue(f"{where}: {len(data)} bytes, must be four for each number")
    return np.frombuffer(data, "<f4").astype(np.float32)

"""JSON rows of numbers as flat arrays: `[[5, 9], [2]]` is counts [2, 1] and values [5, 9, 2].

A sampling mask is most of a reply's bytes. simdjson writes its numbers straight into an array, no
Python object in between. What that cannot hold, a null or no rows at all, takes the plain way.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import msgspec
import numpy as np
import simdjson
from numpy.typing import NDArray

from rollout.errors import ReplyMalformed

_id_rows = msgspec.json.Decoder(list[list[int]]).decode
_float_rows = msgspec.json.Decoder(list[list[float | None]]).decode


def ids_array(ids: Any, where: str) -> NDArray[np.int32]:
    """`ids` as int32; `ReplyMalformed` where one does not fit."""
    wide = np.asarray(ids)  # in whatever type holds them
    if wide.size and (wide.max() >= 2**31 or wide.min() < -(2**31)):
        raise ReplyMalformed(f"{where}: an id does not fit into 32 bits")
    return wide.astype(np.int32)


def id_rows(raw: bytes, where: str) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Counts per row and all ids; `ReplyMalformed` unless `raw` is rows of int32 numbers."""
    found = _fast_rows(raw, "i", np.int64)
    counts, values = _plain_rows(raw, _id_rows, where) if found is None else found
    return counts, ids_array(values, where)


def float_rows(
    raw: bytes, where: str, dtype: type[np.floating] = np.float32
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Counts per row and all numbers; null, which stands for NaN and infinities, becomes NaN."""
    found = _fast_rows(raw, "d", np.float64)
    counts, values = _plain_rows(raw, _float_rows, where) if found is None else found
    return counts, np.asarray(values).astype(dtype)


def _fast_rows(
    raw: bytes, kind: str, dtype: type[np.generic]
) -> tuple[NDArray[np.int64], NDArray[Any]] | None:
    """Counts and numbers of rows that hold only numbers of this kind; None for anything else."""
    try:
        rows: Any = simdjson.Parser().parse(raw)
        values = np.frombuffer(rows.as_buffer(of_type=kind), dtype)
        counts = np.fromiter(map(len, rows), np.int64, len(rows))
    except (ValueError, TypeError, AttributeError, RuntimeError):
        return None
    # as_buffer flattens to any depth: brackets tell whether it was one
    if raw.count(b"[") != len(counts) + 1:
        return None
    return counts, values


def _plain_rows(raw: bytes, decode: Any, where: str) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The same with a list per row; `ReplyMalformed` says what is wrong, and where."""
    try:
        rows = decode(raw)
    except (msgspec.DecodeError, ValueError) as error:
        raise ReplyMalformed(f"{where}: {error}") from error
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    flat = list(chain.from_iterable(rows))
    # a null becomes NaN among floats; ids have none
    return counts, np.array(flat, np.float64 if None in flat else None)

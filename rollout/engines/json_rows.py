"""JSON rows of numbers as flat arrays: `[[5, 9], [2]]` is counts [2, 1] and values [5, 9, 2].

A sampling mask is most of a reply's bytes. Its rows are cut at the brackets, counted by their
commas, and decoded as one flat list, without a list per row. Anything unusual takes the plain way.
"""

from __future__ import annotations

from itertools import chain, repeat
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollout.errors import ReplyMalformed

_flat_ids = msgspec.json.Decoder(list[int]).decode
_flat_floats = msgspec.json.Decoder(list[float]).decode
_id_rows = msgspec.json.Decoder(list[list[int]]).decode
_float_rows = msgspec.json.Decoder(list[list[float | None]]).decode


def ids_array(ids: list[int], where: str) -> NDArray[np.int32]:
    """`ids` as int32; `ReplyMalformed` where one does not fit."""
    try:
        return np.fromiter(ids, np.int32, len(ids))
    except OverflowError as error:
        raise ReplyMalformed(f"{where}: an id does not fit into 32 bits") from error


def id_rows(raw: bytes, where: str) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Counts per row and all ids; `ReplyMalformed` unless `raw` is rows of int32 numbers."""
    counts, values = _rows(raw, _flat_ids, _id_rows, where)
    return counts, ids_array(values, where)


def float_rows(
    raw: bytes, where: str, dtype: type[np.floating] = np.float32
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Counts per row and all numbers; null, which stands for NaN and infinities, becomes NaN."""
    counts, values = _rows(raw, _flat_floats, _float_rows, where)
    return counts, np.array(values, dtype)


def _rows(raw: bytes, flat: Any, nested: Any, where: str) -> tuple[NDArray[np.int64], list[Any]]:
    if raw.startswith(b"[["):
        texts = raw[2:-2].split(b"],[")
        counts = 1 + np.fromiter(map(bytes.count, texts, repeat(b",")), np.int64, len(texts))
        try:
            values = flat(b"[%b]" % b",".join(texts))
        except msgspec.DecodeError:
            pass  # an empty row, blanks, or worse: the plain way below says what, and where
        else:
            if counts.sum() == len(values):
                return counts, values
    try:
        rows = nested(raw)
    except msgspec.DecodeError as error:
        raise ReplyMalformed(f"{where}: {error}") from error
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    return counts, list(chain.from_iterable(rows))

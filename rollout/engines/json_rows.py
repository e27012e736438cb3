"""JSON rows of numbers as flat arrays: `[[5, 9], [2]]` is counts [2, 1] and values [5, 9, 2].

A sampling mask is most of a reply's bytes. Decoding it as one flat list skips the inner lists; the
counts come from the positions of brackets and commas. Anything unusual takes the plain way.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollout.errors import ReplyMalformed

_BLANK_BRACKETS = bytes.maketrans(b"[]", b"  ")
_flat_ids = msgspec.json.Decoder(list[int]).decode
_flat_floats = msgspec.json.Decoder(list[float | None]).decode
_id_rows = msgspec.json.Decoder(list[list[int]]).decode
_float_rows = msgspec.json.Decoder(list[list[float | None]]).decode


def ids_array(ids: list[int], where: str) -> NDArray[np.int32]:
    """`ids` as int32; `ReplyMalformed` where one does not fit."""
    try:
        return np.array(ids, np.int32)
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
    try:
        values = flat(b"[%b]" % raw.translate(_BLANK_BRACKETS))
    except msgspec.DecodeError:
        pass  # the plain way below says what is wrong, and where
    else:
        counts = _counts(raw)
        if counts.all() and counts.sum() == len(values):
            return counts, values
    try:
        rows = nested(raw)
    except msgspec.DecodeError as error:
        raise ReplyMalformed(f"{where}: {error}") from error
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    return counts, list(chain.from_iterable(rows))


def _counts(raw: bytes) -> NDArray[np.int64]:
    """Numbers per row, from the commas between closing brackets, if no row is empty."""
    text = np.frombuffer(raw, np.uint8)
    ends = np.flatnonzero(text == ord("]"))[:-1]  # the last one closes the outer list
    commas = np.searchsorted(np.flatnonzero(text == ord(",")), ends)
    # the comma before a row counts for its last number; before the first row there is none
    counts: NDArray[np.int64] = np.diff(commas, prepend=-1)
    return counts

"""Flat arrays out of what other tools hold: lists, tensors, numpy arrays."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.errors import BadValue


def int32(values: Any, where: str) -> NDArray[np.int32]:
    """One int32 per value; `BadValue` unless `values` is one flat row of such integers."""
    array = _flat(values, where)
    if array.size and (
        array.dtype.kind not in "iu" or array.min() < -(2**31) or array.max() >= 2**31
    ):
        raise BadValue(f"{where}: must be integers of 32 bits, got {_odd(array, int)!r}")
    return array.astype(np.int32)


def float32(values: Any, where: str) -> NDArray[np.float32]:
    """One float32 per value; `BadValue` unless `values` is one flat row of numbers."""
    array = _flat(values, where)
    if array.size and array.dtype.kind not in "fiu":
        raise BadValue(f"{where}: must be numbers, got {_odd(array, int, float)!r}")
    return array.astype(np.float32)


def flags(values: Any, where: str) -> NDArray[np.int8]:
    """One int8 per value; `BadValue` unless each is 0 or 1, or false or true."""
    array = _flat(values, where)
    if array.size and (array.dtype.kind not in "iub" or not np.isin(array, (0, 1)).all()):
        raise BadValue(f"{where}: must hold only 0 and 1")
    return array.astype(np.int8)


def _flat(values: Any, where: str) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except (ValueError, TypeError) as error:
        raise BadValue(f"{where}: must be one flat row of numbers ({error})") from error
    if array.ndim != 1:
        raise BadValue(f"{where}: must be one flat row, got {array.ndim} dimensions")
    return array


def _odd(array: NDArray[Any], *wanted: type) -> Any:
    """The first value of another type, or else the largest."""
    values = array.tolist()
    others = [value for value in values if type(value) not in wanted]
    return others[0] if others else max(values, key=abs)


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: arrays and tensors as lists, bytes as base64."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return base64.b64encode(value).decode()
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple() | set():
            return [plain(item) for item in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else repr(value)

"""Arrays out of lists and tensors, and anything as JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from rollout.adapters.arrays import float32, int32, plain
from rollout.errors import BadValue


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([1, -2], id="list"),
        pytest.param(np.array([1, -2], np.int64), id="int64"),
        pytest.param(torch.tensor([1, -2]), id="tensor"),
    ],
)
def test_integers_become_int32(values: Any) -> None:
    array = int32(values, "ids")
    assert (array.dtype, array.tolist()) == (np.int32, [1, -2])


def test_nothing_is_an_empty_array() -> None:
    assert (int32([], "ids").dtype, float32([], "logprobs").dtype) == (np.int32, np.float32)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        pytest.param([1, 2.5], "got 1.0", id="float"),
        pytest.param([1, None], "got None", id="null"),
        pytest.param([1, 2**31], "got 2147483648", id="too large"),
        pytest.param([True, False], "got True", id="flags"),
        pytest.param([1, [2]], "one flat row of numbers", id="ragged"),
        pytest.param(3, "one flat row, got 0 dimensions", id="number"),
    ],
)
def test_what_is_no_row_of_integers_is_refused(values: Any, words: str) -> None:
    with pytest.raises(BadValue, match=f"^ids: .*{words}"):
        int32(values, "ids")


def test_what_is_no_row_of_numbers_is_refused() -> None:
    with pytest.raises(BadValue, match="^logprobs: must be numbers, got None"):
        float32([0.5, None], "logprobs")


def test_anything_becomes_json() -> None:
    value = {
        "t": torch.tensor([1, 2]),
        "a": np.array([0.5]),
        "b": b"\x00",
        3: (None, True, "x"),
        "d": torch.float32,
    }
    assert json.loads(json.dumps(plain(value))) == {
        "t": [1, 2],
        "a": [0.5],
        "b": "AA==",
        "3": [None, True, "x"],
        "d": "torch.float32",
    }

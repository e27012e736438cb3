"""Rows of numbers: the fast way gives what json.loads gives, and nothing else gets through."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.engines.json_rows import float_rows, id_rows, ids_array
from rollout.errors import ReplyMalformed

ids = st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5), max_size=6)
floats = st.lists(
    st.lists(st.none() | st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=4),
    max_size=6,
)
spacing = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", ":")])


@given(ids, spacing)
def test_ids_are_what_json_says(rows: list[list[int]], separators: tuple[str, str]) -> None:
    counts, values = id_rows(json.dumps(rows, separators=separators).encode(), "x")
    assert counts.tolist() == [len(row) for row in rows]
    assert values.tolist() == [i for row in rows for i in row]
    assert values.dtype == np.int32


@given(floats, spacing)
def test_floats_are_lossless_and_null_is_nan(
    rows: list[list[float | None]], separators: tuple[str, str]
) -> None:
    counts, values = float_rows(json.dumps(rows, separators=separators).encode(), "x")
    assert counts.tolist() == [len(row) for row in rows]
    flat = [np.nan if x is None else x for row in rows for x in row]
    np.testing.assert_array_equal(values, np.array(flat, np.float32), strict=True)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        pytest.param(b"[[1],2]", "Expected `array`, got `int`", id="number among rows"),
        pytest.param(b"[1,2]", "Expected `array`, got `int`", id="no rows"),
        pytest.param(b"[[1,[2]]]", "Expected `int`, got `array`", id="too deep"),
        pytest.param(b"[[[1]]]", "Expected `int`, got `array`", id="one row too deep"),
        pytest.param(b'[["1"]]', "Expected `int`, got `str`", id="text"),
        pytest.param(b"[[1.5]]", "Expected `int`, got `float`", id="fraction"),
        pytest.param(b"[[1],null]", "got `null`", id="null row"),
        pytest.param(b"[[1]", "truncated", id="cut"),
        pytest.param(b"{}", "got `object`", id="object"),
        pytest.param(b"[[2147483648]]", "does not fit into 32 bits", id="too large"),
    ],
)
def test_anything_else_is_malformed(raw: bytes, words: str) -> None:
    with pytest.raises(ReplyMalformed, match=f"mask: .*{words}"):
        id_rows(raw, "mask")


def test_plain_ids_must_fit_too() -> None:
    assert ids_array([1, -1], "x").tolist() == [1, -1]
    for large in (2**31, 2**63, 2**64 - 1, 2**70, -(2**31) - 1):
        with pytest.raises(ReplyMalformed, match="output_ids: an id does not fit into 32 bits"):
            ids_array([1, large], "output_ids")

"""Support: compressed sparse rows of ids, and their laws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import BadOffsets
from rollout.support import Support

rows_of_ids = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=6), max_size=8)


def rows(support: Support) -> list[list[int]]:
    return [support[t].tolist() for t in range(len(support))]


@given(rows_of_ids)
def test_rows_survive_the_round_trip(ids: list[list[int]]) -> None:
    support = Support.from_rows(ids)
    assert rows(support) == ids
    assert rows(Support.from_counts(support.ids, support.counts)) == ids


def test_the_documented_example() -> None:
    support = Support.from_rows([[5, 9, 2], [7], [], [1, 4]])
    assert support.ids.tolist() == [5, 9, 2, 7, 1, 4]
    assert support.offsets.tolist() == [0, 3, 4, 4, 6]
    assert support.counts.tolist() == [3, 1, 0, 2]
    assert support.rows.tolist() == [0, 0, 0, 1, 3, 3]


@given(rows_of_ids, st.data())
def test_take_is_indexing(ids: list[list[int]], data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, len(ids) - 1)) if ids else st.just([]))
    taken = Support.from_rows(ids).take(np.array(index, np.int64))
    assert rows(taken) == [ids[i] for i in index]


def test_take_follows_zigzag_order_of_context_parallel_ranks() -> None:
    support = Support.from_rows([[i, i + 1] for i in range(8)])
    rank0 = support.take(np.array([0, 1, 6, 7]))
    assert rows(rank0) == [[0, 1], [1, 2], [6, 7], [7, 8]]
    assert rank0.offsets.tolist() == [0, 2, 4, 6, 8]


@given(st.lists(rows_of_ids, max_size=4))
def test_concatenate_appends_rows(parts: list[list[list[int]]]) -> None:
    whole = Support.concatenate([Support.from_rows(part) for part in parts])
    assert rows(whole) == [row for part in parts for row in part]


@given(rows_of_ids, st.data())
def test_contains_and_duplicated_agree_with_python(
    ids: list[list[int]], data: st.DataObject
) -> None:
    known = sorted({i for row in ids for i in row}) or [0]
    output = data.draw(st.lists(st.sampled_from(known), min_size=len(ids), max_size=len(ids)))
    support = Support.from_rows(ids)
    contains = support.contains(np.array(output, np.int32))
    assert contains.tolist() == [y in row for y, row in zip(output, ids, strict=True)]
    assert support.duplicated().tolist() == [len(set(row)) < len(row) for row in ids]


def test_duplicates_are_found_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 3 ids: rows that end one, that are larger than one, and that are empty."""
    monkeypatch.setattr("rollout.support.PIECE", 3)
    rows = [[1, 2, 1], [], [4], [4], [7, 8, 9, 7, 5], [], [3, 3], [-1, 6], []]
    wanted = [len(set(row)) < len(row) for row in rows]
    assert Support.from_rows(rows).duplicated().tolist() == wanted


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        pytest.param([1, 3], "start at 0", id="does not start at 0"),
        pytest.param([], "start at 0", id="no offset at all"),
        pytest.param([0, 2], "end at 2, but there are 3", id="ends early"),
        pytest.param([0, 4], "end at 4, but there are 3", id="ends late"),
        pytest.param([0, 2, 1, 3], "must not decrease", id="decreases"),
    ],
)
def test_offsets_that_do_not_fit_are_refused(offsets: list[int], words: str) -> None:
    with pytest.raises(BadOffsets, match=words):
        Support(np.array([4, 5, 6], np.int32), np.array(offsets, np.int64))


def test_index_outside_the_rows_is_an_index_error() -> None:
    with pytest.raises(IndexError, match="output token 1 of 1"):
        Support.from_rows([[1]])[1]

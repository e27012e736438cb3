"""plan(): work lists that hold every entry once, and supports that are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from supports import problem

import replay
from replay.support_plan import PIECE, TILE, Pieces


def covered(pieces: Pieces) -> list[int]:
    """Every element of the pieces, in their order."""
    return [i for _, first, n, _ in pieces.items.tolist() for i in range(first, first + n)]


@given(st.lists(st.sampled_from([0, 1, 2, 63, 64, 65, 129, 300]), max_size=9))
@settings(max_examples=25, deadline=None)
def test_every_entry_of_a_support_larger_than_one_is_in_one_tile_and_one_piece(
    sizes: list[int],
) -> None:
    p = problem(sizes, 300, 1)
    made = replay.plan(p["support_ids"], p["support_offsets"], 300)
    counts, tokens = made.counts.tolist(), made.tokens.tolist()
    wanted = [e for e, token in enumerate(tokens) if counts[token] > 1]
    tiles, edges = made.work.tiles, made.edges
    assert sorted(covered(tiles)) == wanted
    assert sorted(edges.entry.tolist()) == wanted
    assert sorted(covered(edges.pieces)) == list(range(len(wanted)))
    assert all(n <= TILE for _, _, n, _ in tiles.items.tolist())
    assert all(n <= PIECE for _, _, n, _ in edges.pieces.items.tolist())
    for token, first, n, _ in tiles.items.tolist():
        assert set(tokens[first : first + n]) == {token}
    assert made.work.rank[made.counts > 1].tolist() == list(range(made.work.num_tokens))


def test_a_run_of_several_pieces_has_its_slots_in_a_row() -> None:
    p = problem([2, 200, 70, 1], 200, 1)
    tiles = replay.plan(p["support_ids"], p["support_offsets"]).work.tiles
    assert tiles.items[:, [0, 2, 3]].tolist() == [
        [1, 64, 0], [1, 64, 1], [1, 64, 2], [1, 8, 3], [2, 64, 4], [2, 6, 5], [0, 2, -1],
    ]  # fmt: skip
    assert (tiles.splits.tolist(), tiles.num_slots) == ([[1, 0, 4], [2, 4, 2]], 6)


def test_waves_hold_whole_runs_and_every_item_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay.support_plan.WAVE", 4)
    p = problem([2, 200, 70, 400, 100, 1], 400, 1)
    tiles = replay.plan(p["support_ids"], p["support_offsets"]).work.tiles
    assert [(w.first_slot, w.num_slots) for w in tiles.waves] == [(0, 7), (7, 4), (11, 4)]
    assert tiles.most_slots == 7
    assert [i for w in tiles.waves for i in range(16)[w.items]] == list(range(len(tiles.items)))
    for wave in tiles.waves:
        slots = [s for *_, s in tiles.items[wave.items].tolist() if s >= 0]
        assert slots == list(range(wave.first_slot, wave.first_slot + wave.num_slots))
        assert sum(tiles.splits[wave.splits, 2].tolist()) == wave.num_slots


def test_a_rank_s_part_is_made_once() -> None:
    made = replay.plan(torch.tensor([5, 2, 9, 2, 5]), torch.tensor([0, 2, 3, 5]))
    part = made.part(2, 4)
    assert (part.ids.tolist(), part.offsets.tolist()) == ([3, 0, 0, 3], [0, 2, 2, 4])
    assert part.work.rank.tolist() == [0, -1, 1]
    assert made.part(2, 4) is part
    assert made.part(6, 4).work.num_tokens == 0, "the only id there is a singleton's"


def test_edges_are_sorted_by_id_then_token() -> None:
    ids, offsets = torch.tensor([5, 2, 9, 2, 5]), torch.tensor([0, 2, 3, 5])
    edges = replay.plan(ids, offsets).edges
    assert edges.rows.tolist() == [2, 5]
    assert edges.counts.tolist() == [2, 2]
    assert edges.entry.tolist() == [1, 3, 0, 4]
    assert edges.token.tolist() == [0, 2, 0, 2]


@pytest.mark.parametrize(
    ("ids", "offsets", "words"),
    [
        pytest.param([1, 2, 1], [0, 3], "token 0 has id 1 twice", id="duplicate"),
        pytest.param([1, 2, 7, 3], [0, 2, 4], r"token 1 has id 7, must be in \[0, 7\)", id="high"),
        pytest.param([1, -2], [0, 2], "token 0 has id -2", id="negative"),
        pytest.param([1, 2], [0, 3], "from 0 to 3, but there are 2", id="too long"),
        pytest.param([1, 2], [1, 2], "from 1 to 2, but there are 2", id="late start"),
        pytest.param([1, 2], [0, 2, 1, 2], "fall from 2 to 1 at token 1", id="falling"),
        pytest.param([], [], "0 support_offsets", id="no offsets"),
    ],
)
def test_bad_supports_are_refused(ids: list[int], offsets: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replay.plan(torch.tensor(ids).long(), torch.tensor(offsets).long(), 7)


def test_an_id_in_two_supports_is_no_duplicate() -> None:
    made = replay.plan(torch.tensor([1, 2, 2, 1]), torch.tensor([0, 2, 4]), 3)
    assert (made.num_tokens, made.num_entries, made.max_id) == (2, 4, 2)

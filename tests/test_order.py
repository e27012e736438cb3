"""The order of a pass and the share of each rank: pure functions, the same everywhere."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.order import deal, shuffled

IDS = ["0:0", "0:1", "1:0", "1:1", "2:0", "é:0"]


@pytest.mark.parametrize(
    ("seed", "epoch", "order"),
    [
        pytest.param(0, 0, [5, 0, 2, 4, 3, 1], id="seed 0"),
        pytest.param(0, 1, [4, 0, 1, 2, 3, 5], id="the next epoch"),
        pytest.param(1, 0, [4, 2, 1, 5, 3, 0], id="another seed"),
    ],
)
def test_the_order_is_this_one_on_every_machine(seed: int, epoch: int, order: list[int]) -> None:
    assert shuffled(IDS, seed, epoch) == order


def test_the_order_is_the_documented_hash() -> None:
    keys = [hashlib.blake2b(i.encode(), key=b"7:3", digest_size=16).digest() for i in IDS]
    assert shuffled(IDS, seed=7, epoch=3) == sorted(range(len(IDS)), key=keys.__getitem__)


@given(st.permutations(IDS), st.sets(st.sampled_from(IDS)))
def test_neither_the_stored_order_nor_other_rollouts_move_one(
    stored: list[str], left_out: set[str]
) -> None:
    wanted = [IDS[i] for i in shuffled(IDS, 0, 0) if IDS[i] not in left_out]
    kept = [i for i in stored if i not in left_out]
    assert [kept[i] for i in shuffled(kept, 0, 0)] == wanted


def test_the_largest_batch_goes_to_the_rank_that_has_least() -> None:
    assert deal([5, 9, 7, 7, 3], world_size=2) == [[1, 3, None], [0, 2, 4]]
    assert deal([5, 9], world_size=3) == [[1], [0], [None]]
    assert deal([], world_size=2) == [[], []]


@given(st.lists(st.integers(1, 100), max_size=40), st.integers(1, 8))
def test_ranks_get_equally_many_and_are_never_further_apart_than_one_batch(
    tokens: list[int], world_size: int
) -> None:
    ranks = deal(tokens, world_size)
    assert sorted(i for rank in ranks for i in rank if i is not None) == list(range(len(tokens)))
    assert {len(rank) for rank in ranks} == {-(-len(tokens) // world_size)}
    for step in range(1, len(ranks[0]) + 1):
        totals = [sum(tokens[i] for i in rank[:step] if i is not None) for rank in ranks]
        assert max(totals) - min(totals) <= max(tokens)

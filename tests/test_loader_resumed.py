"""A pass over batches that stops and goes on: states, workers, other processes."""

from __future__ import annotations

import json
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_runs import ELEVEN, contents, ids, rollout_of, write
from torch.utils.data import DataLoader

from replay import Batches, batches, loader
from rollout import errors, open_run

# there may be more workers than cores
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Eleven rollouts of 1 to 7 input tokens in four shards."""
    return write(tmp_path / "run", ELEVEN)


def test_a_state_counts_what_the_consumer_got_not_what_was_prefetched(path: Path) -> None:
    made = batches(open_run(path), 7, prefetch=5)
    assert made.state_dict()["done"] == 0
    iterator = iter(made)
    for number in range(3):
        assert (next(iterator).number, made.state_dict()["done"]) == (number, number + 1)
    iterator.close()
    state = json.loads(json.dumps(made.state_dict()))
    again = batches(open_run(path), 7)
    again.load_state_dict(state)
    assert (len(made), len(again)) == (8, 5)
    assert ids(again) == ids(made)[3:]
    assert [batch.number for batch in again] == [3, 4, 5, 6, 7]
    assert again.state_dict()["done"] == 8


def test_the_epoch_that_was_resumed_is_finished_and_the_next_is_whole(path: Path) -> None:
    made = batches(open_run(path), 7, shuffle_seed=0, epoch=1)
    whole = ids(made)
    state = made.state_dict(after=list(made)[5])
    again = batches(open_run(path), 7, shuffle_seed=0)
    again.load_state_dict(state)
    seen = {}
    for epoch in range(again.epoch, 3):
        again.set_epoch(epoch)
        seen[epoch] = ids(again)
    made.set_epoch(2)
    assert seen == {1: whole[6:], 2: ids(made)}


def test_the_state_of_any_rank_is_the_state_of_all(path: Path) -> None:
    ranks = [batches(open_run(path), 7, rank=r, world_size=2) for r in range(2)]
    states = []
    for rank in ranks:
        iterator = iter(rank)
        next(iterator)
        states.append(rank.state_dict())
        iterator.close()
    assert states[0] == states[1]


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        pytest.param({"shuffle_seed": 2}, "shuffle_seed was 1, is 2", id="seed"),
        pytest.param({"max_tokens": 8}, "max_tokens was 7, is 8", id="max_tokens"),
        pytest.param({"world_size": 2}, "world_size was 1, is 2", id="world size"),
        pytest.param({"layout": "padded"}, "layout was 'packed', is 'padded'", id="layout"),
    ],
)
def test_a_state_of_another_pass_is_refused_with_the_difference(
    changes: dict[str, Any], difference: str, path: Path
) -> None:
    settings = {"max_tokens": 7, "shuffle_seed": 1}
    state = batches(open_run(path), **settings).state_dict()
    with pytest.raises(errors.ConfigChanged, match=rf"another pass \({difference}\)"):
        batches(open_run(path), **settings | changes).load_state_dict(state)


def test_a_state_of_other_rollouts_is_refused(path: Path, tmp_path: Path) -> None:
    state = batches(open_run(path), 7).state_dict()
    longer = [rollout_of("0", 9, [1]), *ELEVEN[1:]]
    for name, rollouts, words in (
        ("fewer", ELEVEN[:-1], "rollouts was 11, is 10; rollouts_hash was"),
        ("other", [*ELEVEN[:-1], rollout_of("other", 3, [2, 0, 1])], r"\(rollouts_hash was"),
        ("longer", longer, r"\(rollouts_hash was"),
    ):
        with pytest.raises(errors.ConfigChanged, match=words):
            batches(open_run(write(tmp_path / name, rollouts)), 7).load_state_dict(state)


def test_a_state_with_keys_missing_is_refused(path: Path) -> None:
    made = batches(open_run(path), 7)
    state = made.state_dict()
    del state["done"]
    with pytest.raises(errors.ConfigError, match=r"\['done'\] are missing"):
        made.load_state_dict(state)


def workers(made: Batches, number: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(made, batch_size=None, num_workers=number, **options)


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_workers_share_the_batches_and_keep_their_order(number: int, path: Path) -> None:
    made = batches(open_run(path), 7, shuffle_seed=3)
    got = list(workers(made, number))
    assert [contents(b) for b in got] == [contents(b) for b in made]
    assert len(workers(made, number)) == len(got)


@pytest.mark.stress
def test_workers_of_a_new_process_map_the_shards_themselves(path: Path) -> None:
    made = batches(open_run(path).where(lambda r: True), 7)  # a condition that no pickle holds
    got = list(workers(made, 1, multiprocessing_context="spawn"))
    assert [contents(b) for b in got] == [contents(b) for b in made]


def test_what_is_pickled_holds_no_column(path: Path) -> None:
    made = batches(open_run(path), 7)
    before = len(pickle.dumps(made))
    wanted = [contents(batch) for batch in made]
    assert len(pickle.dumps(made)) - before < 100
    assert [contents(batch) for batch in pickle.loads(pickle.dumps(made))] == wanted


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (0, 2),
        (2, 0),
        pytest.param(2, 3, marks=pytest.mark.stress),
        pytest.param(3, 2, marks=pytest.mark.stress),
    ],
)
def test_a_pass_with_workers_goes_on_with_any_number_of_them(
    before: int, after: int, path: Path
) -> None:
    made = batches(open_run(path), 7)
    whole = ids(made)
    for stop in range(1, len(whole)):
        got, consumer = [], iter(workers(made, before))
        for _ in range(stop):
            got.append(next(consumer))
        del consumer
        again = batches(open_run(path), 7)
        again.load_state_dict(made.state_dict(after=got[-1]))
        assert ids(got) + ids(workers(again, after)) == whole


def test_workers_that_are_restarted_keep_their_shares(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As loaders do that save the state of each worker."""
    made = batches(open_run(path), 7)
    made.load_state_dict(made.state_dict(after=next(iter(made))))
    whole = ids(made)
    shares = []
    for worker in range(2):
        info = SimpleNamespace(id=worker, num_workers=2)
        monkeypatch.setattr(loader, "get_worker_info", lambda info=info: info)
        share, iterator = [], iter(made)
        share += [next(iterator).rollout_ids for _ in range(2 - worker)]
        again = pickle.loads(pickle.dumps(made))
        again.load_state_dict(made.state_dict())
        shares.append(share + ids(again))
    assert shares == [whole[::2], whole[1::2]]


def test_a_loop_that_is_left_early_leaves_no_thread(path: Path) -> None:
    for batch in batches(open_run(path), 7, prefetch=3):
        if batch.number == 1:
            break
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("rollout-prefetch")]

"""batches(): every scored token of a run exactly once, whatever the order, ranks and restarts."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders import make_rollout
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from replay import (
    Batches,
    PackedBatch,
    PaddedBatch,
    Policy,
    ReplayConfig,
    batches,
    loader,
    pack,
    score_support,
    verify,
)
from replay.order import shuffled
from rollout import RunWriter, errors, finished, open_run
from rollout.config import ShardsConfig
from rollout.record import Rollout
from rollout.rules import find_faults
from rollout.schema import to_batch
from rollout.shard import ShardFile
from rollout.support import Support

Batch = PackedBatch | PaddedBatch

QUARTER = float(np.log(np.float32(0.25)))


def rollout_of(name: str, prompt: int, row_sizes: Sequence[int], **changes: Any) -> Rollout:
    """`prompt` tokens, then one output token per size of its support; 0 is a forced one."""
    rows = [list(range(t, t + size)) for t, size in enumerate(row_sizes)]
    support = Support.from_rows(rows)
    return make_rollout(
        name,
        prompt_ids=np.arange(100, 100 + prompt, dtype=np.int32),
        output_ids=np.array([t + max(size, 1) - 1 for t, size in enumerate(row_sizes)], np.int32),
        loss_mask=(support.counts > 0).astype(np.int8),
        sampling_logprobs=-np.log(np.maximum(support.counts, 1)).astype(np.float32),
        support=support,
        full_logprobs=None,
        support_logprobs=None,
        weight_versions=(),
        **changes,
    )


def write(path: Path, rollouts: Sequence[Rollout], **shards: Any) -> Path:
    config = ShardsConfig(**{"batch_rows": 3, "shard_bytes": 1} | shards)
    with RunWriter(path, {}, shards=config) as writer:
        for rollout in rollouts:
            writer.write(rollout)
    return path


ELEVEN = [rollout_of(str(i), 1 + i % 4, [2, 0, 1, 3][: 1 + i % 4]) for i in range(11)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Eleven rollouts of 1 to 7 input tokens in four shards."""
    return write(tmp_path / "run", ELEVEN)


def contents(batch: Batch) -> dict[str, Any]:
    return {k: v.tolist() if torch.is_tensor(v) else v for k, v in vars(batch).items()}


def ids(made: Any) -> list[tuple[str, ...]]:
    return [batch.rollout_ids for batch in made]


def test_a_small_run_as_packed_tensors(tmp_path: Path) -> None:
    first = make_rollout("a")  # prompt 1 3, output 9 8 2, of which 8 is forced
    second = make_rollout("b", prompt_ids=np.array([4], np.int32), temperature=0.75)
    run = open_run(write(tmp_path / "run", [first, second]))
    (batch,) = batches(run, max_tokens=7)
    assert contents(batch) == {
        "number": 0,
        "rollout_ids": ("a:0", "b:0"),
        "input_ids": [1, 3, 9, 8, 4, 9, 8],
        "position_ids": [0, 1, 2, 3, 0, 1, 2],
        "cu_seqlens": [0, 4, 7],
        "max_seqlen": 4,
        "hidden_rows": [1, 3, 4, 6],
        "targets": [9, 2, 9, 2],
        "rollout_index": [0, 0, 1, 1],
        "support_ids": [5, 9, 2, 5, 9, 2],
        "support_offsets": [0, 2, 3, 5, 6],
        "sampling_logprobs": [
            float(np.log(np.float32(0.25))),
            0,
            float(np.log(np.float32(0.25))),
            0,
        ],
        "loss_mask": [True, True, True, True],
        "temperature": [0.5, 0.5, 0.75, 0.75],
    }
    assert ids(batches(run, max_tokens=6)) == [("a:0",), ("b:0",)]


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("max_tokens", [1, 8, 1000])
def test_columns_give_the_batches_that_rollouts_give(
    compression: str, max_tokens: int, tmp_path: Path
) -> None:
    run = open_run(write(tmp_path / "run", ELEVEN, compression=compression))
    made, wanted = list(batches(run, max_tokens)), list(pack(run, max_tokens))
    assert [contents(b) for b in made] == [contents(b) for b in wanted]


def test_scores_of_a_batch_are_those_of_verify(tiny_model_path: Path, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    rollouts = [
        rollout_of(str(i), 3, generator.integers(0, 9, 6).tolist(), temperature=0.5 + i / 4)
        for i in range(5)
    ]
    run = open_run(write(tmp_path / "run", rollouts))
    policy = Policy.load(str(tiny_model_path), dtype="float32", device="cpu")
    verified = verify(run, policy, ReplayConfig(dtype="float32", max_tokens=20, audit_tokens=0))
    got = []
    with torch.inference_mode():
        for batch in batches(run, max_tokens=20):
            hidden = policy.hidden(batch.input_ids, batch.position_ids)[batch.hidden_rows]
            scores = score_support(
                hidden, policy.weight, batch.targets, batch.support_ids, batch.support_offsets,
                temperature=batch.temperature,
            )  # fmt: skip
            got += scores.logprob.tolist()
    assert got == verified.tokens.replay_logprobs.tolist()
    assert len(got) == sum((~r.is_forced).sum() for r in rollouts) > 20


def test_padding_counts_towards_max_tokens(path: Path) -> None:
    made = list(batches(open_run(path), 12, layout="padded"))
    assert all(isinstance(batch, PaddedBatch) for batch in made)
    assert [tuple(batch.input_ids.shape) for batch in made] == [
        (2, 3),
        (1, 5),
        (1, 7),
        (2, 3),
        (1, 5),
        (1, 7),
        (2, 3),
        (1, 5),
    ]
    lengths = [row.sum().item() for batch in made for row in batch.attention_mask]
    assert lengths == [1, 3, 5, 7, 1, 3, 5, 7, 1, 3, 5]


def test_a_view_of_a_run_is_loaded_like_a_run(tmp_path: Path) -> None:
    reasons = ["stop", "length"]
    rollouts = [replace(r, finish_reason=reasons[i % 2]) for i, r in enumerate(ELEVEN)]
    run = open_run(write(tmp_path / "run", rollouts))
    made = batches(run.where(finished), 1000)
    assert ids(made) == [("0:0", "2:0", "4:0", "6:0", "8:0", "10:0")]
    assert [contents(b) for b in made] == [contents(b) for b in pack(run.where(finished), 1000)]
    assert list(batches(run.where(lambda r: False), 1000)) == []


def test_shuffling_is_a_function_of_ids_seed_and_epoch(path: Path, tmp_path: Path) -> None:
    other = open_run(write(tmp_path / "reversed", ELEVEN[::-1]))
    one = batches(open_run(path), 9, shuffle_seed=5)
    two = batches(other, 9, shuffle_seed=5)
    names = [r.rollout_id for r in ELEVEN]
    for epoch in (0, 1, 7):
        one.set_epoch(epoch)
        two.set_epoch(epoch)
        assert sum(ids(one), ()) == tuple(names[i] for i in shuffled(names, 5, epoch))
        assert [contents(b) for b in one] == [contents(b) for b in two]


def test_ranks_share_one_list_of_batches_and_get_equally_many(path: Path) -> None:
    run = open_run(path)
    whole = ids(batches(run, 7, shuffle_seed=1))
    assert len(whole) == 7
    ranks = [ids(batches(run, 7, shuffle_seed=1, rank=r, world_size=3)) for r in range(3)]
    assert [len(rank) for rank in ranks] == [3, 3, 3]
    assert sorted(sum(ranks, [])) == sorted([*whole, (), ()])
    assert [rank.index(()) for rank in ranks if () in rank] == [2, 2]  # the last of theirs


def test_a_rank_without_rollouts_still_runs_the_policy_and_has_zero_gradients(
    path: Path, tiny_model_path: Path
) -> None:
    run = open_run(path)
    made = batches(run, 1000, rank=1, world_size=2)
    (batch,) = made
    assert batch.rollout_ids == ()
    policy = Policy.load(str(tiny_model_path), dtype="float32", device="cpu")
    weight = policy.weight.detach().clone().requires_grad_()
    hidden = policy.hidden(batch.input_ids, batch.position_ids)[batch.hidden_rows]
    scores = score_support(
        hidden, weight, batch.targets, batch.support_ids, batch.support_offsets,
        temperature=batch.temperature,
    )  # fmt: skip
    scores.logprob.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


# ---- resuming


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


# ---- workers and threads


# there may be more workers than cores
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def workers(made: Batches, number: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(made, batch_size=None, num_workers=number, **options)


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_workers_share_the_batches_and_keep_their_order(number: int, path: Path) -> None:
    made = batches(open_run(path), 7, shuffle_seed=3)
    got = list(workers(made, number))
    assert [contents(b) for b in got] == [contents(b) for b in made]
    assert len(workers(made, number)) == len(got)


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


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 3), (3, 2)])
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


def test_a_live_run_is_what_it_was_when_it_was_opened(tmp_path: Path) -> None:
    """Also for a worker that maps it after the writer went on."""
    shards = ShardsConfig(batch_rows=3)
    with RunWriter(tmp_path, {}, shards=shards) as writer:
        for rollout in ELEVEN[:7]:
            writer.write(rollout)
        made = batches(open_run(tmp_path), 1000)
        for rollout in ELEVEN[7:]:
            writer.write(rollout)
        copy = pickle.loads(pickle.dumps(made))
        assert ids(made) == ids(copy) == [tuple(r.rollout_id for r in ELEVEN[:6])]
        more = batches(open_run(tmp_path), 1000)
        assert ids(more) == [tuple(r.rollout_id for r in ELEVEN[:9])]
    with pytest.raises(errors.ConfigChanged, match="rollouts was 6, is 9"):
        more.load_state_dict(made.state_dict())


# ---- bad data and bad arguments


def test_a_format_rule_that_is_broken_raises_before_the_first_batch(tmp_path: Path) -> None:
    path = write(tmp_path / "run", ELEVEN[:2])
    bad = make_rollout("bad", loss_mask=np.ones(3, np.int8))  # its second token is forced
    with ShardFile(path / "shard-00001.arrow") as shard:
        shard.commit(to_batch([bad]))
    state = json.loads((path / "state.json").read_text())
    state["_data_files"].append({"filename": "shard-00001.arrow"})
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(errors.MissingSupport, match=r"shard-00001.arrow, bad:0: output token 1"):
        batches(open_run(path), 7)


def test_a_shard_that_was_cut_after_opening_raises(path: Path) -> None:
    run = open_run(path)
    made = batches(run, 7)
    shard = path / run.shards[-1].name
    shard.write_bytes(shard.read_bytes()[:-200])
    with pytest.raises(errors.ShardDamaged, match=shard.name):
        list(made)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"max_tokens": 0}, "max_tokens must be 1 or more", id="max_tokens"),
        pytest.param({"prefetch": -1}, "prefetch 0 or more", id="prefetch"),
        pytest.param({"layout": "ragged"}, "layout one of", id="layout"),
        pytest.param({"rank": 2, "world_size": 2}, "rank must be in", id="rank"),
        pytest.param({"rank": -1}, "rank must be in", id="negative rank"),
    ],
)
def test_arguments_that_cannot_be_are_refused(
    changes: dict[str, Any], words: str, path: Path
) -> None:
    with pytest.raises(errors.ConfigError, match=words):
        batches(open_run(path), **{"max_tokens": 7} | changes)


# ---- the law

sizes = st.lists(st.integers(0, 3), max_size=4)
shapes = st.lists(st.tuples(st.integers(1, 4), sizes), min_size=1, max_size=9)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    base = tmp_path_factory.mktemp("runs")
    return (base / str(i) for i in count())


def scored_tokens(batch: Batch) -> list[tuple[Any, ...]]:
    """Each scored token with all that belongs to it, found through the tensors alone."""
    offsets, found = batch.support_offsets.tolist(), []
    flat_ids, positions = batch.input_ids.flatten(), batch.position_ids.flatten()
    for t, row in enumerate(batch.hidden_rows.tolist()):
        found.append(
            (
                batch.rollout_ids[batch.rollout_index[t]],
                flat_ids[row - positions[row] : row + 1].tolist(),  # all that it is conditioned on
                batch.targets[t].item(),
                batch.support_ids[offsets[t] : offsets[t + 1]].tolist(),
                batch.sampling_logprobs[t].item(),
                batch.loss_mask[t].item(),
                batch.temperature[t].item(),
            )
        )
    return found


def recorded_tokens(rollout: Rollout) -> list[tuple[Any, ...]]:
    whole = [*rollout.prompt_ids.tolist(), *rollout.output_ids.tolist()]
    return [
        (
            rollout.rollout_id,
            whole[: len(rollout.prompt_ids) + t],
            int(rollout.output_ids[t]),
            rollout.support[t].tolist(),
            float(rollout.sampling_logprobs[t]),
            bool(rollout.loss_mask[t]),
            rollout.temperature,
        )
        for t in np.flatnonzero(~rollout.is_forced).tolist()
    ]


@given(
    shapes=shapes,
    max_tokens=st.integers(1, 20),
    shuffle_seed=st.none() | st.integers(0, 2**32),
    epoch=st.integers(0, 3),
    world_size=st.integers(1, 4),
    layout=st.sampled_from(["packed", "padded"]),
    prefetch=st.integers(0, 2),
)
@settings(max_examples=40)
def test_a_shuffled_resumed_dealt_pass_yields_every_scored_token_exactly_once(
    folders: Iterator[Path],
    shapes: list[tuple[int, list[int]]],
    max_tokens: int,
    world_size: int,
    **options: Any,
) -> None:
    rollouts = [rollout_of(str(i), prompt, rows) for i, (prompt, rows) in enumerate(shapes)]
    assert not any(find_faults(r) for r in rollouts)
    run = open_run(write(next(folders), rollouts))
    wanted = sorted(token for r in rollouts for token in recorded_tokens(r))
    options |= {"max_tokens": max_tokens, "world_size": world_size}
    ranks = [batches(run, rank=rank, **options) for rank in range(world_size)]
    (steps,) = {len(rank) for rank in ranks}
    for stop in range(steps + 1):
        got: list[Batch] = []
        for rank, made in enumerate(ranks):
            iterator = iter(made)
            got += [next(iterator) for _ in range(stop)]
            state = made.state_dict() if stop else batches(run, rank=rank, **options).state_dict()
            iterator.close()
            again = batches(run, rank=rank, **options)
            again.load_state_dict(state)
            rest = list(again)
            assert len(rest) == steps - stop
            got += rest
        assert sorted(token for batch in got for token in scored_tokens(batch)) == wanted
        assert sorted(i for batch in got for i in batch.rollout_ids) == sorted(
            r.rollout_id for r in rollouts
        )
        for batch in got:
            assert batch.input_ids.numel() <= max_tokens or len(batch.rollout_ids) <= 1

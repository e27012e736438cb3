"""batches(): a run as tensors, its order and the share of each rank, and what is refused."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import make_rollout
from small_runs import ELEVEN, contents, ids, rollout_of, write

from replay import (
    PaddedBatch,
    Policy,
    ReplayConfig,
    batches,
    pack,
    score_support,
    verify,
)
from replay.order import shuffled
from rollout import RunWriter, errors, finished, open_run
from rollout.config import ShardsConfig
from rollout.schema import to_batch
from rollout.shard import ShardFile

QUARTER = float(np.log(np.float32(0.25)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Eleven rollouts of 1 to 7 input tokens in four shards."""
    return write(tmp_path / "run", ELEVEN)


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

"""Ranks that share a head score as one process does. Threads, and processes in the slow test."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from supports import LEAVES, cotangent, problem, ragged
from torch import Tensor

from replay import SupportScores, VocabShard, score_support

SIZES = [1, 0, 2, 40, *ragged(20, 31)]
VOCAB, CUT = 40, 13  # rank 0 owns ids below CUT


class Meeting:
    """all_reduce among threads."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30)
        self.given: dict[int, Tensor] = {}

    def all_reduce(self, tensor: Tensor, op: Any, group: Any) -> None:
        self.given[threading.get_ident()] = tensor.clone()
        self.barrier.wait()
        stacked = torch.stack([self.given[i] for i in sorted(self.given)])
        self.barrier.wait()
        tensor.copy_(stacked.amax(0) if op == dist.ReduceOp.MAX else stacked.sum(0))


def no_ids_at_rank_0(p: dict[str, Any]) -> dict[str, Any]:
    """The same supports with ids from CUT on."""
    moved = {name: p[name] + CUT for name in ("targets", "support_ids")}
    rows = {name: torch.cat([p[name][:CUT], p[name]]) for name in ("weight", "bias")}
    return p | moved | rows


@pytest.mark.parametrize("entropy", [False, True], ids=["plain", "entropy"])
@pytest.mark.parametrize(
    ("p", "cut"),
    [
        pytest.param(problem(SIZES, VOCAB, 8), CUT, id="both own many"),
        pytest.param(problem(SIZES, VOCAB, 8), 1, id="one id"),
        pytest.param(no_ids_at_rank_0(problem(SIZES, VOCAB, 8)), CUT, id="no id"),
        pytest.param(problem(SIZES, VOCAB, 8), 0, id="no row"),
    ],
)
def test_two_threads_score_as_one(
    p: dict[str, Any], cut: int, entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = Meeting(2)
    monkeypatch.setattr(dist, "all_reduce", meeting.all_reduce)

    def rank(number: int) -> None:
        try:
            sharded_head(p, number, entropy, cut, None)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(rank, number) for number in (0, 1)]:
            done.result()


def test_a_rank_owns_no_id_of_some_rows() -> None:
    """What the case above says it has."""
    p = problem(SIZES, VOCAB, 8)
    owned = torch.zeros(len(SIZES), dtype=torch.int64)
    rows = torch.repeat_interleave(torch.tensor(SIZES))
    owned.index_add_(0, rows, (p["support_ids"] < 1).long())
    assert 0 < int((owned > 0).sum()) < sum(size > 1 for size in SIZES)


@pytest.mark.stress
def test_two_processes_score_as_one(tmp_path: Path) -> None:
    mp.spawn(rank_of_two, args=(str(tmp_path / "meeting"),), nprocs=2)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_score_as_one(tmp_path: Path) -> None:
    mp.spawn(rank_of_two, args=(str(tmp_path / "meeting"), "cuda"), nprocs=2)


def rank_of_two(rank: int, meeting: str, kind: str = "cpu") -> None:
    torch.set_num_threads(1)
    if kind == "cuda":
        torch.cuda.set_device(rank)
    backend = {"cpu": "gloo", "cuda": "nccl"}[kind]
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=2)
    try:
        group = dist.group.WORLD
        p = problem(SIZES, VOCAB, 8, device=kind)
        for entropy in (False, True):
            sharded_head(p, rank, entropy, CUT, group)
        sharded_head(no_ids_at_rank_0(p), rank, False, CUT, group)
        gathered_head(rank, kind)
    finally:
        dist.destroy_process_group()


def scores_and_grads(
    p: dict[str, Any], entropy: bool, **options: Any
) -> tuple[SupportScores, list[Tensor]]:
    leaves = [p[name].detach().requires_grad_() for name in LEAVES]
    scores = score_support(
        **(p | dict(zip(LEAVES, leaves, strict=True))), return_logsumexp=not entropy, **options
    )
    inside = scores.logprob > -torch.inf
    loss = (scores.logprob * cotangent(scores.logprob, 1))[inside].sum()
    if entropy:
        loss = loss + (scores.entropy * cotangent(scores.entropy, 2)).sum()
    return scores, list(torch.autograd.grad(loss, leaves))


def sharded_head(p: dict[str, Any], rank: int, entropy: bool, cut: int, group: Any) -> None:
    wanted, (hidden, weight, bias) = scores_and_grads(p, entropy, softcap=5.0)
    rows = slice(0, cut) if rank == 0 else slice(cut, len(p["weight"]))
    mine = p | {"weight": p["weight"][rows], "bias": p["bias"][rows]}
    shard = VocabShard(rows.start, len(p["weight"]), group)
    got, grads = scores_and_grads(mine, entropy, softcap=5.0, shard=shard)
    for name in ("logprob", "entropy") + (() if entropy else ("logsumexp",)):
        torch.testing.assert_close(getattr(got, name), getattr(wanted, name), atol=2e-6, rtol=0)
    assert int(got.outside) == int(wanted.outside)
    alone = p["support_offsets"].diff() == 1
    assert torch.equal(got.logprob[alone], wanted.logprob[alone])
    for a, b in zip(grads, (hidden, weight[rows], bias[rows]), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def gathered_head(rank: int, kind: str) -> None:
    """As FSDP2 shards it: each rank has tokens of its own; the head's gradient is their mean."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(kind, (2,))
    parts = [problem(SIZES, VOCAB, 8, device=kind, seed=seed) for seed in (0, 1)]
    for part in parts:
        part["weight"] = parts[0]["weight"]
    wanted = sum(scores_and_grads(part, False)[1][1] for part in parts) / 2
    weight = distribute_tensor(parts[0]["weight"].clone(), mesh, [Shard(0)]).requires_grad_()
    p = parts[rank]
    scores = score_support(**(p | {"weight": weight}))
    inside = scores.logprob > -torch.inf
    (scores.logprob * cotangent(scores.logprob, 1))[inside].sum().backward()
    torch.testing.assert_close(weight.grad.full_tensor(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "options", [{"return_support_logprobs": True}, {"impl": "reference"}], ids=["by id", "impl"]
)
def test_what_a_shard_cannot_do_is_refused(options: dict[str, Any]) -> None:
    p = problem([2], 5, 3)
    with pytest.raises(ValueError, match="shard goes with"):
        score_support(**p, shard=VocabShard(0, 5, None), **options)  # type: ignore[arg-type]


def test_an_id_that_no_rank_owns_is_refused() -> None:
    """Without this check it would silently add nothing to its support."""
    p = problem([2, 3], 7, 3)
    below = int(p["support_ids"].max())
    shard = VocabShard(0, below, None)  # type: ignore[arg-type]
    mine = p | {"weight": p["weight"][:2], "bias": p["bias"][:2]}
    with pytest.raises(ValueError, match=f"id {below}.* {below}"):
        score_support(**mine, shard=shard)


@pytest.mark.parametrize("start", [-1, 4], ids=["below", "above"])
def test_rows_beyond_the_vocabulary_are_refused(start: int) -> None:
    p = problem([2], 5, 3)
    mine = p | {"weight": p["weight"][:2], "bias": p["bias"][:2]}
    with pytest.raises(ValueError, match=f"rows {start} to {start + 2} of a vocabulary of 5"):
        score_support(**mine, shard=VocabShard(start, 5, None))  # type: ignore[arg-type]

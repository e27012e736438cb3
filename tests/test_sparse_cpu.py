"""The sparse path without a GPU agrees with the definition, bit by bit with itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from supports import (
    LEAVES,
    assert_within_budget,
    cotangent,
    first_rows,
    in_float64,
    problem,
    ragged,
    score_with_gradients,
)

import replay
from replay import score_support

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SIZES = [1, 0, 3, 65, *ragged(20, 90)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"softcap": 4.0, "logit_scale": 0.6}, id="shaped"),
        pytest.param({"entropy": True}, id="entropy"),
        pytest.param({"entropy": True, "support": True, "softcap": 4.0}, id="every score"),
    ],
)
@pytest.mark.parametrize("impl", ["cpu", "dense"])
def test_as_exact_as_plain_torch(
    dtype: torch.dtype, options: dict[str, Any], impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replay.dense.TILE_ELEMENTS", 500)
    monkeypatch.setattr("replay.dense.HEAD_ROWS", 10)
    p = problem(SIZES, 97, 33, dtype)
    truth, true_grads = score_with_gradients(in_float64(p), impl="reference", **options)
    plain, plain_grads = score_with_gradients(p, impl="reference", **options)
    got, grads = score_with_gradients(p, impl=impl, **options)
    for name in ("logprob", "entropy"):
        assert_within_budget(getattr(truth, name), getattr(plain, name), getattr(got, name), 1e-5)
    assert int(got.outside) == int(truth.outside)
    # a matmul's gradient rounds both of its factors
    tolerance = TOLERANCE[dtype] * (3 if impl == "dense" else 1)
    for wanted, torch_s, grad in zip(true_grads, plain_grads, grads, strict=True):
        assert grad.dtype == dtype
        assert_within_budget(wanted, torch_s, grad, tolerance)


@pytest.mark.parametrize("impl", ["cpu", "dense"])
def test_probabilities_of_large_logits_are_divided_by_their_sum(impl: str) -> None:
    """Equal head rows have no gradient; a logsumexp of 20 rounded to fp32 would leave 1e-6."""
    hidden = torch.linspace(15, 25, 200)[:, None].requires_grad_()
    ids, offsets = torch.arange(3).repeat(200), torch.arange(0, 601, 3)
    weight, bias = torch.ones(3, 1), torch.tensor([0.1, 0.3, 0.7])
    targets = torch.zeros(200, dtype=torch.int64)
    scores = score_support(hidden, weight, targets, ids, offsets, bias=bias, impl=impl)
    scores.logprob.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.abs().max() <= 2e-7


@pytest.mark.parametrize("dim", [5, 300])
def test_a_row_alone_scores_as_in_a_batch(dim: int) -> None:
    p = problem([90, *ragged(20, 60)], 100, dim)
    whole, (grad, _, _) = score_with_gradients(p, impl="cpu")
    for count in (1, 7, 21):
        alone, (grad_alone, _, _) = score_with_gradients(first_rows(p, count), impl="cpu")
        assert torch.equal(alone.logprob, whole.logprob[:count])
        assert torch.equal(alone.entropy, whole.entropy[:count])
        assert torch.equal(grad_alone, grad[:count])


def test_float64_stays_float64() -> None:
    p = in_float64(problem(SIZES, 97, 33))
    wanted, wanted_grads = score_with_gradients(p, impl="reference", entropy=True)
    got, grads = score_with_gradients(p, impl="cpu", entropy=True)
    torch.testing.assert_close(got.logprob, wanted.logprob, atol=1e-12, rtol=0)
    for a, b in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(SIZES, 97, 33)
    whole, grads = score_with_gradients(p)
    monkeypatch.setattr("replay.sparse_cpu.BLOCK_ELEMENTS", 1000)
    blocks, block_grads = score_with_gradients(p)
    assert torch.equal(blocks.logprob, whole.logprob)
    assert all(torch.equal(a, b) for a, b in zip(block_grads, grads, strict=True))


def test_a_plan_serves_many_passes_and_runs_agree_bitwise() -> None:
    p = problem([5] * 512, 9, 64)
    made = replay.plan(p["support_ids"], p["support_offsets"], 9)
    first, grads = score_with_gradients(p, plan=made)
    for _ in range(3):
        again, grads_again = score_with_gradients(p, plan=made)
        assert torch.equal(again.logprob, first.logprob)
        assert all(torch.equal(a, b) for a, b in zip(grads_again, grads, strict=True))


@pytest.mark.parametrize("sizes", [[], [1, 1], [0, 0]], ids=["no tokens", "singletons", "empty"])
def test_batches_without_work(sizes: list[int]) -> None:
    scores, grads = score_with_gradients(problem(sizes, 5, 3))
    assert scores.logprob.tolist() == [0.0 if size else -torch.inf for size in sizes]
    assert not any(grad.any() for grad in grads)


def test_a_singleton_is_read_only_for_its_logsumexp() -> None:
    p = problem([1, 2], 5, 3)
    p["hidden"][0] = torch.nan
    got = score_support(**p)
    assert (got.logprob[0].item(), got.entropy[0].item(), got.logsumexp) == (0.0, 0.0, None)
    p["hidden"][0] = 1.0
    got = score_support(**p, return_logsumexp=True)
    wanted = score_support(**p, return_logsumexp=True, impl="reference")
    assert got.logsumexp is not None and wanted.logsumexp is not None
    torch.testing.assert_close(got.logsumexp, wanted.logsumexp)
    assert got.logprob[0].item() == 0.0


@pytest.mark.parametrize("impl", ["cpu", "dense"])
def test_the_head_s_gradient_in_three_forms(impl: str) -> None:
    p = problem(SIZES, 97, 33)
    _, (_, dense, _) = score_with_gradients(p, impl=impl)
    before = torch.randn(dense.shape, generator=torch.Generator().manual_seed(0))
    options: dict[str, Any]
    for options in ({"main_grad": before.clone()}, {"sparse_grad": True}):
        leaves = {name: p[name].detach().requires_grad_() for name in LEAVES}
        scores = score_support(**(p | leaves), impl=impl, **options)
        inside = scores.logprob > -torch.inf
        (scores.logprob * cotangent(scores.logprob, 1))[inside].sum().backward()
        if "main_grad" in options:
            assert leaves["weight"].grad is None
            torch.testing.assert_close(options["main_grad"], before + dense)
        else:
            assert torch.equal(leaves["weight"].grad.to_dense(), dense)


def test_gradients_that_are_not_asked_for_are_not_made() -> None:
    p = problem([3, 2], 5, 3)
    hidden = p["hidden"].requires_grad_()
    score_support(**p).logprob.sum().backward()
    assert hidden.grad is not None and p["weight"].grad is None

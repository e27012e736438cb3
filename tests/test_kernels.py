"""The Triton kernels: on a CUDA device, or interpreted where TRITON_INTERPRET is 1."""

from __future__ import annotations

import os
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
from replay import score_full, score_support
from replay.facts import Head, Supports, gather_facts

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no CUDA device"),
]
cuda_only = pytest.mark.skipif(INTERPRETED, reason="too large to interpret")

SHAPED = {"softcap": 4.0, "logit_scale": 0.6}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of a gradient
SHAPES = [(ragged(200, 300), 5003, 321), ([2, 1, 0, 700, 64, 65], 50257, 2880)]
if INTERPRETED:
    SHAPES = [([3, 1, 0, 9, 4], 11, 5)]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreting is slow: short runs are cut, too."""
    if INTERPRETED:
        monkeypatch.setattr("replay.support_plan.TILE", 4)
        monkeypatch.setattr("replay.support_plan.PIECE", 2)


def on(p: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {k: v.to(dtype) if k in LEAVES else v for k, v in p.items()}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"T{len(s[0])}-V{s[1]}-D{s[2]}")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param(SHAPED, id="shaped"),
        pytest.param({"entropy": True}, id="entropy"),
        pytest.param({"entropy": True, "support": True, "softcap": 4.0}, id="every score"),
    ],
)
def test_as_exact_as_plain_torch(
    dtype: torch.dtype, shape: tuple[list[int], int, int], options: dict[str, Any]
) -> None:
    p = problem(*shape, dtype=dtype, device=DEVICE)
    options = {"return_logsumexp": True} | options
    truth, true_grads = score_with_gradients(in_float64(p), impl="reference", **options)
    plain, plain_grads = score_with_gradients(p, impl="reference", **options)
    got, grads = score_with_gradients(p, impl="triton", **options)
    for name in ("logprob", "entropy", "logsumexp"):
        wanted = getattr(truth, name)
        assert_within_budget(wanted, getattr(plain, name), getattr(got, name), 2e-5)
    assert int(got.outside) == int(truth.outside)
    for wanted, torch_s, grad in zip(true_grads, plain_grads, grads, strict=True):
        assert grad.dtype == dtype
        assert_within_budget(wanted, torch_s, grad, TOLERANCE[dtype])


@cuda_only
@pytest.mark.parametrize("dim", [1024, 4096, 7168, 8192])
def test_forward_is_within_1e_4_of_float64(dim: int) -> None:
    p = problem([4096, *ragged(300, 512)], 32768, dim, torch.bfloat16, DEVICE)
    truth = score_support(**in_float64(p), impl="reference")
    got = score_support(**p, impl="triton")
    inside = truth.logprob > -torch.inf
    assert (got.logprob[inside] - truth.logprob[inside]).abs().max() <= 1e-4
    assert (got.entropy - truth.entropy).abs().max() <= 1e-4
    assert torch.equal(got.logprob[~inside], truth.logprob[~inside].float())


@pytest.mark.parametrize("head_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_head_of_an_engine_is_mirrored(head_dtype: torch.dtype) -> None:
    hidden = torch.tensor([[1, 0.0625]], dtype=torch.bfloat16, device=DEVICE)
    weight = torch.tensor([[16, 1.6015625], [16, 0.80078125], [16, 0], [8, 0]]).bfloat16()
    rest = (torch.tensor([1]), torch.tensor([0, 1, 2]), torch.tensor([0, 3]))
    arguments = (hidden, weight.to(DEVICE), *(t.to(DEVICE) for t in rest))
    plain = score_support(*arguments, impl="triton").logprob.item()
    assert plain == pytest.approx(-1.099447, abs=1e-5)
    got = score_support(*arguments, impl="triton", head_dtype=head_dtype).logprob.item()
    wanted = score_support(*arguments, impl="reference", head_dtype=head_dtype).logprob.item()
    if INTERPRETED and head_dtype == torch.bfloat16:
        pytest.skip("the interpreter cuts off where a GPU rounds")
    assert got == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    "sizes", [[], [1, 1, 1], [0, 0], [0, 1, 2]], ids=["no tokens", "singletons", "empty", "mixed"]
)
def test_small_batches(sizes: list[int]) -> None:
    p = problem(sizes, 7, 3, device=DEVICE)
    got, grads = score_with_gradients(p, impl="triton")
    wanted, wanted_grads = score_with_gradients(p, impl="reference")
    torch.testing.assert_close(got.logprob, wanted.logprob)
    torch.testing.assert_close(got.entropy, wanted.entropy)
    assert int(got.outside) == int(wanted.outside)
    for a, b in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(a, b)


def test_every_output_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(make: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = make(*args, **kwargs)
            return made.fill_(torch.nan) if made.is_floating_point() else made

        return call

    p = problem(*SHAPES[0], device=DEVICE)
    wanted, wanted_grads = score_with_gradients(p, impl="reference", support=True)
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    got, grads = score_with_gradients(p, impl="triton", support=True)
    monkeypatch.undo()
    torch.testing.assert_close(got.logprob, wanted.logprob, atol=2e-5, rtol=0)
    torch.testing.assert_close(got.support_logprobs, wanted.support_logprobs, atol=2e-5, rtol=0)
    for a, b in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_any_strides() -> None:
    p = problem(*SHAPES[0], device=DEVICE)
    wanted, wanted_grads = score_with_gradients(p, impl="triton")
    wide = torch.stack([p["hidden"], p["hidden"]], 2)
    strided = p | {"hidden": wide[:, :, 1], "weight": p["weight"].T.contiguous().T}
    assert strided["hidden"].stride(1) == 2
    got, grads = score_with_gradients(strided, impl="triton")
    torch.testing.assert_close(got.logprob, wanted.logprob)
    for a, b in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(a, b)


def test_the_head_s_gradient_in_three_forms() -> None:
    p = problem(*SHAPES[0], device=DEVICE)
    _, (_, dense, _) = score_with_gradients(p, impl="triton")
    before = torch.randn(dense.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    weight = p["weight"].detach().requires_grad_()
    for options in ({"main_grad": before.clone()}, {"sparse_grad": True}):
        hidden = p["hidden"].detach().requires_grad_()
        weight.grad = None
        scores = score_support(
            **(p | {"weight": weight, "hidden": hidden}), impl="triton", **options
        )
        inside = scores.logprob > -torch.inf
        (scores.logprob * cotangent(scores.logprob, 1))[inside].sum().backward()
        if "main_grad" in options:
            assert weight.grad is None
            torch.testing.assert_close(options["main_grad"], before + dense)
        else:
            assert weight.grad is not None and weight.grad.is_sparse
            assert torch.equal(weight.grad.to_dense(), dense)


def test_a_plan_serves_many_passes_and_runs_agree_bitwise() -> None:
    num_tokens = 6 if INTERPRETED else 4096
    p = problem([5] * num_tokens, 9, 16, device=DEVICE)  # every id in hundreds of rows
    made = replay.plan(p["support_ids"], p["support_offsets"], 9)
    runs = [score_with_gradients(p, plan=made, impl="triton") for _ in range(2 + 3 * cuda())]
    for scores, grads in runs[1:]:
        assert torch.equal(scores.logprob, runs[0][0].logprob)
        assert all(torch.equal(a, b) for a, b in zip(grads, runs[0][1], strict=True))


def test_a_row_alone_scores_as_in_a_batch() -> None:
    sizes = [9, 1, 3] if INTERPRETED else [300, *ragged(63, 200)]
    p = problem(sizes, max(sizes), 5 if INTERPRETED else 1000, device=DEVICE)
    whole, (grad, _, _) = score_with_gradients(p, impl="triton")
    for count in (1,) if INTERPRETED else (1, 7, 64):
        alone, (grad_alone, _, _) = score_with_gradients(first_rows(p, count), impl="triton")
        assert torch.equal(alone.logprob, whole.logprob[:count])
        assert torch.equal(alone.entropy, whole.entropy[:count])
        assert torch.equal(grad_alone, grad[:count])


@pytest.mark.parametrize("options", [{}, {"entropy": True}], ids=["plain", "entropy"])
def test_waves_do_not_show(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem([9, 4, 1, 10] if INTERPRETED else ragged(300, 300), 305, 5, device=DEVICE)
    runs = []
    for wave in (8192, 3):
        monkeypatch.setattr("replay.support_plan.WAVE", wave)
        made = replay.plan(p["support_ids"], p["support_offsets"])
        assert (len(made.work.tiles.waves) > 1) == (wave == 3)
        runs.append(score_with_gradients(p, impl="triton", plan=made, **options))
    (one, grads), (several, wave_grads) = runs
    assert torch.equal(one.logprob, several.logprob)
    assert torch.equal(one.entropy, several.entropy)
    assert all(torch.equal(a, b) for a, b in zip(grads, wave_grads, strict=True))


def score_logits(
    z: torch.Tensor, targets: list[int], rows: list[list[int]], **options: Any
) -> replay.SupportScores:
    """Scores for given logits: an identity head makes the hidden state the logits."""
    tensors = (
        torch.eye(z.shape[1]),
        torch.tensor(targets),
        torch.tensor([i for row in rows for i in row]),
        torch.tensor([0, *map(len, rows)]).cumsum(0),
    )
    return score_support(z, *(t.to(DEVICE) for t in tensors), impl="triton", **options)


def test_literal_scores() -> None:
    z = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]] * 5, device=DEVICE).requires_grad_()
    rows = [[0, 1], [0, 1, 2], [2], [], [0, 1, 2, 3, 4]]
    got = score_logits(z, [1, 1, 2, 0, 1], rows)
    wanted = [-1.313262, -1.407606, 0.0, -torch.inf, -1.451914]
    assert got.logprob.tolist() == pytest.approx(wanted, abs=1e-6)
    entropies = [0.582203, 0.832396, 0.0, 0.0, 0.999973]
    assert got.entropy.tolist() == pytest.approx(entropies, abs=1e-6)
    assert int(got.outside) == 1
    got.logprob[got.logprob > -torch.inf].sum().backward()
    assert z.grad is not None
    assert z.grad[0].tolist() == pytest.approx([-0.731059, 0.731059, 0, 0, 0], abs=1e-6)
    assert not z.grad[2:4].any()
    got = score_logits(z.detach()[:1], [1], [[0, 1]], temperature=0.5)
    assert got.logprob.item() == pytest.approx(-2.126928, abs=1e-6)


def test_fp16_inputs_do_not_overflow() -> None:
    hidden, weight = torch.tensor([[300.0]]), torch.tensor([[300.0], [299.0]])
    supports = (torch.tensor([1]), torch.tensor([0, 1]), torch.tensor([0, 2]))
    arguments = (hidden.half(), weight.half(), *supports)
    got = score_support(*(t.to(DEVICE) for t in arguments), impl="triton")
    assert got.logprob.item() == -300.0


@cuda_only
@pytest.mark.parametrize("dim", [1, 17, 80, 96, 2880])
def test_sizes_that_no_block_divides(dim: int) -> None:
    for vocab_size in (1, 2, 31, 129, 1000, 50257):
        sizes = [k for k in (1, 3, 64, 65, 1000) if k <= vocab_size]
        p = problem(sizes, vocab_size, dim, device=DEVICE)
        got, wanted = score_support(**p, impl="triton"), score_support(**in_float64(p))
        torch.testing.assert_close(got.logprob.double(), wanted.logprob, atol=1e-5, rtol=0)
    flat = score_logits(torch.zeros(1, 1000, device=DEVICE), [7], [list(range(1000))])
    assert flat.logprob.item() == pytest.approx(-6.907755, abs=1e-6)


@cuda_only
def test_training_needs_little_beside_the_head_s_gradient() -> None:
    """With [T, V] logits it would be 5 GB in fp32."""
    num_tokens, vocab_size, size = 8192, 151_936, 20
    leaves = [
        torch.randn(rows, 1024, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
        for rows in (num_tokens, vocab_size)
    ]
    ids = torch.arange(num_tokens * size, device=DEVICE) * 7919 % vocab_size
    offsets = torch.arange(0, len(ids) + 1, size, device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    score_support(*leaves, ids[::size].clone(), ids, offsets).logprob.sum().backward()
    head_grad = 2 * leaves[1].numel()
    assert torch.cuda.max_memory_allocated() - before - head_grad < 150e6


def cuda() -> bool:
    return not INTERPRETED


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 4.0, "logit_scale": 0.6}], ids=["plain", "shaped"]
)
def test_full_scores(
    dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64, with the chunks of a large vocabulary at a small one."""
    monkeypatch.setattr("replay.full.VOCAB_CHUNK", 4 if INTERPRETED else 1024)
    monkeypatch.setattr("replay.full.TOKEN_CHUNK", 2 if INTERPRETED else 100)
    p = problem([1] * (3 if INTERPRETED else 255), 7 if INTERPRETED else 5003, 17, dtype, DEVICE)
    p = {k: v for k, v in p.items() if not k.startswith("support")}
    runs = []
    for inputs, fits in ((in_float64(p), False), (p, True)):
        monkeypatch.setattr("replay.full.triton_fits", lambda *_, fits=fits: fits)
        leaves = [inputs[name].detach().requires_grad_() for name in LEAVES]
        scores = score_full(**(inputs | dict(zip(LEAVES, leaves, strict=True))), **options)
        loss = (scores.logprob - 0.5 * scores.entropy + 0.1 * scores.logsumexp).sum()
        runs.append((scores, torch.autograd.grad(loss, leaves)))
    (truth, true_grads), (got, grads) = runs
    for name in ("logprob", "entropy", "logsumexp"):
        gap = getattr(got, name).double() - getattr(truth, name)
        assert gap.abs().max() <= 5e-5, name
    assert torch.equal(got.argmax, truth.argmax)
    for a, b in zip(true_grads, grads, strict=True):
        error = (a - b.double()).norm() / a.norm()
        assert error <= TOLERANCE[dtype]


@cuda_only
def test_offsets_past_31_bits() -> None:
    """Rows of hidden and weight that begin beyond 2^31 elements."""
    dim, num_rows = 8192, 270_000
    weight = torch.zeros(num_rows, dim, dtype=torch.bfloat16, device=DEVICE)
    hidden = torch.zeros(num_rows, dim, dtype=torch.bfloat16, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(0)
    for tensor in (weight, hidden):
        tensor[-3:] = torch.randn(3, dim, generator=generator, device=DEVICE).bfloat16() / 64
    offsets = torch.zeros(num_rows + 1, dtype=torch.int64, device=DEVICE)
    offsets[-3:] = torch.tensor([3, 6, 9])
    ids = torch.tensor([num_rows - 1, num_rows - 2, num_rows - 3] * 3, device=DEVICE)
    targets = torch.full((num_rows,), num_rows - 2, device=DEVICE)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    got = score_support(*leaves, targets, ids, offsets, impl="triton")
    got.logprob[-3:].sum().backward()
    small = [t.detach()[-3:].double().requires_grad_() for t in leaves]
    few = torch.tensor([2, 1, 0] * 3, device=DEVICE)
    wanted = score_support(*small, torch.ones(3, device=DEVICE).long(), few, offsets[-4:] - 0)
    wanted.logprob.sum().backward()
    torch.testing.assert_close(got.logprob[-3:].double(), wanted.logprob, atol=1e-4, rtol=0)
    for leaf, reduced in zip(leaves, small, strict=True):
        assert leaf.grad is not None and reduced.grad is not None
        torch.testing.assert_close(leaf.grad[-3:].double(), reduced.grad, atol=1e-3, rtol=2e-2)
        assert not leaf.grad[:-3].any()


@cuda_only
def test_training_holds_one_row_per_token_with_work() -> None:
    num_tokens, dim = 4096, 1024
    p = problem([1, 8] * (num_tokens // 2), 5000, dim, torch.bfloat16, DEVICE)
    made = replay.plan(p["support_ids"], p["support_offsets"], 5000)
    hidden, weight = p["hidden"].requires_grad_(), p["weight"].requires_grad_()
    before = torch.cuda.memory_allocated()
    scores = score_support(**(p | {"hidden": hidden, "weight": weight}), plan=made)
    held = torch.cuda.memory_allocated() - before
    assert held <= 2 * (num_tokens // 2) * dim + 32 * (len(p["support_ids"]) + num_tokens)
    assert scores.logprob.grad_fn is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, SHAPED], ids=["plain", "shaped"])
def test_facts_of_an_audit(
    dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members taken out of tiles: the kernel sees what plain torch sees, and in float64 too."""
    monkeypatch.setattr("replay.facts.TILE_ELEMENTS", 8 if INTERPRETED else 100_000)
    monkeypatch.setattr("replay.facts.TOKEN_CHUNK", 2 if INTERPRETED else 100)
    p = problem(*SHAPES[0], device=DEVICE)
    supports = Supports(p["support_ids"], p["support_offsets"], p["temperature"])
    found = []
    for fits in (True, False):
        monkeypatch.setattr("replay.facts.triton_fits", lambda *_, fits=fits: fits)
        head = Head(p["weight"].to(dtype), p["bias"].to(dtype), **options)
        found.append(gather_facts(p["hidden"].to(dtype), head, supports))
    assert torch.equal(found[0].argmax_outside, found[1].argmax_outside)
    for name in ("members", "top_outside", "logsumexp_outside"):
        torch.testing.assert_close(
            getattr(found[0], name), getattr(found[1], name), atol=1e-5, rtol=0
        )

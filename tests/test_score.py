"""score_support and score_full: literal cases, laws, and float64 as the judge."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from replay import plan, score_full, score_support
from replay.reference import SupportScores
from rollout.support import Support

Z5 = [3.0, 2.0, 1.0, 0.0, -1.0]


def score_logits(
    logits: list[list[float]] | Tensor, targets: list[int], rows: list[list[int]], **options: Any
) -> SupportScores:
    """Scores for given logits: an identity head makes the hidden state the logits."""
    z = torch.as_tensor(logits, dtype=torch.float32) if isinstance(logits, list) else logits
    ids = torch.tensor([i for row in rows for i in row], dtype=torch.int64)
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    eye = torch.eye(z.shape[1], dtype=z.dtype)
    return score_support(z, eye, torch.tensor(targets), ids, offsets, **options)


@pytest.mark.parametrize(
    ("temperature", "support", "target", "wanted"),
    [
        pytest.param(1.0, [0, 1], 1, -1.313262, id="two ids"),
        pytest.param(1.0, [0, 1, 2], 1, -1.407606, id="three ids"),
        pytest.param(0.5, [0, 1], 1, -2.126928, id="temperature divides once"),
        pytest.param(1.0, [0, 1, 2, 3, 4], 1, -1.451914, id="whole vocabulary"),
        pytest.param(1.0, [2], 2, 0.0, id="singleton"),
    ],
)
def test_literal_logprobs(
    temperature: float, support: list[int], target: int, wanted: float
) -> None:
    got = score_logits([Z5], [target], [support], temperature=temperature)
    assert got.logprob.item() == pytest.approx(wanted, abs=1e-6)
    assert got.outside.item() == 0


@pytest.mark.parametrize(
    ("support", "wanted"),
    [([0, 1, 2], 0.832396), ([2], 0.0), ([0, 1, 2, 3, 4], 0.999973)],
    ids=["three ids", "singleton", "whole vocabulary"],
)
def test_literal_entropies(support: list[int], wanted: float) -> None:
    got = score_logits([Z5], [support[0]], [support])
    assert got.entropy.item() == pytest.approx(wanted, abs=1e-6)


def test_gap_to_the_full_vocabulary_is_the_log_of_the_kept_mass() -> None:
    z, target = torch.tensor([Z5]), torch.tensor([1])
    full = score_full(z, torch.eye(5), target)
    masked = score_logits([Z5], [1], [[0, 1]])
    assert full.logprob.item() == pytest.approx(-1.451914, abs=1e-6)
    assert math.exp(full.logprob.item() - masked.logprob.item()) == pytest.approx(
        0.870530, abs=1e-6
    )


def test_gradient_stays_inside_the_support() -> None:
    z = torch.tensor([Z5], requires_grad=True)
    score_logits(z, [1], [[0, 1]]).logprob.sum().backward()
    assert z.grad is not None
    wanted = [-0.731059, 0.731059, 0, 0, 0]
    assert z.grad[0].tolist() == pytest.approx(wanted, abs=1e-6)


def test_a_target_outside_its_support_is_minus_inf_counted_and_without_gradient() -> None:
    z = torch.tensor([Z5] * 3, requires_grad=True)
    got = score_logits(z, [1, 0, 0], [[0, 1], [], [0]])
    assert got.logprob.tolist() == pytest.approx([-1.313262, -math.inf, 0.0], abs=1e-6)
    assert got.outside.item() == 1
    valid = torch.isfinite(got.logprob)
    got.logprob[valid].sum().backward()
    assert z.grad is not None and torch.isfinite(z.grad).all()
    assert z.grad[1:].tolist() == [[0.0] * 5] * 2


def test_a_target_outside_a_full_row_does_not_look_like_a_logprob() -> None:
    """The naive formula gives an ordinary-looking −0.13 here."""
    got = score_logits([[3.0, 1.0, 5.0]], [2], [[0, 1]])
    assert (got.logprob.item(), got.outside.item()) == (-math.inf, 1)


def test_a_loss_that_selects_before_arithmetic_is_finite() -> None:
    """One target outside its support: three ratios of 1 remain, and no NaN reaches a weight."""
    hidden, weight = torch.tensor([Z5] * 4, requires_grad=True), torch.eye(5, requires_grad=True)
    supports = (torch.tensor([0, 1, 0, 1, 0, 1, 0, 1]), torch.tensor([0, 2, 4, 6, 8]))
    got = score_support(hidden, weight, torch.tensor([1, 1, 4, 1]), *supports)
    inside = got.logprob > -math.inf
    ratio = torch.exp(got.logprob[inside] + 1.313262)
    (ratio.mean() + got.entropy.mean()).backward()
    assert (ratio.mean().item(), int(got.outside)) == (pytest.approx(1.0, abs=1e-6), 1)
    for leaf in (hidden, weight):
        assert leaf.grad is not None and torch.isfinite(leaf.grad).all()


def test_entropy_has_a_finite_gradient_inside_the_support() -> None:
    z = torch.tensor([Z5] * 2, requires_grad=True)
    score_logits(z, [0, 2], [[0, 1, 2], [2]]).entropy.sum().backward()
    assert z.grad is not None
    wanted = [-0.282588, 0.140770, 0.141817, 0, 0]  # -p (log p + H), by hand
    assert z.grad[0].tolist() == pytest.approx(wanted, abs=1e-6)
    assert z.grad[1].tolist() == [0.0] * 5


def test_context_parallel_ranks_score_as_one() -> None:
    """Zigzag: rows 0, 1, 6, 7 and 2, 3, 4, 5 of eight."""
    z = torch.randn(8, 9, generator=torch.Generator().manual_seed(0))
    support = Support.from_rows([[i, i + 1] for i in range(8)])
    targets, eye = torch.arange(8), torch.eye(9)
    together = torch.empty(8)
    for rows in ([0, 1, 6, 7], [2, 3, 4, 5]):
        mine = support.take(np.array(rows))
        supports = (torch.from_numpy(mine.ids), torch.from_numpy(mine.offsets))
        assert mine.offsets.tolist() == [0, 2, 4, 6, 8]
        together[rows] = score_support(z[rows], eye, targets[rows], *supports).logprob
    whole = (torch.from_numpy(support.ids), torch.from_numpy(support.offsets))
    wanted = score_support(z, eye, targets, *whole).logprob
    torch.testing.assert_close(together, wanted, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="9 support_offsets for 4 targets"):
        score_support(z[:4], eye, targets[:4], *whole)


def test_head_is_fp32_unless_an_engine_is_mirrored() -> None:
    """Rounding logits to bf16 moves this one by 0.04 nats, and a later cast cannot undo it."""
    hidden = torch.tensor([[1, 0.0625]], dtype=torch.bfloat16)
    weight = torch.tensor([[16, 1.6015625], [16, 0.80078125], [16, 0], [8, 0]]).bfloat16()
    arguments = (hidden, weight, torch.tensor([1]), torch.tensor([0, 1, 2]), torch.tensor([0, 3]))
    assert score_support(*arguments).logprob.item() == pytest.approx(-1.099447, abs=1e-5)
    mirrored = score_support(*arguments, head_dtype=torch.bfloat16).logprob.item()
    assert mirrored == pytest.approx(-1.142038, abs=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = score_support(*arguments).logprob
    assert (inside.dtype, inside.item()) == (
        torch.float32,
        score_support(*arguments).logprob.item(),
    )


def test_fp16_inputs_do_not_overflow() -> None:
    hidden, weight = torch.tensor([[300.0]]).half(), torch.tensor([[300.0], [299.0]]).half()
    got = score_support(
        hidden, weight, torch.tensor([1]), torch.tensor([0, 1]), torch.tensor([0, 2])
    )
    assert got.logprob.item() == -300.0


def test_order_is_scale_softcap_temperature() -> None:
    z = torch.tensor([[4.0, 1.0, -3.0]])
    shaped = 5 * torch.tanh(z * 2 / 5) / 0.5
    wanted = shaped[0, 1] - shaped[0, :2].logsumexp(0)
    got = score_logits(z, [1], [[0, 1]], logit_scale=2.0, softcap=5.0, temperature=0.5)
    assert got.logprob.item() == pytest.approx(wanted.item(), abs=1e-6)
    full = score_full(
        z, torch.eye(3), torch.tensor([1]), logit_scale=2.0, softcap=5.0, temperature=0.5
    )
    assert full.logprob.item() == pytest.approx(shaped.log_softmax(1)[0, 1].item(), abs=1e-6)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Ragged shapes: T tokens, V ids, D dims, supports of 1 to V ids that hold their target."""
    num_tokens, vocab_size = draw(st.integers(0, 7)), draw(st.sampled_from([1, 2, 31, 65]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dim = draw(st.sampled_from([1, 17, 40]))
    rows = [
        torch.randperm(vocab_size, generator=generator)[: draw(st.integers(1, vocab_size))].tolist()
        for _ in range(num_tokens)
    ]
    return {
        "hidden": torch.randn(num_tokens, dim, generator=generator, dtype=torch.float64),
        "weight": torch.randn(vocab_size, dim, generator=generator, dtype=torch.float64),
        "targets": torch.tensor([row[-1] for row in rows], dtype=torch.int64),
        "support_ids": torch.tensor([i for row in rows for i in row], dtype=torch.int64),
        "support_offsets": torch.tensor([0, *map(len, rows)]).cumsum(0),
        "temperature": 0.5 + torch.rand(num_tokens, generator=generator, dtype=torch.float64),
        "bias": torch.randn(vocab_size, generator=generator, dtype=torch.float64),
    }


def dense(p: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob, entropy, support logprobs) with every logit materialised, as anyone would."""
    z = (p["hidden"] @ p["weight"].T + p["bias"]) / p["temperature"][:, None]
    masked = torch.full_like(z, -torch.inf)
    rows = torch.repeat_interleave(p["support_offsets"].diff())
    masked[rows, p["support_ids"]] = z[rows, p["support_ids"]]
    logprobs = masked.log_softmax(1)
    entropy = -(logprobs.exp() * logprobs.nan_to_num(neginf=0)).sum(1)
    return (
        logprobs.gather(1, p["targets"][:, None]).squeeze(1),
        entropy,
        logprobs[rows, p["support_ids"]],
    )


@given(problems())
@settings(max_examples=40, deadline=None)
def test_float64_scores_equal_the_materialised_computation(p: dict[str, Any]) -> None:
    got = score_support(**p, return_support_logprobs=True)
    logprob, entropy, per_id = dense(p)
    torch.testing.assert_close(got.logprob, logprob, atol=1e-9, rtol=0)
    torch.testing.assert_close(got.entropy, entropy, atol=1e-9, rtol=0)
    assert got.support_logprobs is not None
    torch.testing.assert_close(got.support_logprobs, per_id, atol=1e-9, rtol=0)


@given(problems())
@settings(max_examples=30, deadline=None)
def test_laws(p: dict[str, Any]) -> None:
    p = {k: v.float() if v.is_floating_point() else v for k, v in p.items()}
    got = score_support(**p, return_support_logprobs=True)
    full = score_full(**{k: v for k, v in p.items() if not k.startswith("support")})
    counts = p["support_offsets"].diff()
    assert got.outside.item() == 0
    assert (got.logprob <= 0).all() and (got.logprob >= full.logprob - 1e-4).all()
    assert (got.logprob[counts == 1] == 0).all(), "a singleton is exactly 0"
    assert got.support_logprobs is not None
    rows = torch.repeat_interleave(counts)
    mass = torch.zeros(len(counts)).index_add(0, rows, got.support_logprobs.exp())
    torch.testing.assert_close(mass, torch.ones_like(mass))
    for t in range(len(counts)):
        row = slice(*p["support_offsets"][[t, t + 1]].tolist())
        alone = score_support(
            p["hidden"][[t]],
            p["weight"],
            p["targets"][[t]],
            p["support_ids"][row],
            torch.tensor([0, int(counts[t])]),
            temperature=p["temperature"][[t]],
            bias=p["bias"],
        )
        assert alone.logprob.item() == got.logprob[t].item(), "a row alone is the row in a batch"


@given(problems())
@settings(max_examples=20, deadline=None)
def test_gradients_equal_the_materialised_computation(p: dict[str, Any]) -> None:
    leaves = [p[name].requires_grad_() for name in ("hidden", "weight", "bias")]
    got = score_support(**p)
    mine = torch.autograd.grad((got.logprob + 0.3 * got.entropy).sum(), leaves)
    logprob, entropy, _ = dense(p)
    wanted = torch.autograd.grad((logprob + 0.3 * entropy).sum(), leaves)
    for a, b in zip(mine, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"weight": torch.zeros(5, 4)}, r"\[2, 3\] and weight \[5, 4\]", id="dims"),
        pytest.param({"targets": torch.tensor([1])}, r"\[1\] targets for 2 rows", id="targets"),
        pytest.param(
            {"support_offsets": torch.tensor([0, 1])}, "2 support_offsets for 2", id="offsets short"
        ),
        pytest.param(
            {"support_offsets": torch.tensor([0, 1, 4])},
            "from 0 to 4, but there are 3 support_ids",
            id="offsets and ids",
        ),
        pytest.param({"bias": torch.ones(3)}, r"bias \[3\] for 5 rows", id="bias"),
        pytest.param({"main_grad": torch.ones(3, 3)}, r"main_grad \[3, 3\]", id="main_grad"),
        pytest.param({"impl": "cuda"}, "impl is 'cuda', must be", id="impl"),
        pytest.param(
            {"plan": plan(torch.tensor([1]), torch.tensor([0, 1]))},
            "plan is for 1 tokens, but there are 2",
            id="plan of others",
        ),
        pytest.param(
            {"plan": plan(torch.tensor([1, 2, 5]), torch.tensor([0, 1, 3]))},
            r"id 5, must be in \[0, 5\)",
            id="plan of a larger vocabulary",
        ),
        pytest.param(
            {"support_ids": torch.tensor([1, 2, 2])}, "token 1 has id 2 twice", id="duplicate"
        ),
        pytest.param({"temperature": 0.0}, "temperature is 0.0", id="temperature"),
        pytest.param({"temperature": torch.ones(3)}, r"temperature \[3\] for 2", id="per token"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_both_numbers(
    change: dict[str, Any], words: str
) -> None:
    arguments: dict[str, Any] = {
        "hidden": torch.zeros(2, 3),
        "weight": torch.zeros(5, 3),
        "targets": torch.tensor([1, 2]),
        "support_ids": torch.tensor([1, 2, 3]),
        "support_offsets": torch.tensor([0, 1, 3]),
    }
    with pytest.raises(ValueError, match=words):
        score_support(**(arguments | change))

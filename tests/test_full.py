"""score_full: literal cases, chunks that do not show, gradients, an engine's head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import replay.full
from replay import FullScores, score_full, score_support

SHAPES = {"softcap": 3.0, "logit_scale": 0.8}


def problem(num_tokens: int, vocab_size: int, dim: int, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(vocab_size)
    return {
        "hidden": torch.randn(num_tokens, dim, generator=generator).to(dtype),
        "weight": torch.randn(vocab_size, dim, generator=generator).to(dtype),
        "targets": torch.randint(vocab_size, (num_tokens,), generator=generator),
        "temperature": 0.5 + torch.rand(num_tokens, generator=generator),
        "bias": torch.randn(vocab_size, generator=generator).to(dtype),
    }


def dense(p: dict[str, Any], softcap: float | None = None, logit_scale: float = 1.0) -> FullScores:
    """With every logit materialised, as anyone would, in float64."""
    z = (p["hidden"].double() @ p["weight"].double().T + p["bias"].double()) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    logprobs = (z / p["temperature"].double()[:, None]).log_softmax(1)
    return FullScores(
        logprobs.gather(1, p["targets"][:, None]).squeeze(1),
        -(logprobs.exp() * logprobs).sum(1),
        (z / p["temperature"].double()[:, None]).logsumexp(1),
        z.argmax(1),
        None,
    )


def gradients(scores: FullScores, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 1, len(scores.logprob))
    loss = (scores.logprob * weights + scores.entropy - 0.3 * scores.logsumexp).sum()
    return torch.autograd.grad(loss, leaves)


@pytest.fixture(params=["one chunk", "many chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many chunks":
        monkeypatch.setattr(replay.full, "VOCAB_CHUNK", 16)
        monkeypatch.setattr(replay.full, "TOKEN_CHUNK", 3)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("shaped", [{}, SHAPES], ids=["plain", "shaped"])
@pytest.mark.parametrize("vocab_size", [1, 16, 47], ids=str)
def test_scores_and_gradients_equal_the_materialised_computation(
    vocab_size: int, shaped: dict[str, float]
) -> None:
    p = problem(7, vocab_size, 5, torch.float64)
    leaves = [p[name].requires_grad_() for name in ("hidden", "weight", "bias")]
    got, wanted = score_full(**p, **shaped), dense(p, **shaped)
    for name in ("logprob", "entropy", "logsumexp"):
        torch.testing.assert_close(
            getattr(got, name), getattr(wanted, name), atol=1e-6, rtol=0, check_dtype=False
        )
    assert torch.equal(got.argmax, wanted.argmax)
    for a, b in zip(gradients(got, leaves), gradients(wanted, leaves), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_a_bf16_head_rounds_its_logits() -> None:
    p = problem(4, 9, 3, torch.bfloat16) | {"temperature": 1.0}
    got = score_full(**p, head_dtype=torch.bfloat16)
    z = p["hidden"].float() @ p["weight"].float().T + p["bias"].float()
    wanted = z.bfloat16().float().log_softmax(1).gather(1, p["targets"][:, None]).squeeze(1)
    torch.testing.assert_close(got.logprob, wanted)
    assert not torch.allclose(got.logprob, score_full(**p).logprob)


def test_kept_mass_is_the_probability_of_the_support() -> None:
    z = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]])
    ids, offsets, target = torch.tensor([0, 1]), torch.tensor([0, 2]), torch.tensor([1])
    masked = score_support(z, torch.eye(5), target, ids, offsets, return_logsumexp=True)
    full = score_full(z, torch.eye(5), target, support_logsumexp=masked.logsumexp)
    assert full.kept_mass is not None
    assert full.kept_mass.item() == pytest.approx(0.870530, abs=1e-6)


def test_two_runs_agree() -> None:
    p = problem(9, 100, 8, torch.bfloat16)
    first, second = score_full(**p), score_full(**p)
    assert all(torch.equal(a, b) for a, b in zip(first[:4], second[:4], strict=True))


def test_no_tokens() -> None:
    p = problem(0, 5, 3, torch.float32)
    p["weight"].requires_grad_()
    got = score_full(**p)
    got.logprob.sum().backward()
    assert (len(got.logprob), bool(p["weight"].grad.any())) == (0, False)


@pytest.mark.parametrize("vocab_size", [8191, 8192, 20000], ids=str)
def test_scores_do_not_depend_on_the_chunks(vocab_size: int) -> None:
    p = problem(5, vocab_size, 12, torch.float32)
    got, wanted = score_full(**p), dense(p)
    for name in ("logprob", "entropy", "logsumexp"):
        torch.testing.assert_close(
            getattr(got, name).double(), getattr(wanted, name), atol=2e-5, rtol=0
        )
    assert torch.equal(got.argmax, wanted.argmax)


def test_padding_of_the_last_chunk_is_not_counted() -> None:
    got = score_full(torch.zeros(1, 3), torch.zeros(1000, 3), torch.tensor([7]))
    assert got.logprob.item() == pytest.approx(-6.907755, abs=1e-6)

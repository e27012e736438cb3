"""Made-up supports to score, their gradients, and the error that plain torch would make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from replay import SupportScores, score_support

LEAVES = ("hidden", "weight", "bias")


def problem(
    sizes: Sequence[int],
    vocab_size: int,
    dim: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `score_support`: supports of these sizes, every fifth target perhaps outside."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(vocab_size, generator=generator)[:size] for size in sizes]
    targets = [
        int(row[-1]) if len(row) and i % 5 != 4 else vocab_size // 2 for i, row in enumerate(rows)
    ]
    num_tokens = len(sizes)
    made = {
        "hidden": torch.randn(num_tokens, dim, generator=generator).to(dtype),
        "weight": (torch.randn(vocab_size, dim, generator=generator) * 3 / dim**0.5).to(dtype),
        "targets": torch.tensor(targets, dtype=torch.int64),
        "support_ids": torch.cat([torch.zeros(0, dtype=torch.int64), *rows]),
        "support_offsets": torch.tensor([0, *sizes]).cumsum(0),
        "temperature": 0.5 + torch.rand(num_tokens, generator=generator),
        "bias": torch.randn(vocab_size, generator=generator).to(dtype),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


def ragged(num_tokens: int, largest: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, largest + 1, (num_tokens,), generator=generator).tolist()


def first_rows(p: dict[str, Any], count: int) -> dict[str, Any]:
    end = int(p["support_offsets"][count])
    part = p | {name: p[name][:count] for name in ("hidden", "targets", "temperature")}
    return part | {
        "support_ids": p["support_ids"][:end],
        "support_offsets": p["support_offsets"][: count + 1],
    }


def in_float64(p: dict[str, Any]) -> dict[str, Any]:
    return {k: v.double() if v.is_floating_point() else v for k, v in p.items()}


def score_with_gradients(
    p: dict[str, Any], *, entropy: bool = False, support: bool = False, **options: Any
) -> tuple[SupportScores, list[Tensor]]:
    """Scores, and the gradients of a weighted sum of those with a gradient to `LEAVES`."""
    leaves = [p[name].detach().requires_grad_() for name in LEAVES]
    scores = score_support(
        **(p | dict(zip(LEAVES, leaves, strict=True))),
        entropy_grad=entropy,
        return_support_logprobs=support,
        **options,
    )
    weights = cotangent(scores.logprob, 1)
    inside = scores.logprob > -torch.inf
    loss = (scores.logprob * weights)[inside].sum()
    if entropy:
        loss = loss + (scores.entropy * cotangent(scores.entropy, 2)).sum()
    if scores.support_logprobs is not None:
        by_id = scores.support_logprobs
        loss = loss + (by_id * cotangent(by_id, 3)).sum()
    return scores, list(torch.autograd.grad(loss, leaves))


def cotangent(like: Tensor, seed: int) -> Tensor:
    """The same numbers for the first rows of a batch as for all of it: randn alone gives others."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(2**17, generator=generator)[: len(like)]
    assert len(drawn) == len(like)
    return drawn.to(like.device, like.dtype)


def assert_within_budget(truth: Tensor, torch_s: Tensor, got: Tensor, tolerance: float) -> None:
    """`got` may be as wrong as plain torch is in its dtype, and no more than `tolerance` worse."""
    truth, torch_s, got = (x.double().cpu() for x in (truth, torch_s, got))
    finite = truth.isfinite()
    assert torch.equal(finite, got.isfinite()), "not finite where the truth is, or the reverse"
    assert torch.equal(truth[~finite], got[~finite])
    truth, torch_s, got = (x[finite] for x in (truth, torch_s, got))
    if not len(truth):
        return
    budget = (truth - torch_s).abs() + tolerance * truth.abs().clamp(min=1)
    excess = (truth - got).abs() - budget
    at = int(excess.argmax())
    words = f"at {at}: truth {truth[at]}, torch {torch_s[at]}, got {got[at]}"
    assert excess[at] <= 0, words

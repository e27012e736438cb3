"""What the sparse implementations are given and what they return; they differ in nothing else."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from replay.support_plan import SupportPlan, Work


class Problem(NamedTuple):
    """Supports to score: arguments as for `score_support`, checked."""

    hidden: Tensor  # [T, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    targets: Tensor  # [T]
    temperature: float | Tensor
    logit_scale: float | None
    softcap: float | None
    head_dtype: torch.dtype
    plan: SupportPlan
    work: Work


class Forward(NamedTuple):
    """Scores [T], and what backward needs of the way to them."""

    logprob: Tensor
    entropy: Tensor
    logsumexp: Tensor  # 0 for a singleton without work
    outside: Tensor
    z: Tensor  # [E] logits after everything; 0 for a singleton without work
    saved: Tensor | None  # [T', D] d logprob / d hidden, up to a factor


class ScoreGrads(NamedTuple):
    """d loss / d (score), where there is one."""

    logprob: Tensor | None  # [T]
    entropy: Tensor | None  # [T]
    support: Tensor | None  # [E]


class HeadGrad(NamedTuple):
    """Where the head's gradient goes: row `rows[i]` of [V, D], or row i of [U, D]."""

    into: Tensor
    scatter: bool  # into [V, D]
    add: bool = False  # to what is there
    blank: bool = False  # `into` holds nothing yet: other rows become 0


class Backend(Protocol):
    """One way to compute; each function is deterministic."""

    def forward(self, problem: Problem, save: bool) -> Forward: ...

    def token_backward(
        self, problem: Problem, scores: Forward, grads: ScoreGrads, hidden: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(d loss / d raw logit [E], d loss / d hidden); the former only where there is work."""
        ...

    def head_backward(self, problem: Problem, coefficients: Tensor, grad: HeadGrad) -> None: ...

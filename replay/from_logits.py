"""score_support_from_logits(): the same scores for trainers that hold the logits already."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from replay.reference import (
    SupportScores,
    no_autocast,
    per_row,
    shape_logits,
    softmax_over_support,
)
from replay.score import check_temperature
from replay.support_plan import SupportPlan, plan_for


def score_support_from_logits(
    logits: Tensor,
    targets: Tensor,
    support_ids: Tensor,
    support_offsets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float | None = None,
    softcap: float | None = None,
    plan: SupportPlan | None = None,
    check: bool = True,
) -> SupportScores:
    """`score_support` of logits [T, V] as the head gave them: scale, softcap, temperature follow.

    Reads and writes only the entries of the supports, in fp32; their gradient is a dense [T, V] in
    the dtype of the logits. Every field of the result is there, as for `score_support`.
    """
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(f"{list(targets.shape)} targets for logits {list(logits.shape)}")
    check_temperature(temperature, len(targets))
    made = plan_for(plan, len(targets), support_ids, support_offsets, logits.shape[1], check=check)
    with no_autocast(logits):
        z = _Entries.apply(logits, made.tokens, made.ids.long())
        z = shape_logits(z, logit_scale, softcap, torch.float32)
        z = z / per_row(temperature, made.tokens)
        return softmax_over_support(z, made.tokens, made.counts, made.ids, targets)


class _Entries(torch.autograd.Function):
    """logits[rows, ids] in fp32 or better; no entry comes twice, so its gradient is a plain put."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ids)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return logits[rows, ids].to(torch.promote_types(logits.dtype, torch.float32))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        rows, ids = ctx.saved_tensors
        dense = torch.zeros(ctx.shape, dtype=ctx.dtype, device=grad.device)
        dense[rows, ids] = grad.to(ctx.dtype)
        return dense, None, None

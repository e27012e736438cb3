"""Launches of the support kernels: shapes, outputs and the measured block sizes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from replay.kernels import support
from replay.problem import Forward, HeadGrad, Problem, ScoreGrads
from replay.support_plan import Pieces

BLOCK_T = 256  # tokens without work, per program
JOIN_D = 1024
CLEAR_ROWS = 4
OPTIONS = {"enable_fp_fusion": True}  # said here, because Triton 3.10 changes the default
ROUND = {torch.float32: None, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Blocks(NamedTuple):
    """Rows gathered at once, warps, and stages of the pipeline of one program."""

    k: int
    warps: int
    stages: int = 1


def forward_blocks(dim: int, save: bool) -> Blocks:
    """They depend on D alone, so that a row does not notice the batch that it is in.

    Measured on an H200 at D = 1024, 4096 and 7168: 32 elements a thread, and few rows at a time.
    """
    if save:
        return Blocks(k=4 if dim > 4096 else 2, warps=_warps(dim), stages=3)
    return Blocks(k=2, warps=_warps(dim), stages=2)


def head_blocks(dim: int) -> Blocks:
    return Blocks(k=2, warps=_warps(dim), stages=2)


def _warps(dim: int) -> int:
    padded: int = triton.next_power_of_2(dim)
    return max(1, min(16, padded // 1024))


def forward(problem: Problem, save: bool) -> Forward:
    p, plan = problem, problem.plan
    tiles, rank, num_work = p.work
    num_tokens, dim = p.hidden.shape
    device = p.hidden.device
    logprob, entropy, logsumexp = (torch.empty(num_tokens, device=device) for _ in range(3))
    z = torch.empty(plan.num_entries, device=device)
    outside = torch.zeros((), dtype=torch.int64, device=device)
    saved = part_rows = None
    if save:
        saved = torch.empty(num_work, dim, dtype=saved_dtype(p), device=device)
        part_rows = torch.empty(tiles.num_slots, dim, device=device)
    part_stats = torch.empty(tiles.num_slots, 4, device=device)
    blocks = forward_blocks(dim, save)
    capped, block_d = p.softcap is not None, triton.next_power_of_2(dim)
    per_token, num_items = isinstance(p.temperature, Tensor), len(tiles.items)
    support.forward_kernel[(num_items + triton.cdiv(num_tokens, BLOCK_T),)](
        p.hidden, p.weight, p.bias, p.targets, p.temperature, plan.ids, plan.offsets, rank,
        tiles.items, logprob, entropy, logsumexp, z, outside, saved, part_stats, part_rows,
        num_items, num_tokens, dim, _scale(p), p.softcap or 1.0,
        *p.hidden.stride(), *p.weight.stride(),
        HAS_BIAS=p.bias is not None, PER_TOKEN=per_token, ROUND=ROUND[p.head_dtype], CAPPED=capped,
        SAVE=save, BLOCK_K=blocks.k, BLOCK_D=block_d, BLOCK_T=BLOCK_T, STAGES=blocks.stages,
        num_warps=blocks.warps, **OPTIONS,
    )  # fmt: skip
    if len(tiles.splits):
        join_d = min(block_d, JOIN_D)
        support.join_tiles_kernel[(len(tiles.splits), triton.cdiv(dim, join_d) if save else 1)](
            p.weight, p.targets, p.temperature, rank, tiles.splits, part_stats, part_rows,
            logprob, entropy, logsumexp, outside, saved, dim, p.softcap or 1.0, *p.weight.stride(),
            PER_TOKEN=per_token, CAPPED=capped, SAVE=save, BLOCK_D=join_d, **OPTIONS,
        )  # fmt: skip
    return Forward(logprob, entropy, logsumexp, outside, z, saved)


def token_backward(
    problem: Problem, scores: Forward, grads: ScoreGrads, hidden: bool
) -> tuple[Tensor, Tensor | None]:
    p, plan = problem, problem.plan
    num_tokens, dim = p.hidden.shape
    coefficients = torch.empty_like(scores.z)
    grad_hidden = (
        torch.empty(num_tokens, dim, dtype=p.hidden.dtype, device=p.hidden.device)
        if hidden
        else None
    )
    saved = scores.saved is not None and grads.entropy is None and grads.support is None
    blocks = forward_blocks(dim, True)
    if num_tokens:
        support.token_backward_kernel[(num_tokens,)](
            p.weight, p.targets, p.temperature, plan.ids, plan.offsets, p.work.rank,
            scores.logprob, scores.entropy, scores.logsumexp, scores.z, scores.saved,
            *map(_contiguous, grads), coefficients, grad_hidden,
            dim, _scale(p), p.softcap or 1.0, *p.weight.stride(),
            PER_TOKEN=isinstance(p.temperature, Tensor), CAPPED=p.softcap is not None,
            SAVED=saved, HIDDEN=hidden, HAS_LOGPROB=grads.logprob is not None,
            HAS_ENTROPY=grads.entropy is not None, HAS_SUPPORT=grads.support is not None,
            BLOCK_K=64 if saved or not hidden else blocks.k,
            BLOCK_D=triton.next_power_of_2(dim), num_warps=4 if saved else blocks.warps,
            **OPTIONS,
        )  # fmt: skip
    return coefficients, grad_hidden


def head_backward(problem: Problem, coefficients: Tensor, grad: HeadGrad) -> None:
    p, edges = problem, problem.plan.edges
    pieces: Pieces = edges.pieces
    if grad.blank:
        _clear(grad.into, p.plan.absent(len(grad.into)))
    if not len(pieces.items):
        return
    dim = p.hidden.shape[1]
    block_d, blocks = triton.next_power_of_2(dim), head_blocks(dim)
    part_rows = torch.empty(pieces.num_slots, dim, device=p.hidden.device)
    support.head_backward_kernel[(len(pieces.items),)](
        p.hidden, coefficients, edges.entry, edges.token, pieces.items, edges.rows, grad.into,
        part_rows, dim, *p.hidden.stride(), grad.into.stride(0),
        SCATTER=grad.scatter, ADD=grad.add, BLOCK_K=blocks.k, BLOCK_D=block_d,
        STAGES=blocks.stages, num_warps=blocks.warps, **OPTIONS,
    )  # fmt: skip
    if len(pieces.splits):
        join_d = min(block_d, JOIN_D)
        support.join_pieces_kernel[(len(pieces.splits), triton.cdiv(dim, join_d))](
            pieces.splits, edges.rows, part_rows, grad.into, dim, grad.into.stride(0),
            SCATTER=grad.scatter, ADD=grad.add, BLOCK_D=join_d, **OPTIONS,
        )  # fmt: skip


def _clear(into: Tensor, rows: Tensor) -> None:
    dim = into.shape[1]
    if len(rows):
        support.clear_rows_kernel[(triton.cdiv(len(rows), CLEAR_ROWS),)](
            rows, into, len(rows), dim, into.stride(0),
            BLOCK_R=CLEAR_ROWS, BLOCK_D=triton.next_power_of_2(dim), **OPTIONS,
        )  # fmt: skip


def saved_dtype(problem: Problem) -> torch.dtype:
    """A row is kept in the dtype of its gradient."""
    return torch.promote_types(problem.hidden.dtype, problem.weight.dtype)


def _scale(problem: Problem) -> float:
    return 1.0 if problem.logit_scale is None else problem.logit_scale


def _contiguous(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.contiguous()

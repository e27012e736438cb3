"""Launches of the support kernels: shapes, outputs and the measured block sizes."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from replay.kernels import support
from replay.problem import Forward, HeadGrad, Problem, ScoreGrads

BLOCK_T = 256  # tokens without work, per program
JOIN_D = 1024
CLEAR_ROWS = 4
OPTIONS = {"enable_fp_fusion": True}  # said here, because Triton 3.10 changes the default
ROUND = {torch.float32: None, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Blocks(NamedTuple):
    """Rows gathered at once, warps, and stages of the pipeline of one program."""

    k: int
    warps: int
    stages: int


def forward_blocks(dim: int, save: bool) -> Blocks:
    """They depend on D alone, so that a row does not notice the batch that it is in.

    Measured on an H200 at D = 1024, 4096 and 7168: 32 elements a thread, and few rows at a time.
    """
    return Blocks(k=1, warps=_warps(dim), stages=3) if save else gather_blocks(dim)


def gather_blocks(dim: int) -> Blocks:
    """Of the forward that saves nothing, and of head rows gathered in backward."""
    return Blocks(k=2, warps=_warps(dim), stages=2)


def head_blocks(dim: int) -> Blocks:
    return Blocks(k=1, warps=_warps(dim), stages=3)


def _warps(dim: int) -> int:
    return max(1, min(16, power_of_2(dim) // 1024))


@cache
def power_of_2(n: int) -> int:
    """`n`, or the next one. Triton's own function, and its `cdiv`, take microseconds a call."""
    return 1 << (n - 1).bit_length()


def cdiv(n: int, size: int) -> int:
    return -(-n // size)


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
        part_rows = torch.empty(tiles.most_slots, dim, device=device)
    part_stats = torch.empty(tiles.num_slots, 4, device=device)
    blocks, block_d = forward_blocks(dim, save), power_of_2(dim)
    join_d = min(block_d, JOIN_D)
    capped, softcap = p.softcap is not None, p.softcap or 1.0
    per_token, strides = isinstance(p.temperature, Tensor), p.weight.stride()
    waves = tiles.waves if save else (tiles.at_once,)
    for wave in waves:
        items, splits = tiles.items[wave.items], tiles.splits[wave.splits]
        num_items, num_splits = items.shape[0], splits.shape[0]
        idle = cdiv(num_tokens, BLOCK_T) if wave is waves[-1] else 0
        if num_items + idle:
            support.forward_kernel[(num_items + idle,)](
                p.hidden, p.weight, p.bias, p.targets, p.temperature, plan.ids, plan.offsets, rank,
                items, logprob, entropy, logsumexp, z, outside, saved, part_stats, part_rows,
                num_items, num_tokens, wave.first_slot, dim, _scale(p), softcap,
                *p.hidden.stride(), *strides, HAS_BIAS=p.bias is not None, PER_TOKEN=per_token,
                ROUND=ROUND[p.head_dtype], CAPPED=capped, SAVE=save, BLOCK_K=blocks.k,
                BLOCK_D=block_d, BLOCK_T=BLOCK_T, STAGES=blocks.stages, num_warps=blocks.warps,
                **OPTIONS,
            )  # fmt: skip
        if num_splits:
            support.join_tiles_kernel[(num_splits, cdiv(dim, join_d) if save else 1)](
                p.weight, p.targets, p.temperature, rank, splits, part_stats, part_rows, logprob,
                entropy, logsumexp, outside, saved, wave.first_slot, dim, softcap, *strides,
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
    blocks = gather_blocks(dim)
    if saved or not hidden:  # no head row is read
        blocks = Blocks(k=64, warps=4 if saved else 1, stages=1)
    if num_tokens:
        support.token_backward_kernel[(num_tokens,)](
            p.weight, p.targets, p.temperature, plan.ids, plan.offsets, p.work.rank,
            scores.logprob, scores.entropy, scores.logsumexp, scores.z, scores.saved,
            *map(_contiguous, grads), coefficients, grad_hidden,
            dim, _scale(p), p.softcap or 1.0, *p.weight.stride(),
            PER_TOKEN=isinstance(p.temperature, Tensor), CAPPED=p.softcap is not None,
            SAVED=saved, HIDDEN=hidden, HAS_LOGPROB=grads.logprob is not None,
            HAS_ENTROPY=grads.entropy is not None, HAS_SUPPORT=grads.support is not None,
            WHOLE=plan.whole, BLOCK_K=blocks.k, BLOCK_D=power_of_2(dim), STAGES=blocks.stages,
            num_warps=blocks.warps, **OPTIONS,
        )  # fmt: skip
    return coefficients, grad_hidden


def head_backward(problem: Problem, coefficients: Tensor, grad: HeadGrad) -> None:
    p, edges, into = problem, problem.plan.edges, grad.into
    pieces = edges.pieces
    dim = p.hidden.shape[1]
    block_d, blocks = power_of_2(dim), head_blocks(dim)
    join_d = min(block_d, JOIN_D)
    absent = p.plan.absent(into.shape[0]) if grad.blank else edges.rows
    num_absent = absent.shape[0] if grad.blank else 0
    part_rows = torch.empty(pieces.most_slots, dim, device=p.hidden.device)
    for wave in pieces.waves:
        items, splits = pieces.items[wave.items], pieces.splits[wave.splits]
        num_items, num_splits = items.shape[0], splits.shape[0]
        clearing = cdiv(num_absent, CLEAR_ROWS) if wave is pieces.waves[-1] else 0
        if num_items + clearing:
            support.head_backward_kernel[(num_items + clearing,)](
                p.hidden, coefficients, edges.entry, edges.token, items, edges.rows, absent, into,
                part_rows, num_items, num_absent, wave.first_slot, dim, *p.hidden.stride(),
                into.stride(0), SCATTER=grad.scatter, ADD=grad.add, BLOCK_K=blocks.k,
                BLOCK_D=block_d, BLOCK_R=CLEAR_ROWS, STAGES=blocks.stages, num_warps=blocks.warps,
                **OPTIONS,
            )  # fmt: skip
        if num_splits:
            support.join_pieces_kernel[(num_splits, cdiv(dim, join_d))](
                splits, edges.rows, part_rows, into, wave.first_slot, dim, into.stride(0),
                SCATTER=grad.scatter, ADD=grad.add, BLOCK_D=join_d, **OPTIONS,
            )  # fmt: skip


def saved_dtype(problem: Problem) -> torch.dtype:
    """A row is kept in the dtype of its gradient."""
    return torch.promote_types(problem.hidden.dtype, problem.weight.dtype)


def _scale(problem: Problem) -> float:
    return 1.0 if problem.logit_scale is None else problem.logit_scale


def _contiguous(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.contiguous()

"""Supports so large that whole rows of logits cost less than gathered head rows: plain matmuls."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from replay.problem import Forward, HeadGrad, Problem, ScoreGrads
from replay.sparse_cpu import coefficients, scores_of_logits, sum_dtype

TILE_ELEMENTS = 2**28  # logits held at once
HEAD_ROWS = 2048


def forward(problem: Problem, save: bool) -> Forward:
    del save  # backward multiplies with the head anyway
    p, plan = problem, problem.plan
    head = p.weight.T
    z = torch.zeros(plan.num_entries, dtype=sum_dtype(p), device=p.hidden.device)
    for rows, entries in _row_tiles(p):
        tile = product(p.hidden[rows], head, z.dtype)
        z[entries] = tile[plan.tokens[entries] - rows.start, plan.ids[entries]]
    if p.bias is not None:
        z += p.bias[plan.ids].to(z.dtype)
    return scores_of_logits(p, z, torch.arange(len(z), device=z.device))


def token_backward(
    problem: Problem, scores: Forward, grads: ScoreGrads, hidden: bool
) -> tuple[Tensor, Tensor | None]:
    p, plan = problem, problem.plan
    c = coefficients(p, scores, grads)
    if not hidden:
        return c, None
    grad = torch.empty(p.hidden.shape, dtype=p.hidden.dtype, device=p.hidden.device)
    for rows, entries in _row_tiles(p):
        tile = p.weight.new_zeros(rows.stop - rows.start, len(p.weight))
        tile[plan.tokens[entries] - rows.start, plan.ids[entries]] = c[entries].to(tile.dtype)
        grad[rows] = product(tile, p.weight, sum_dtype(p)).to(grad.dtype)
    return c, grad


def head_backward(problem: Problem, coefficients: Tensor, grad: HeadGrad) -> None:
    p, edges = problem, problem.plan.edges
    if grad.blank:
        grad.into.zero_()
    ids, c = p.plan.ids[edges.entry], coefficients[edges.entry]
    starts = list(range(0, len(p.weight), HEAD_ROWS))
    edge_at, row_at = (
        torch.searchsorted(x, torch.tensor([*starts, len(p.weight)], device=x.device)).tolist()
        for x in (ids.long(), edges.rows)
    )
    for i, start in enumerate(starts):
        part = slice(edge_at[i], edge_at[i + 1])
        named = slice(row_at[i], row_at[i + 1])
        tile = p.hidden.new_zeros(min(HEAD_ROWS, len(p.weight) - start), len(p.hidden))
        tile[ids[part] - start, edges.token[part]] = c[part].to(tile.dtype)
        values = product(tile, p.hidden, sum_dtype(p))[edges.rows[named] - start]
        if not grad.scatter:
            grad.into[named] = values.to(grad.into.dtype)
        elif grad.add:
            grad.into.index_add_(0, edges.rows[named], values.to(grad.into.dtype))
        else:
            grad.into[edges.rows[named]] = values.to(grad.into.dtype)


def product(a: Tensor, b: Tensor, out: torch.dtype) -> Tensor:
    """a @ b with sums in fp32 or better, and a result in `out`."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    a, b = a.to(dtype), b.to(dtype)
    if dtype == out:
        return a @ b
    if a.is_cuda and out == torch.float32:
        return torch.mm(a, b, out_dtype=out)
    return a.to(out) @ b.to(out)


def _row_tiles(problem: Problem) -> Iterator[tuple[slice, slice]]:
    """Tokens, and the entries of their supports."""
    offsets, num_tokens = problem.plan.offsets, problem.plan.num_tokens
    step = max(1, TILE_ELEMENTS // max(1, len(problem.weight)))
    starts = [*range(0, num_tokens, step), num_tokens]
    borders = offsets[torch.tensor(starts, device=offsets.device)].tolist()
    for i in range(len(starts) - 1):
        yield slice(starts[i], starts[i + 1]), slice(borders[i], borders[i + 1])

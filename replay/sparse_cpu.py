"""The sparse path in plain torch: head rows gathered in blocks that stay in the cache.

Every sum runs over the entries in their order, so that two runs agree and a row does not notice
the batch that it is in. In float64 for float64 inputs, else in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from replay.problem import Forward, HeadGrad, Problem, ScoreGrads
from replay.reference import per_row, segments, shape_logits

BLOCK_ELEMENTS = 2**19  # E x D products held at once


def forward(problem: Problem, save: bool) -> Forward:
    del save  # reading a row again costs what reading its saved gradient would
    p, plan = problem, problem.plan
    entries = (p.work.rank >= 0)[plan.tokens].nonzero().squeeze(1)
    ids, rows = plan.ids[entries], plan.tokens[entries]
    dots = _dots(p.hidden, p.weight, rows, ids)
    if p.bias is not None:
        dots += p.bias[ids].to(dots.dtype)
    z = torch.zeros(plan.num_entries, dtype=dots.dtype, device=dots.device)
    z[entries] = dots
    return scores_of_logits(p, z, entries)


def scores_of_logits(p: Problem, z: Tensor, entries: Tensor) -> Forward:
    """The scores of raw logits [E], of which `entries` are to be shaped; the others stay."""
    plan = p.plan
    shaped = shape_logits(z[entries], p.logit_scale, p.softcap, p.head_dtype)
    z[entries] = shaped / per_row(p.temperature, plan.tokens[entries])
    top = segments("max", z, plan.counts)
    shifted = z - top[plan.tokens]
    mass = segments("sum", shifted.exp(), plan.counts)
    log_mass = mass.log()
    logprobs = shifted - log_mass[plan.tokens]
    entropy = segments("sum", -logprobs.exp() * logprobs, plan.counts)
    hits = (plan.ids == p.targets[plan.tokens]).nonzero().squeeze(1)
    logprob = torch.full_like(top, -torch.inf)
    logprob[plan.tokens[hits]] = logprobs[hits]
    outside = (logprob == -torch.inf).sum()
    return Forward(logprob, entropy, top + log_mass, outside, z, None)


def token_backward(
    problem: Problem, scores: Forward, grads: ScoreGrads, hidden: bool
) -> tuple[Tensor, Tensor | None]:
    p, plan = problem, problem.plan
    c = coefficients(p, scores, grads)
    if not hidden:
        return c, None
    entries = (p.work.rank >= 0)[plan.tokens].nonzero().squeeze(1)
    grad = torch.zeros(p.hidden.shape, dtype=sum_dtype(p), device=p.hidden.device)
    _add_rows(grad, plan.tokens[entries], p.weight, plan.ids[entries], c[entries])
    return c, grad.to(p.hidden.dtype)


def head_backward(problem: Problem, coefficients: Tensor, grad: HeadGrad) -> None:
    p, edges = problem, problem.plan.edges
    if grad.blank:
        grad.into.zero_()
    place = torch.repeat_interleave(edges.counts)
    values = torch.zeros(
        len(edges.rows), p.hidden.shape[1], dtype=sum_dtype(p), device=p.hidden.device
    )
    _add_rows(values, place, p.hidden, edges.token, coefficients[edges.entry])
    if not grad.scatter:
        grad.into.copy_(values)
    elif grad.add:
        grad.into.index_add_(0, edges.rows, values.to(grad.into.dtype))  # no row comes twice
    else:
        grad.into.index_copy_(0, edges.rows, values.to(grad.into.dtype))


def coefficients(p: Problem, scores: Forward, grads: ScoreGrads) -> Tensor:
    """[E] d loss / d (raw logit): as in the kernel, selected before multiplied."""
    rows = p.plan.tokens
    log_p = scores.z - scores.logsumexp[rows]
    weight = log_p.exp()
    if p.plan.whole:  # a logsumexp of 20 is off by 1e-6, and so would be every weight
        weight /= segments("sum", weight, p.plan.counts)[rows]
    c = torch.zeros_like(scores.z)
    if grads.logprob is not None:
        inside = scores.logprob > -torch.inf
        by_logprob = torch.where(inside, grads.logprob, 0)[rows]
        c += torch.where(p.plan.ids == p.targets[rows], by_logprob, 0) - weight * by_logprob
    if grads.entropy is not None:
        c -= grads.entropy[rows] * weight * (log_p + scores.entropy[rows])
    if grads.support is not None:
        c += grads.support - weight * segments("sum", grads.support, p.plan.counts)[rows]
    divisor = per_row(p.temperature, rows)
    if p.softcap is not None:
        c *= 1 - (scores.z * divisor / p.softcap) ** 2
    return c * (1.0 if p.logit_scale is None else p.logit_scale) / divisor


def _dots(hidden: Tensor, weight: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """[E] The dot product of each entry's token and head row."""
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    z = torch.empty(len(ids), dtype=dtype, device=hidden.device)
    for block in _blocks(len(ids), hidden.shape[1]):
        products = weight.index_select(0, ids[block]).to(dtype)
        products *= hidden.index_select(0, rows[block])
        torch.sum(products, 1, out=z[block])
    return z


def _add_rows(into: Tensor, place: Tensor, source: Tensor, rows: Tensor, c: Tensor) -> None:
    """into[place[e]] += c[e] * source[rows[e]], one after the other."""
    for block in _blocks(len(rows), into.shape[1]):
        terms = source.index_select(0, rows[block]).to(into.dtype)
        terms *= c[block, None]
        into.index_add_(0, place[block], terms)


def _blocks(length: int, dim: int) -> list[slice]:
    step = max(1, BLOCK_ELEMENTS // max(dim, 1))
    return [slice(i, i + step) for i in range(0, length, step)]


def sum_dtype(problem: Problem) -> torch.dtype:
    inputs = torch.promote_types(problem.hidden.dtype, problem.weight.dtype)
    return torch.promote_types(inputs, torch.float32)

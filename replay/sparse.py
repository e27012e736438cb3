"""score_support as an autograd.Function over one of the sparse implementations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from replay.problem import Backend, Forward, HeadGrad, Problem, ScoreGrads
from replay.reference import SupportScores, no_autocast, segments
from replay.vocab_parallel import VocabShard, merge, sum_over_ranks

NOTHING = torch.empty(0)  # stands for what save_for_backward keeps


@dataclass(frozen=True)
class Outputs:
    """What is returned and where gradients go."""

    logsumexp: bool
    support_logprobs: bool
    save: bool  # what the logprob's gradient needs, so that backward gathers no head rows for it
    main_grad: Tensor | None
    sparse_grad: bool
    shard: VocabShard | None = None


def score(problem: Problem, backend: Backend, outputs: Outputs) -> SupportScores:
    p = problem
    tensors = (p.hidden, p.weight, p.bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        logprob, entropy, logsumexp, outside, support = _Score.apply(
            *tensors, problem, backend, outputs
        )
        return SupportScores(logprob, entropy, logsumexp, outside, support)
    return _scores(_forward(problem, backend, outputs, save=False), problem, outputs)


def _forward(problem: Problem, backend: Backend, outputs: Outputs, save: bool) -> Forward:
    own = backend.forward(problem, save)
    return own if outputs.shard is None else merge(own, outputs.shard)


def _scores(forward: Forward, problem: Problem, outputs: Outputs) -> SupportScores:
    support = None
    if outputs.support_logprobs:
        support = forward.z - forward.logsumexp[problem.plan.tokens]
    logsumexp = forward.logsumexp if outputs.logsumexp else None
    return SupportScores(forward.logprob, forward.entropy, logsumexp, forward.outside, support)


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        problem: Problem,
        backend: Backend,
        outputs: Outputs,
    ) -> tuple[Tensor | None, ...]:
        save = outputs.save and outputs.shard is None and ctx.needs_input_grad[0]
        made = _forward(problem, backend, outputs, save)
        scores = _scores(made, problem, outputs)
        ctx.save_for_backward(hidden, weight, bias, *made)
        ctx.problem = problem._replace(hidden=NOTHING, weight=NOTHING, bias=None)
        ctx.backend, ctx.outputs = backend, outputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(made.outside)
        if scores.logsumexp is not None:
            ctx.mark_non_differentiable(scores.logsumexp)
        return tuple(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *made = ctx.saved_tensors
        problem = ctx.problem._replace(hidden=hidden, weight=weight, bias=bias)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        scored = ScoreGrads(logprob=grads[0], entropy=grads[1], support=grads[4])
        with no_autocast(hidden):
            coefficients, grad_hidden = ctx.backend.token_backward(
                problem, Forward(*made), scored, hidden=wants_hidden
            )
            grad_hidden = sum_over_ranks(grad_hidden, ctx.outputs.shard)
            grad_weight = grad_bias = None
            if wants_weight:
                grad_weight = _weight_grad(problem, ctx.backend, coefficients, ctx.outputs)
            if wants_bias:
                grad_bias = _bias_grad(problem, coefficients)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _weight_grad(
    problem: Problem, backend: Backend, coefficients: Tensor, outputs: Outputs
) -> Tensor | None:
    """Dense, added to `main_grad`, or the rows that occur."""
    weight, edges = problem.weight, problem.plan.edges
    if outputs.main_grad is not None:
        into = HeadGrad(outputs.main_grad, scatter=True, add=True)
        backend.head_backward(problem, coefficients, into)
        return None
    if outputs.sparse_grad:
        values = weight.new_empty(len(edges.rows), weight.shape[1])
        backend.head_backward(problem, coefficients, HeadGrad(values, scatter=False))
        return _rows_of(weight.shape, edges.rows, values)
    dense = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    backend.head_backward(problem, coefficients, HeadGrad(dense, scatter=True, blank=True))
    return dense


def _rows_of(shape: torch.Size, rows: Tensor, values: Tensor) -> Tensor:
    """torch.sparse_coo_tensor warns on torch 2.11 and 2.12 whatever `check_invariants` says."""
    made: Tensor = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        1,
        1,
        shape,
        rows[None],
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        is_coalesced=True,
    )
    return made


def _bias_grad(problem: Problem, coefficients: Tensor) -> Tensor:
    edges, bias = problem.plan.edges, problem.bias
    assert bias is not None
    sums = segments("sum", coefficients[edges.entry], edges.counts)
    return torch.zeros_like(bias).index_copy_(0, edges.rows, sums.to(bias.dtype))

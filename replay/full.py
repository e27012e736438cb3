"""score_full(): scores over the whole vocabulary, a chunk of tokens by a chunk of ids at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from replay import statistics
from replay.dense import product
from replay.reference import no_autocast
from replay.score import check_rows, check_temperature, triton_fits
from replay.statistics import RowGrads, Running, Shape, Tile

VOCAB_CHUNK = 8192
TOKEN_CHUNK = 4096


class FullScores(NamedTuple):
    """Scores over the whole vocabulary, each [T]."""

    logprob: Tensor
    entropy: Tensor  # in nats
    logsumexp: Tensor
    argmax: Tensor  # int64
    kept_mass: Tensor | None  # probability of the support, where its logsumexp was given


def score_full(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    logit_scale: float | None = None,
    softcap: float | None = None,
    head_dtype: torch.dtype = torch.float32,
    support_logsumexp: Tensor | None = None,
) -> FullScores:
    """Score each target over the whole vocabulary, in chunks of it: [T, V] never exists.

    Arguments as for `score_support`; `logsumexp` of that, given as `support_logsumexp` [T], makes
    `kept_mass`, the probability that the policy gives to the support. Gradients reach hidden,
    weight and bias through `logprob`, `entropy` and `logsumexp`; backward computes the logits
    again. Their gradient is rounded to the inputs' dtype, as in any matmul of that dtype.
    """
    check_rows(hidden, weight, targets)
    check_temperature(temperature, len(targets))
    shape = Shape(
        temperature if isinstance(temperature, Tensor) else float(temperature),
        None if logit_scale is None else float(logit_scale),
        None if softcap is None else float(softcap),
        head_dtype,
    )
    with no_autocast(hidden), torch.cuda.device_of(hidden):
        logprob, entropy, logsumexp, argmax = _Full.apply(hidden, weight, bias, targets, shape)
        kept_mass = None
        if support_logsumexp is not None:
            kept_mass = (support_logsumexp - logsumexp.detach()).exp()
    return FullScores(logprob, entropy, logsumexp, argmax, kept_mass)


class _Full(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        shape: Shape,
    ) -> tuple[Tensor, ...]:
        chunks = _Chunks(hidden, weight, bias, targets, shape)
        running = Running.start(len(hidden), chunks.dtype, hidden.device)
        for rows in _slices(len(hidden), TOKEN_CHUNK):
            for columns in _slices(len(weight), VOCAB_CHUNK):
                chunks.backend.update(running.rows(rows), chunks.tile(rows, columns))
        log_mass = running.mass.log()
        logprob = running.target - running.top - log_mass
        entropy = log_mass - running.weighted / running.mass
        logsumexp = running.top + log_mass
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, logsumexp)
        ctx.shape = shape
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(running.argmax)
        return logprob, entropy, logsumexp, running.argmax

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy, logsumexp = ctx.saved_tensors
        chunks = _Chunks(hidden, weight, bias, targets, ctx.shape)
        by_row = RowGrads(grads[0], grads[1], grads[2], entropy, logsumexp)
        wanted = ctx.needs_input_grad[:3]
        with no_autocast(hidden):
            return *_gradients(chunks, by_row, wanted), None, None


def _gradients(
    chunks: _Chunks, by_row: RowGrads, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """(hidden's, weight's, bias's) sums over the chunks, each in fp32 or better."""
    hidden, weight, bias = chunks.hidden, chunks.weight, chunks.bias
    grad_hidden = torch.zeros(hidden.shape, dtype=chunks.dtype, device=hidden.device)
    grad_weight = torch.zeros_like(weight) if wanted[1] else None
    grad_bias = torch.zeros(len(weight), dtype=chunks.dtype, device=hidden.device)
    for columns in _slices(len(weight), VOCAB_CHUNK):
        head = torch.zeros_like(weight[columns], dtype=chunks.dtype)
        for rows in _slices(len(hidden), TOKEN_CHUNK):
            tile = chunks.tile(rows, columns)
            d = chunks.backend.gradient(tile, by_row.rows(rows), chunks.product_dtype)
            if wanted[0]:
                grad_hidden[rows] += product(d, weight[columns], chunks.dtype)
            if wanted[1]:
                head += product(d.T, hidden[rows], chunks.dtype)
            if wanted[2]:
                grad_bias[columns] += d.sum(0, dtype=chunks.dtype)
        if grad_weight is not None:
            grad_weight[columns] = head.to(weight.dtype)
    return (
        grad_hidden.to(hidden.dtype) if wanted[0] else None,
        grad_weight,
        grad_bias.to(bias.dtype) if bias is not None and wanted[2] else None,
    )


@dataclass(frozen=True, eq=False)
class _Chunks:
    """Tiles of the [T, V] logits, computed when asked for."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    shape: Shape

    @property
    def backend(self) -> Any:
        if not triton_fits(self.hidden, self.weight, self.shape.head_dtype):
            return statistics
        from replay.kernels import launch_statistics  # triton takes a second to import

        return launch_statistics

    @property
    def product_dtype(self) -> torch.dtype:
        return torch.promote_types(self.hidden.dtype, self.weight.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of sums."""
        return torch.promote_types(self.product_dtype, torch.float32)

    def tile(self, rows: slice, columns: slice) -> Tile:
        # rounding is left to the matmul where that is what it does anyway
        rounds = self.bias is None and self.shape.head_dtype == self.product_dtype
        z = product(
            self.hidden[rows], self.weight[columns].T, self.product_dtype if rounds else self.dtype
        )
        bias = None if self.bias is None else self.bias[columns]
        return Tile(z, columns.start, bias, self.targets[rows], self.shape.rows(rows))


def _slices(length: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, length)) for i in range(0, length, size)]

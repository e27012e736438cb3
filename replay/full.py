"""score_full(): scores over the whole vocabulary, in chunks of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from replay.reference import shape_logits
from replay.score import check_rows, check_temperature

VOCAB_CHUNK = 8192


class FullScores(NamedTuple):
    """Scores over the whole vocabulary, each [T]."""

    logprob: Tensor
    entropy: Tensor  # in nats
    logsumexp: Tensor
    argmax: Tensor  # int64


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
) -> FullScores:
    """Score each target over the whole vocabulary, in chunks of it: [T, V] never exists.

    Arguments as for `score_support`. ``exp(score_full.logprob − score_support.logprob)`` is the
    probability mass that the policy gives to the support.
    """
    check_rows(hidden, weight, targets)
    check_temperature(temperature, len(targets))
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    divisor = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    with torch.autocast(hidden.device.type, enabled=False):
        h = hidden.to(dtype)
        stats = _Running(h.new_full((len(h),), -torch.inf))
        for start in range(0, len(weight), VOCAB_CHUNK):
            z = h @ weight[start : start + VOCAB_CHUNK].to(dtype).T  # [T, chunk]
            if bias is not None:
                z = z + bias[start : start + VOCAB_CHUNK].to(dtype)
            stats.add(shape_logits(z, logit_scale, softcap, head_dtype) / divisor, start, targets)
        return stats.scores()


class _Running:
    """Online softmax statistics over chunks of the vocabulary."""

    def __init__(self, minus_inf: Tensor) -> None:
        self.peak = minus_inf
        self.mass = torch.zeros_like(minus_inf)  # sum of exp(z - peak)
        self.weighted = torch.zeros_like(minus_inf)  # sum of exp(z - peak) * z
        self.target = minus_inf
        self.argmax = torch.zeros_like(minus_inf, dtype=torch.int64)

    def add(self, z: Tensor, start: int, targets: Tensor) -> None:
        top, index = z.detach().max(dim=1)
        self.argmax = torch.where(top > self.peak, index + start, self.argmax)
        peak = torch.maximum(self.peak, top)
        shrink, p = (self.peak - peak).exp(), (z - peak[:, None]).exp()
        self.mass = self.mass * shrink + p.sum(1)
        self.weighted = self.weighted * shrink + (p * z).sum(1)
        self.peak = peak
        inside = (targets >= start) & (targets < start + z.shape[1])
        column = torch.where(inside, targets - start, 0)
        self.target = torch.where(inside, z.gather(1, column[:, None]).squeeze(1), self.target)

    def scores(self) -> FullScores:
        logsumexp = self.peak + self.mass.log()
        entropy = logsumexp - self.weighted / self.mass
        return FullScores(self.target - logsumexp, entropy, logsumexp, self.argmax)

"""The scores a trainer asks for: over the recorded supports, and over the whole vocabulary."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from replay import reference
from replay.reference import SupportScores, shape_logits

VOCAB_CHUNK = 8192


class FullScores(NamedTuple):
    """Scores over the whole vocabulary, each [T]."""

    logprob: Tensor
    entropy: Tensor  # in nats
    logsumexp: Tensor
    argmax: Tensor  # int64


def score_support(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    support_ids: Tensor,
    support_offsets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    logit_scale: float | None = None,
    softcap: float | None = None,
    head_dtype: torch.dtype = torch.float32,
    return_support_logprobs: bool = False,
) -> SupportScores:
    """Score each target under the policy, renormalised over its recorded support.

    Equal to the following, but gathers only the head rows that the supports name::

        logits = (hidden.float() @ weight.float().T + bias) * logit_scale      # [T, V]
        logits = softcap * tanh(logits / softcap) / temperature
        logprob[t] = logits[t, targets[t]] - logsumexp(logits[t, S_t])

    hidden [T, D] and weight [V, D] in any float dtype; targets [T] and support_ids [E] integers;
    support_offsets [T + 1] int64, half-open, starting at 0; temperature a number or [T]; bias [V].
    Sums are in fp32 (float64 for float64 inputs), whatever the caller's autocast. `head_dtype`
    bfloat16 rounds each logit to bf16 first, as an engine with a bf16 head does. Differentiable in
    hidden, weight and bias. A target outside its support scores -inf with zero gradient and is
    counted in `outside`; so does an empty support.

    Raises `ValueError` for shapes that do not fit, with both numbers.
    """
    _check_support(hidden, weight, targets, support_ids, support_offsets)
    _check_temperature(temperature, len(targets))
    return reference.score_support(
        hidden,
        weight,
        targets,
        support_ids,
        support_offsets,
        temperature=temperature,
        bias=bias,
        logit_scale=logit_scale,
        softcap=softcap,
        head_dtype=head_dtype,
        return_support_logprobs=return_support_logprobs,
    )


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
    _check_rows(hidden, weight, targets)
    _check_temperature(temperature, len(targets))
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


def _check_rows(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {list(hidden.shape)} and weight {list(weight.shape)} must be [T, D] and [V, D]"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"{list(targets.shape)} targets for {len(hidden)} rows of hidden")


def _check_support(
    hidden: Tensor, weight: Tensor, targets: Tensor, ids: Tensor, offsets: Tensor
) -> None:
    _check_rows(hidden, weight, targets)
    if len(offsets) != len(targets) + 1:
        raise ValueError(
            f"{len(offsets)} support_offsets for {len(targets)} targets; must be one more"
        )
    first, last = (int(x) for x in offsets[[0, -1]].tolist())
    if first != 0 or last != len(ids):
        raise ValueError(
            f"support_offsets run from {first} to {last}, but there are {len(ids)} support_ids"
        )


def _check_temperature(temperature: Any, num_tokens: int) -> None:
    if isinstance(temperature, Tensor):
        if temperature.shape != (num_tokens,):
            raise ValueError(f"temperature {list(temperature.shape)} for {num_tokens} targets")
    elif not temperature > 0:
        raise ValueError(f"temperature is {temperature}, must be positive")

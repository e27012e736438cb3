"""The definition: the masked policy logprob in plain torch. Everything faster must agree with it.

Axes: `T` scored tokens (packed), `E` support entries of all of them, `D` hidden, `V` vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

EDGE_ELEMENTS = 2**25  # E x D products held at once


class SupportScores(NamedTuple):
    """Scores over the recorded supports: the first three have length T."""

    logprob: Tensor  # of the target; -inf where it is outside its support
    entropy: Tensor  # of the distribution over the support, in nats
    logsumexp: Tensor | None  # of the support's logits, on request; -inf where it is empty
    outside: Tensor  # int64 scalar: targets outside their support
    support_logprobs: Tensor | None  # [E] of every support id, on request


def score_support(
    hidden: Tensor,  # [T, D]
    weight: Tensor,  # [V, D]
    targets: Tensor,  # [T]
    support_ids: Tensor,  # [E]
    support_offsets: Tensor,  # [T + 1]
    *,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    logit_scale: float | None = None,
    softcap: float | None = None,
    head_dtype: torch.dtype = torch.float32,
) -> SupportScores:
    """logprob_t = z_y/T − logsumexp(z_j/T for j in S_t), with z the head's logits."""
    with no_autocast(hidden):
        counts = support_offsets.diff()
        rows = torch.repeat_interleave(counts)  # [E] the token of each entry
        z = edge_logits(hidden, weight, bias, rows, support_ids)  # [E]
        z = shape_logits(z, logit_scale, softcap, head_dtype) / per_row(temperature, rows)
        return softmax_over_support(z, rows, counts, support_ids, targets)


def no_autocast(like: Tensor) -> AbstractContextManager[object]:
    """Entering torch.autocast takes longer than launching a kernel, so only where one is on."""
    device = like.device.type
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def softmax_over_support(
    z: Tensor, rows: Tensor, counts: Tensor, ids: Tensor, targets: Tensor
) -> SupportScores:
    """The scores of [E] logits that are scaled, capped and divided already."""
    peak = segments("max", z.detach(), counts)
    mass = segments("sum", (z - peak[rows]).exp(), counts)
    logsumexp = peak + mass.log()
    logprobs = z - logsumexp[rows]
    entropy = segments("sum", -logprobs.exp() * logprobs, counts)
    hit = torch.nonzero(ids == targets[rows]).squeeze(1)
    logprob = torch.full_like(logsumexp, -torch.inf).index_put((rows[hit],), logprobs[hit])
    outside = (logprob.detach() == -torch.inf).sum()
    return SupportScores(logprob, entropy, logsumexp.detach(), outside, logprobs)


def edge_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, ids: Tensor
) -> Tensor:
    """[E] The dot product of each entry's token and head row, in fp32 or better."""
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    step = max(1, EDGE_ELEMENTS // hidden.shape[1])
    parts = [
        (hidden[rows[i : i + step]].to(dtype) * weight[ids[i : i + step]].to(dtype)).sum(-1)
        for i in range(0, max(len(ids), 1), step)  # no entries still make a gradient, of zero
    ]
    z = torch.cat(parts)
    return z if bias is None else z + bias[ids].to(dtype)


def shape_logits(
    z: Tensor, logit_scale: float | None, softcap: float | None, head_dtype: torch.dtype
) -> Tensor:
    """Round to the head's dtype, then scale, then softcap; temperature comes after this."""
    if head_dtype != torch.float32:
        z = z.to(head_dtype).to(z.dtype)
    if logit_scale is not None:
        z = z * logit_scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def segments(reduce: str, values: Tensor, counts: Tensor) -> Tensor:
    """[T] Reduce each token's entries, in a fixed order; empty: 0 for sum, -inf for max."""
    initial = 0.0 if reduce == "sum" else -torch.inf
    # unsafe skips a check of the lengths that fails on no tokens at all; ours add up to E
    return torch.segment_reduce(values, reduce, lengths=counts, initial=initial, unsafe=True)


def per_row(temperature: float | Tensor, rows: Tensor) -> float | Tensor:
    return temperature[rows] if isinstance(temperature, Tensor) else temperature

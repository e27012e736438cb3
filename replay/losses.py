"""The losses that trainers copy from each other, over recorded supports: each a few lines of torch.

Everything is a pure function of [T] tensors, one entry per scored token, as `score_support` and
packed batches have them. `counted` [T] bool says which tokens take part, see `scored`. What does
not take part is selected out before any arithmetic: it contributes exactly 0 to values, means and
gradients, whatever stands there. NaN is never selected out: a broken policy shows in the loss.
Gradients flow through logprobs alone; weights have none. docs/losses.md has all of it as one table.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from replay.metrics import SAFETY_BOUND, ratio_numbers
from replay.reference import segments


def scored(loss_mask: Tensor, *logprobs: Tensor) -> Tensor:
    """[T] Which tokens count: loss_mask is not 0, and no logprob is -inf.

    -inf is the score of a token outside its support. Raises `ValueError` unless all have one shape.
    """
    counted = loss_mask != 0
    for values in logprobs:
        if values.shape != loss_mask.shape:
            raise ValueError(f"logprobs {list(values.shape)} for loss_mask {list(loss_mask.shape)}")
        counted = counted & (values.detach() != -torch.inf)
    return counted


def log_ratio(replay_logprobs: Tensor, sampling_logprobs: Tensor, counted: Tensor) -> Tensor:
    """[T] replay − sampling; 0 where not counted."""
    counted = scored(counted, replay_logprobs, sampling_logprobs)
    replay = torch.where(counted, replay_logprobs, 0.0)
    return replay - torch.where(counted, sampling_logprobs, 0.0)


def importance_ratio(log_ratio: Tensor) -> Tensor:
    """[T] exp(log_ratio), with log_ratio held within ±20.

    The bound is verl's (core_algos.py): float32 overflows at 89, and 0 · inf in backward is NaN.
    """
    return log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()


def over_rollout(
    log_ratio: Tensor, counted: Tensor, rollout_index: Tensor, reduce: Literal["sum", "mean"]
) -> Tensor:
    """[T] The sum or mean of log_ratio over the counted tokens of each token's rollout.

    The exponential of the sum is the ratio of whole sequences. That of the mean, its geometric
    form, is the ratio of GSPO (Zheng et al. 2025, arXiv:2507.18071), for which the length
    does not matter. rollout_index [T] ascends; `ValueError` where it does not.
    """
    totals = _per_rollout(torch.where(counted, log_ratio, 0.0), rollout_index)
    if reduce == "mean":
        totals = totals / _per_rollout(counted.to(totals.dtype), rollout_index).clamp_min(1)
    return totals[rollout_index]


def truncated_weights(ratio: Tensor, at_most: float = 2.0) -> Tensor:
    """[T] Truncated importance sampling: min(ratio, at_most), without gradient.

    Ionides 2008 (Truncated Importance Sampling); for the mismatch between rollout engine and
    trainer: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training". Of tokens, or of whole rollouts with a ratio from `over_rollout`.
    """
    return ratio.detach().clamp(max=at_most)


def in_band(ratio: Tensor, low: float, high: float) -> Tensor:
    """[T] Masked importance sampling: low <= ratio <= high. NaN is in the band, to be seen.

    Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the
    Training-Inference Mismatch": of tokens, of whole rollouts, or of their geometric mean, with a
    ratio from `over_rollout`. With ``counted & in_band(...)`` what is rejected also leaves the
    denominator, as in slime and verl, which keep weights and rejection apart.
    """
    value = ratio.detach()
    return ~((value < low) | (value > high))


def masked_weights(ratio: Tensor, low: float, high: float) -> Tensor:
    """[T] The ratio inside the band and 0 outside, without gradient: the token still counts.

    IcePop: Ling Team 2025, "Every Step Evolves" (arXiv:2510.18855), with low 0.5 and high 5.
    """
    return torch.where(in_band(ratio, low, high), ratio.detach(), 0.0)


def policy_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    counted: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    weights: Tensor | None = None,
) -> Tensor:
    """[T] −min(r·A, clamp(r, 1 − clip_low, 1 + clip_high)·A), times the weights.

    PPO: Schulman et al. 2017, arXiv:1707.06347, eq. 7. With advantages of groups it is that of
    GRPO: Shao et al. 2024, arXiv:2402.03300. clip_high above clip_low is DAPO's clip-higher: Yu et
    al. 2025, arXiv:2503.14476. `log_ratio` is over the policy that clipping holds on to:
    the sampler, or the trainer's own before its update, and then `weights` correct for the sampler.
    """
    ratio = importance_ratio(log_ratio)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    return torch.where(counted, loss if weights is None else loss * weights, 0.0)


def mean_over_tokens(values: Tensor, counted: Tensor) -> Tensor:
    """The mean over counted tokens, 0 where there are none: the loss of DAPO, arXiv:2503.14476."""
    return torch.where(counted, values, 0.0).sum() / counted.sum().clamp_min(1)


def mean_over_rollouts(values: Tensor, counted: Tensor, rollout_index: Tensor) -> Tensor:
    """The mean over rollouts of their means over counted tokens: the loss of GRPO,
    arXiv:2402.03300. A rollout without counted tokens does not count; without any it is 0."""
    sums = _per_rollout(torch.where(counted, values, 0.0), rollout_index)
    lengths = _per_rollout(counted.to(sums.dtype), rollout_index)
    return (sums / lengths.clamp_min(1)).sum() / (lengths > 0).sum().clamp_min(1)


def support_kl(support_logprobs: Tensor, others: Tensor, support_offsets: Tensor) -> Tensor:
    """[T] The exact KL(p ‖ q) over each support: Σ p (log p − log q), in nats; 0 where it is empty.

    Both [E], of every support id, each over the same supports, as ``score_support(...,
    return_support_logprobs=True)`` gives them: p the policy's and q a reference's, with gradients
    to both. KL over the full vocabulary would compare what was never sampled from.
    """
    absent = support_logprobs.detach() == -torch.inf  # 0 log 0 is 0
    p, q = torch.where(absent, 0.0, support_logprobs), torch.where(absent, 0.0, others)
    terms = torch.where(absent, 0.0, p.exp() * (p - q))
    return segments("sum", terms, support_offsets.diff())


def sampled_kl(replay_logprobs: Tensor, reference_logprobs: Tensor, counted: Tensor) -> Tensor:
    """[T] The k3 estimate of KL(policy ‖ reference) from the sampled tokens: r − log r − 1, with r
    the reference's probability over the policy's; 0 where not counted.

    Schulman 2020, joschu.net/blog/kl-approx.html; GRPO, arXiv:2402.03300, eq. 4. Both over the same
    supports. Where whole supports were scored, `support_kl` has no sampling noise.
    """
    log_r = log_ratio(reference_logprobs, replay_logprobs, counted)
    return torch.expm1(log_r.clamp(-SAFETY_BOUND, SAFETY_BOUND)) - log_r


def effective_sample_size(log_ratio: Tensor, counted: Tensor) -> Tensor:
    """(Σ w)² / (n Σ w²) of the importance ratios w of the n counted tokens: 1 where all are alike,
    NaN where there are none, without gradient.

    Kong 1992, "A note on importance sampling using standardized weights", as a share of n.
    """
    w = log_ratio.detach()[counted].double()
    w = (w - w.max()).exp() if len(w) else w
    return w.sum().square() / (len(w) * w.square().sum())


def mismatch(
    replay_logprobs: Tensor, sampling_logprobs: Tensor, loss_mask: Tensor
) -> dict[str, Any]:
    """What a trainer logs of each step: the numbers of `rollout replay` (docs/report.md), of the
    tokens of this batch. JSON-ready; what could not be measured is None. Waits for the device.

    `tokens` and `scored_tokens`, `sampled_outside_support`, `log_ratio_abs`, `log_ratio`,
    `mismatch_kl`, `ratio_outside`, and `effective_sample_size`.
    """
    counted = scored(loss_mask, replay_logprobs, sampling_logprobs)
    values = log_ratio(replay_logprobs, sampling_logprobs, counted).detach()
    numbers = values[counted].float().cpu().numpy()
    is_outside = (loss_mask != 0) & (replay_logprobs == -torch.inf)
    return {
        "tokens": int((loss_mask != 0).sum()),
        "scored_tokens": len(numbers),
        "sampled_outside_support": int(is_outside.sum()),
        **ratio_numbers(numbers),
        "effective_sample_size": float(effective_sample_size(values, counted))
        if len(numbers)
        else None,
    }


def _per_rollout(values: Tensor, rollout_index: Tensor) -> Tensor:
    """[n] Sums, in a fixed order."""
    if (rollout_index.diff() < 0).any():
        raise ValueError("rollout_index must ascend: the tokens of a rollout stand together")
    return segments("sum", values, torch.bincount(rollout_index))

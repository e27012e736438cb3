"""The numbers of a mismatch, and those of a replay under the names of verl, TRL and prime-rl.

In the latter, "rollout" is their word for the engine's side, "training", "actor" or "old" for the
trainer's. All are over the scored tokens and over the supports, as a trainer logs them that replays
supports.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.bins import rows_of_rollouts
from replay.tokens import Floats, TokenTable

Metrics = dict[str, dict[str, float | None]]

SAFETY_BOUND = 20.0  # verl clips log ratios to it before it squares their exponential


def ratio_numbers(log_ratio: Floats) -> dict[str, Any]:
    """Mismatch of finite log ratios. `mismatch_kl` is the k3 estimate of KL(engine ‖ trainer),
    ratio − log_ratio − 1, whose mean over tokens of the engine is unbiased."""
    if not len(log_ratio):
        nothing = dict.fromkeys(("mean", "p50", "p99", "max"))
        return {
            "log_ratio_abs": nothing,
            "log_ratio": {"mean": None},
            "mismatch_kl": None,
            "ratio_outside": None,
        }
    exact = log_ratio.astype(np.float64)
    size = np.abs(exact)
    ratio = np.exp(exact)
    return {
        "log_ratio_abs": {
            "mean": float(size.mean()),
            "p50": float(np.percentile(size, 50)),
            "p99": float(np.percentile(size, 99)),
            "max": float(size.max()),
        },
        "log_ratio": {"mean": float(exact.mean())},
        "mismatch_kl": float((np.expm1(exact) - exact).mean()),
        "ratio_outside": float(((ratio < 0.9) | (ratio > 1.1)).mean()),
    }


def trainer_metrics(tokens: TokenTable) -> Metrics:
    """Names and values by trainer; every value is None where nothing was scored."""
    scored = np.isfinite(tokens.log_ratio)
    engine = tokens.sampling_logprobs[scored].astype(np.float64)
    trainer = tokens.replay_logprobs[scored].astype(np.float64)
    starts = _starts(tokens, scored)
    if not len(engine):
        engine, trainer, starts = np.full(1, np.nan), np.full(1, np.nan), np.zeros(1, np.int64)
    log_ratio = trainer - engine
    with np.errstate(over="ignore"):  # of a logprob that stands for "no number"
        named = _named(engine, trainer, log_ratio, starts)
    return {
        name: {key: float(x) if np.isfinite(x) else None for key, x in values.items()}
        for name, values in named.items()
    }


def _named(
    engine: NDArray[np.float64],
    trainer: NDArray[np.float64],
    log_ratio: NDArray[np.float64],
    starts: NDArray[np.int64],
) -> dict[str, dict[str, np.float64]]:
    return {
        "verl": _verl(engine, trainer, starts),
        "trl": {
            # grpo_trainer.py: |old_per_token_logps - sampling_per_token_logps|, then its
            # exponential without abs and before the cap
            "sampling/sampling_logp_difference/mean": np.abs(log_ratio).mean(),
            "sampling/sampling_logp_difference/max": np.abs(log_ratio).max(),
            "sampling/importance_sampling_ratio/min": np.exp(log_ratio).min(),
            "sampling/importance_sampling_ratio/mean": np.exp(log_ratio).mean(),
            "sampling/importance_sampling_ratio/max": np.exp(log_ratio).max(),
        },
        "prime_rl": {
            # rl/loss.py compute_importance_ratio_and_mismatch_kl: ratio - log_ratio - 1
            "mismatch_kl": (np.expm1(log_ratio) - log_ratio).mean(),
        },
    }


def _verl(
    engine: NDArray[np.float64], trainer: NDArray[np.float64], starts: NDArray[np.int64]
) -> dict[str, np.float64]:
    """rollout_corr_helper.py `compute_offpolicy_metrics` and debug metrics of probabilities."""
    log_ratio = trainer - engine
    lengths = np.diff([*starts, len(engine)])
    mean_engine = np.add.reduceat(engine, starts) / lengths  # [rollouts]
    mean_trainer = np.add.reduceat(trainer, starts) / lengths
    ppl_gap = mean_engine - mean_trainer
    summed = np.clip(np.add.reduceat(log_ratio, starts), -SAFETY_BOUND, SAFETY_BOUND)
    clipped = np.clip(log_ratio, -SAFETY_BOUND, SAFETY_BOUND)
    p, q = np.exp(engine), np.exp(trainer)
    gap = np.abs(p - q)
    return {
        "rollout_corr/kl": -log_ratio.mean(),
        "rollout_corr/k3_kl": (np.expm1(log_ratio) - log_ratio).mean(),
        "rollout_corr/training_ppl": np.exp(-mean_trainer).mean(),
        "rollout_corr/training_log_ppl": -mean_trainer.mean(),
        "rollout_corr/rollout_ppl": np.exp(-mean_engine).mean(),
        "rollout_corr/rollout_log_ppl": -mean_engine.mean(),
        "rollout_corr/log_ppl_diff": ppl_gap.mean(),
        "rollout_corr/log_ppl_abs_diff": np.abs(ppl_gap).mean(),
        "rollout_corr/log_ppl_diff_max": ppl_gap.max(),
        "rollout_corr/log_ppl_diff_min": ppl_gap.min(),
        "rollout_corr/ppl_ratio": np.exp(ppl_gap).mean(),
        "rollout_corr/chi2_token": np.expm1(2 * clipped).mean(),
        "rollout_corr/chi2_seq": np.expm1(2 * summed).mean(),
        "training/rollout_probs_diff_mean": gap.mean(),
        "training/rollout_probs_diff_max": gap.max(),
        "training/rollout_probs_diff_std": gap.std(ddof=1) if len(gap) > 1 else 0 * gap[0],
        "training/rollout_actor_probs_pearson_corr": _pearson(p, q),
    }


def _pearson(p: NDArray[np.float64], q: NDArray[np.float64]) -> np.float64:
    p, q = p - p.mean(), q - q.mean()
    scale = np.sqrt((p * p).sum() * (q * q).sum())
    return np.float64((p * q).sum() / scale) if scale > 0 else np.float64(np.nan)


def _starts(tokens: TokenTable, scored: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Where each rollout with a scored token begins among the scored tokens."""
    before = np.cumsum([0, *scored])
    starts = [before[rows.start] for _, rows in rows_of_rollouts(tokens) if scored[rows].any()]
    return np.array(starts, np.int64)

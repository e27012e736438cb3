"""Rollouts as the rows of one batch: what they must have and agree on, and padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rollout.adapters.groups import check_finite_rewards, check_one_temperature, checked
from rollout.errors import ConfigError, NotExpressible
from rollout.record import Rollout


def rows_of_a_batch(rollouts: Iterable[Rollout], trainer: str) -> list[Rollout]:
    """The rollouts in their order; each keeps the rules of docs/format.md, all have a temperature.

    A trainer computes on what breaks them without a word. Raises the `DataError` of the first rule
    that is broken, `NotExpressible` for a reward that is NaN or infinite and where temperatures
    differ, and `ConfigError` where there is no rollout.
    """
    rows = list(checked(rollouts))
    if not rows:
        raise ConfigError(f"{trainer}: a batch must hold at least one rollout, got none")
    check_finite_rewards(rows, trainer)
    check_one_temperature(rows, trainer)
    return rows


def need_output_tokens(rollouts: Sequence[Rollout], trainer: str) -> None:
    """Raise `NotExpressible` for a rollout without output tokens."""
    for rollout in rollouts:
        if rollout.num_output_tokens == 0:
            raise NotExpressible(
                f"{rollout.rollout_id}: must have an output token, {trainer} looks at the last "
                "one; leave it out"
            )


def rewards_of(rollouts: Sequence[Rollout], trainer: str) -> list[float]:
    """Every reward; `NotExpressible` for the first rollout without one."""
    rewards = []
    for rollout in rollouts:
        if rollout.reward is None:
            raise NotExpressible(
                f"{rollout.rollout_id}: must have a reward, {trainer} has no word for none here; "
                "score it first (rollout.annotate), or leave it out"
            )
        rewards.append(rollout.reward)
    return rewards


def all_or_no_rewards(rollouts: Sequence[Rollout], trainer: str) -> list[float] | None:
    """Every reward, or None where no rollout has one; `NotExpressible` where only some do."""
    if all(rollout.reward is None for rollout in rollouts):
        return None
    return rewards_of(rollouts, trainer)


def padded(
    rows: Sequence[NDArray[Any]],
    fill: float,
    dtype: DTypeLike,
    *,
    width: int | None = None,
    left: bool = False,
) -> NDArray[Any]:
    """[B, width] The rows with `fill` behind them, or before them with `left`.

    `width` is at least that of the longest row, which is the default.
    """
    width = max(map(len, rows)) if width is None else width
    table = np.full((len(rows), width), fill, dtype)
    for line, row in zip(table, rows, strict=True):
        start = width - len(row) if left else 0
        line[start : start + len(row)] = row
    return table

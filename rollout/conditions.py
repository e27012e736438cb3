"""Conditions on rollouts, for `Run.where`: a condition is a function from a rollout to bool."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from rollout.record import Rollout

Condition = Callable[[Rollout], bool]


def finished(rollout: Rollout) -> bool:
    """Whether it ended by itself: `finish_reason` is stop, not length or abort."""
    return rollout.finish_reason == "stop"


def sampled_by(*weight_versions: str) -> Condition:
    """Whether these weights sampled all of it; a rollout whose weights are unknown does not pass.

    A rollout that began under one version and went on under another passes if both are named.
    """
    return partial(_sampled_by, frozenset(weight_versions))


def reward_within(low: float = float("-inf"), high: float = float("inf")) -> Condition:
    """Whether low <= reward <= high; a rollout without a reward, or with NaN, does not pass."""
    return partial(_reward_within, low, high)


def sampled_at(temperature: float) -> Condition:
    """Whether it was sampled at this temperature, compared as the float32 that shards hold."""
    return partial(_sampled_at, np.float32(temperature))


def _sampled_by(versions: frozenset[str], rollout: Rollout) -> bool:
    spans = rollout.weight_versions
    return bool(spans) and all(span.version in versions for span in spans)


def _sampled_at(temperature: np.float32, rollout: Rollout) -> bool:
    return bool(np.float32(rollout.temperature) == temperature)


def _reward_within(low: float, high: float, rollout: Rollout) -> bool:
    return rollout.reward is not None and low <= rollout.reward <= high

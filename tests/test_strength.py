"""A sum over tokens in standard errors, by clusters."""

from __future__ import annotations

import numpy as np
import pytest

from replay.strength import strength, strength_beyond


def test_strength_counts_clusters_not_tokens() -> None:
    gain = np.repeat([1.0, -0.9, 1.1, -1.0, 0.9, -1.1, 1.0, -0.8], 100)
    by_token, by_rollout = np.arange(800), np.repeat(np.arange(8), 100)
    assert abs(strength(gain, by_rollout)) < 1
    assert strength(gain + 1, by_token, by_rollout) == strength(gain + 1, by_rollout)
    assert strength(np.ones(40), np.repeat(np.arange(8), 5)) == np.inf
    assert strength(np.zeros(5), np.zeros(5, int)) == 0


def test_strength_of_few_clusters_is_that_of_student() -> None:
    """As unlikely as so many standard errors of a normal distribution; t from tables."""
    for free, t in ((7, 4.785), (31, 3.375), (121, 3.158)):  # one-sided 0.001
        gain = np.tile([1.0, -1.0], (free + 1) // 2) + t / np.sqrt(free)
        assert strength(gain, np.arange(free + 1)) == pytest.approx(3.09, abs=0.03), free
    assert strength(np.array([3.0, 3.1, 2.9]), np.zeros(3, int)) == 0, "one cluster says nothing"


def test_a_heavy_tail_is_no_doubt_that_every_cluster_is_beyond() -> None:
    """Twelve prompts, each between 2 and 200 times the limit."""
    mismatch = np.geomspace(0.2, 20, 12)
    limit, prompts = np.full(12, 0.1), np.arange(12)
    assert strength(mismatch - limit, prompts) < 3
    assert strength_beyond(mismatch, limit, [prompts]) > 4
    assert strength_beyond(limit / 2, limit, [prompts]) < -4
    assert strength_beyond(mismatch, limit, [prompts, np.zeros(12, int)]) == 0

"""How surely a sum over tokens is not chance, where tokens hang together in clusters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from replay.evidence import Floats

Labels = NDArray[np.int64]  # [T] the cluster of each token

SMALLEST = 1e-3  # nats; a cluster without any mismatch has no logarithm


def strength(gain: Floats, *clusterings: Labels) -> float:
    """The sum of `gain` [T] in standard errors, by the clustering that makes them the fewest.

    They are those of a normal distribution that are as unlikely as Student's t of so few clusters
    (Wallace, Ann. Math. Statist. 30, 1959, equation 5.3). 0 where there is one cluster alone.
    """
    return min((_by_clusters(gain, labels) for labels in clusterings), key=abs)


def strength_beyond(mismatch: Floats, limit: Floats, clusterings: Sequence[Labels]) -> float:
    """How surely `mismatch` [T] is beyond `limit` [T]: in nats, or in its logarithm by cluster.

    Stale weights move some tokens by far more than others, which makes the first unsure. The second
    sees that each cluster is beyond.
    """
    in_nats = strength(mismatch - limit, *clusterings)
    ratios = []
    for labels in clusterings:
        of_cluster = np.unique(labels, return_inverse=True)[1]
        total = np.maximum(np.bincount(of_cluster, mismatch), SMALLEST)
        ratio = np.log(total / np.bincount(of_cluster, limit))
        ratios.append(_by_clusters(ratio, np.arange(len(ratio))))
    return max(in_nats, min(ratios, key=abs))


def _by_clusters(gain: Floats, labels: Labels) -> float:
    of_cluster = np.unique(labels, return_inverse=True)[1]
    total, size = np.bincount(of_cluster, gain), np.bincount(of_cluster)
    free = len(total) - 1
    if free < 1 or not gain.any():
        return 0.0
    spread = total - gain.sum() / len(gain) * size
    error = float(np.sqrt((spread**2).sum() * len(total) / free))
    if error == 0:
        return float(np.sign(gain.sum()) * np.inf)
    t = float(gain.sum() / error)
    z = (8 * free + 1) / (8 * free + 3) * np.sqrt(free * np.log1p(t**2 / free))
    return float(np.copysign(z, t))

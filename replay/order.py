"""The order of a pass, and which rank gets which batch: the same on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def shuffled(rollout_ids: Sequence[str], seed: int, epoch: int) -> list[int]:
    """Places in `rollout_ids`, in ascending order of BLAKE2b(id, key "seed:epoch"), 16 bytes.

    A function of the ids alone: neither the order in which they are stored nor the machine or the
    release of a library changes it, and rollouts that are added leave the others in their order.
    """
    keyed = hashlib.blake2b(key=f"{seed}:{epoch}".encode(), digest_size=16)

    def digest(place: int) -> tuple[bytes, str]:
        one = keyed.copy()
        one.update(rollout_ids[place].encode())
        return one.digest(), rollout_ids[place]

    return sorted(range(len(rollout_ids)), key=digest)


def deal(tokens: Sequence[int], world_size: int) -> list[list[int | None]]:
    """For each rank the batches it gets, of batches with so many input tokens, in order.

    `world_size` neighbours at a time: the largest goes to the rank that has the fewest tokens so
    far, and so on, so that no two ranks are ever further apart than the largest batch. All ranks
    get the same number; None, at the end, where there is no batch left for one.
    """
    ranks: list[list[int | None]] = [[] for _ in range(world_size)]
    totals = [0] * world_size
    for first in range(0, len(tokens), world_size):
        neighbours = range(first, min(first + world_size, len(tokens)))
        largest_first = sorted(neighbours, key=lambda i: -tokens[i])
        poorest_first = sorted(range(world_size), key=lambda r: totals[r])
        for place, rank in enumerate(poorest_first):
            given = largest_first[place] if place < len(largest_first) else None
            ranks[rank].append(given)
            totals[rank] += 0 if given is None else tokens[given]
    return ranks

"""Support: for each output token, the ids the sampler chose from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rollout.errors import BadOffsets


@dataclass(frozen=True, eq=False)
class Support:
    """One set of token ids per output token, as compressed sparse rows.

    Output token t was sampled from ``ids[offsets[t]:offsets[t + 1]]``, in the engine's order. A row
    without ids belongs to a forced token. Four output tokens, the third of them forced::

        ids     = [5, 9, 2,  7,  1, 4]
        offsets = [0,       3, 4, 4,   6]
        counts  = [3,       1, 0,      2]

    Raises `BadOffsets` unless offsets start at 0, never decrease and end at ``len(ids)``.
    """

    ids: NDArray[np.int32]  # [E]
    offsets: NDArray[np.int64]  # [R + 1]

    def __post_init__(self) -> None:
        offsets = self.offsets
        if offsets.ndim != 1 or len(offsets) == 0 or offsets[0] != 0:
            raise BadOffsets("support_offsets: must start at 0 and have one entry per token plus 1")
        if offsets[-1] != len(self.ids):
            raise BadOffsets(
                f"support_offsets: end at {offsets[-1]}, but there are {len(self.ids)} support_ids"
            )
        if (np.diff(offsets) < 0).any():
            raise BadOffsets("support_offsets: must not decrease")

    @classmethod
    def from_counts(cls, ids: NDArray[np.int32], counts: NDArray[np.integer]) -> Support:
        """The disk form (ids and one count per token) as offsets."""
        offsets = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        return cls(ids, offsets)

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]]) -> Support:
        """One sequence of ids per output token."""
        flat = np.fromiter((i for row in rows for i in row), dtype=np.int32)
        return cls.from_counts(flat, np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, t: int) -> NDArray[np.int32]:
        """The ids of output token t, a view."""
        if not 0 <= t < len(self):
            raise IndexError(f"output token {t} of {len(self)}")
        return self.ids[self.offsets[t] : self.offsets[t + 1]]

    @cached_property
    def counts(self) -> NDArray[np.int32]:
        """Number of ids per output token; 0 is a forced token."""
        return np.diff(self.offsets).astype(np.int32)

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """The output token that each entry of `ids` belongs to."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def contains(self, output_ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Whether each output token is in its own row; an empty row contains nothing."""
        found = np.zeros(len(self), dtype=bool)
        rows = self.rows
        found[rows[self.ids == output_ids[rows]]] = True
        return found

    def duplicated(self) -> NDArray[np.bool_]:
        """Whether each row holds some id twice."""
        found = np.zeros(len(self), dtype=bool)
        # row and id as one number: sorting those is ten times faster than sorting by two keys
        keys = np.sort((self.rows << 32) | self.ids.view(np.uint32))
        found[keys[1:][keys[1:] == keys[:-1]] >> 32] = True
        return found

    def take(self, index: NDArray[np.integer]) -> Support:
        """The rows of `index`, in that order."""
        counts = np.diff(self.offsets)[index]
        start = np.repeat(self.offsets[:-1][index] - (np.cumsum(counts) - counts), counts)
        return Support.from_counts(self.ids[start + np.arange(counts.sum())], counts)

    @classmethod
    def concatenate(cls, supports: Sequence[Support]) -> Support:
        """The rows of all `supports`, one after another."""
        if not supports:
            return cls(np.zeros(0, np.int32), np.zeros(1, np.int64))
        return cls.from_counts(
            np.concatenate([s.ids for s in supports]),
            np.concatenate([np.diff(s.offsets) for s in supports]),
        )

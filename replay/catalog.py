"""Catalog: where the columns of each rollout lie in the mapped shards of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replay.batch import Parts
from rollout.reader import Run, View

LISTS = (
    "prompt_ids",
    "output_ids",
    "support_counts",
    "support_ids",
    "sampling_logprobs",
    "loss_mask",
)


@dataclass(frozen=True, eq=False)
class Catalog:
    """The rollouts of a run or view, each format rule checked, as some 160 bytes a rollout.

    Values stay where they are: in the page cache, or in memory where shards are compressed. What
    is pickled holds none of them, and maps the shards again.
    """

    run: Run
    rollout_ids: tuple[str, ...]  # M, in stored order
    batch: NDArray[np.int64]  # [M] place in `run.batches()`
    temperature: NDArray[np.float32]  # [M]
    starts: dict[str, NDArray[np.int64]]  # [M] of each column of `LISTS`: first value in its batch
    lengths: dict[str, NDArray[np.int64]]  # [M] of each of them: values

    @classmethod
    def of(cls, data: Run | View) -> Catalog:
        """Read `data` once; raises the `FormatError` of the first broken rule."""
        run = data.run if isinstance(data, View) else data
        rows = [
            (row.rollout.rollout_id, row.rollout.temperature, row.batch, row.place)
            for row in data.rows()
        ]
        batch = np.array([row[2] for row in rows], np.int64)
        place = np.array([row[3] for row in rows], np.int64)
        borders: dict[str, list[NDArray[np.int64]]] = {name: [] for name in LISTS}
        for number, arrow in enumerate(run.batches()):
            first, last = np.searchsorted(batch, [number, number + 1])
            at = place[first:last]
            for name in LISTS:
                offsets = arrow.column(name).offsets.to_numpy()
                borders[name].append(np.stack([offsets[at], offsets[at + 1]]).astype(np.int64))
        whole = {
            name: np.concatenate([np.zeros((2, 0), np.int64), *parts], axis=1)
            for name, parts in borders.items()
        }
        return cls(
            run=run,
            rollout_ids=tuple(row[0] for row in rows),
            batch=batch,
            temperature=np.array([row[1] for row in rows], np.float32),
            starts={name: start for name, (start, _) in whole.items()},
            lengths={name: end - start for name, (start, end) in whole.items()},
        )

    def __len__(self) -> int:
        return len(self.rollout_ids)

    @property
    def num_input_tokens(self) -> NDArray[np.int64]:
        """[M] As `replay.batch.num_input_tokens`."""
        outputs = np.maximum(self.lengths["output_ids"], 1)
        tokens: NDArray[np.int64] = self.lengths["prompt_ids"] + outputs - 1
        return tokens

    @cached_property
    def identity(self) -> str:
        """Hash of the ids in stored order, and the lengths: equal for the same rollouts."""
        found = hashlib.blake2b("\0".join(self.rollout_ids).encode(), digest_size=16)
        for name in LISTS:
            found.update(self.lengths[name].astype("<i8").tobytes())
        return found.hexdigest()

    def parts(self, rollouts: Sequence[int]) -> Parts:
        """Views of the columns of these rollouts."""
        batch = self.batch[rollouts].tolist()

        def cut(name: str) -> list[NDArray[Any]]:
            start = self.starts[name][rollouts]
            end = start + self.lengths[name][rollouts]
            values = self._values[name]
            bounds = zip(batch, start.tolist(), end.tolist(), strict=True)
            return [values[b][s:e] for b, s, e in bounds]

        return Parts(
            rollout_ids=[self.rollout_ids[i] for i in rollouts],
            temperature=self.temperature[rollouts].tolist(),
            **{name: cut(name) for name in LISTS},
        )

    @cached_property
    def _values(self) -> dict[str, list[NDArray[Any]]]:
        """Of each column, the flat values of each Arrow batch."""
        values: dict[str, list[NDArray[Any]]] = {name: [] for name in LISTS}
        for arrow in self.run.batches():
            for name in LISTS:
                values[name].append(_flat(arrow.column(name)))
        return values

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_values"}


def _flat(column: pa.Array) -> NDArray[Any]:
    values: NDArray[Any] = column.values.to_numpy(zero_copy_only=True)
    return values

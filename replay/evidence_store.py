"""EvidenceStore: the evidence of a whole run, batch by batch into arrays of the final size.

A token of 8 ids takes 140 bytes here. A list of batches, joined at the end, would be there twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.evidence import ENTRY_FIELDS, TOKEN_FIELDS, Evidence
from rollout.record import Rollout
from rollout.support import Support

INTEGERS = ("rollout", "position", "context", "token_id")


class EvidenceStore:
    """Takes in the evidence of batches of `rollouts`, in order, in 32 bits a number.

    That is what is recorded and what policies' scores come in; indices of tokens fit as well.
    """

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        self._tokens = self._entries = 0  # so far
        tokens = sum(int((~r.is_forced).sum()) for r in rollouts)
        entries = sum(len(r.support.ids) for r in rollouts)
        self._columns = {
            name: np.empty(tokens, np.int32 if name in INTEGERS else np.float32)
            for name in TOKEN_FIELDS
        } | {name: np.empty(entries, np.float32) for name in ENTRY_FIELDS}
        self._ids = np.empty(entries, np.int32)
        self._counts = np.empty(tokens, np.int32)
        self._rollouts: list[Rollout] = []
        self._softcap: float | None = None

    def add(self, part: Evidence) -> None:
        """`part` may lack tokens, but no rollout."""
        tokens = slice(self._tokens, self._tokens + len(part))
        entries = slice(self._entries, self._entries + len(part.support.ids))
        for name in TOKEN_FIELDS:
            self._columns[name][tokens] = getattr(part, name)
        self._columns["rollout"][tokens] += len(self._rollouts)
        for name in ENTRY_FIELDS:
            self._columns[name][entries] = getattr(part, name)
        self._ids[entries] = part.support.ids
        self._counts[tokens] = part.support.counts
        self._rollouts += part.rollouts
        self._softcap = part.softcap
        self._tokens, self._entries = tokens.stop, entries.stop

    def whole(self) -> Evidence | None:
        """Views of what was taken in; None where no batch was."""
        if not self._rollouts:
            return None
        columns: dict[str, NDArray[Any]] = {
            name: values[: self._entries if name in ENTRY_FIELDS else self._tokens]
            for name, values in self._columns.items()
        }
        return Evidence(
            rollouts=tuple(self._rollouts),
            support=Support.from_counts(self._ids[: self._entries], self._counts[: self._tokens]),
            softcap=self._softcap,
            **columns,
        )

"""TokenTable: one row per sampled token, what was recorded beside what the policy says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rollout.record import Rollout
from rollout.rules import Fault

OK = "ok"

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class TokenTable:
    """Flat arrays of equal length; forced tokens have no row, unscored rollouts come first.

    `finding` is "ok" or the code of a content rule that the token breaks. What was not recorded is
    NaN, and so is every score of a token that the policy could not score; `replay_logprobs` is
    -inf where the token is outside its support. Logprobs and entropy in nats.
    """

    rollout_id: NDArray[np.object_]
    position: NDArray[np.int32]  # in output_ids
    token_id: NDArray[np.int32]
    finding: NDArray[np.object_]
    top_k: NDArray[np.int32]
    support_size: NDArray[np.int32]
    sampling_logprobs: Floats
    full_logprobs: Floats
    replay_logprobs: Floats
    replay_full_logprobs: Floats
    replay_entropy: Floats  # over the support
    support_kl: Floats  # exact KL(engine || trainer) over the support

    def __len__(self) -> int:
        return len(self.token_id)

    @property
    def log_ratio(self) -> Floats:
        """replay − sampling."""
        return self.replay_logprobs - self.sampling_logprobs

    @property
    def log_ratio_without_support(self) -> Floats:
        """What a trainer sees that normalises over the whole vocabulary."""
        return self.replay_full_logprobs - self.sampling_logprobs

    @property
    def kept_mass(self) -> Floats:
        """The engine's full-vocabulary probability of each support."""
        mass: Floats = np.exp(self.full_logprobs - self.sampling_logprobs)
        return mass

    @property
    def replay_kept_mass(self) -> Floats:
        """The same under the policy; NaN where it cannot be had from the token's own scores."""
        with np.errstate(invalid="ignore"):
            mass = np.exp(self.replay_full_logprobs - self.replay_logprobs)
        return np.where(np.isfinite(self.replay_logprobs), mass, np.nan).astype(np.float32)

    @classmethod
    def concatenate(cls, tables: Iterable[TokenTable]) -> TokenTable:
        parts = [vars(table) for table in tables]
        return cls(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})

    def rows(self, start: int, stop: int) -> TokenTable:
        """A part, as views: what is written into it stands here."""
        return TokenTable(**{name: values[start:stop] for name, values in vars(self).items()})

    def to_arrow(self) -> pa.Table:
        """The columns of reports/<id>/tokens.arrow."""
        columns: dict[str, Any] = {name: pa.array(values) for name, values in vars(self).items()}
        return pa.table(columns)


def recorded(rollout: Rollout, faults: Sequence[Fault]) -> TokenTable:
    """The rows of one rollout before the policy has seen it: every score is NaN."""
    length = rollout.num_output_tokens
    finding = np.full(length, OK, dtype=object)
    for fault in reversed(faults):  # the first fault of a token is the one that is shown
        finding[fault.positions[fault.positions >= 0]] = fault.code
    unknown = np.full(length, np.nan, np.float32)
    full = unknown if rollout.full_logprobs is None else rollout.full_logprobs
    at = np.flatnonzero(~rollout.is_forced)
    return TokenTable(
        rollout_id=np.full(len(at), rollout.rollout_id, dtype=object),
        position=at.astype(np.int32),
        token_id=rollout.output_ids[at],
        finding=finding[at],
        top_k=np.full(len(at), rollout.top_k, np.int32),
        support_size=rollout.support.counts[at],
        sampling_logprobs=rollout.sampling_logprobs[at],
        full_logprobs=full[at],
        replay_logprobs=unknown[at],
        replay_full_logprobs=unknown[at],
        replay_entropy=unknown[at],
        support_kl=unknown[at],
    )

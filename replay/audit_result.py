"""Audit: what `replay.audit` found, token by token and in sum."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.audit_rows import WorstRow
from replay.margins import CONDITIONS

CLASSES = ("robust", "consistent", "explainable", "inconsistent")


@dataclass(frozen=True)
class Tolerance:
    """How far apart honest logits of both sides are, in logits before temperature."""

    logits: float
    source: str  # support_logprobs, log_ratio or none
    tokens: int  # supports of two ids or more that it was measured on


@dataclass(frozen=True, eq=False)
class Audit:
    """The audited tokens, [N] each, and what is said about them."""

    rollout_id: NDArray[np.object_]
    position: NDArray[np.int32]
    temperature: NDArray[np.float64]
    margins: NDArray[np.float64]  # [N, 4] by `CONDITIONS`, in units of z/T
    is_repaired: NDArray[np.bool_]  # inconsistent, and explained without the drawn token
    tolerance: Tolerance
    sampled_tokens: int  # of the run, audited or not
    partial: dict[str, Counter[str]]  # setting -> rollouts, tokens without prefix and mass
    skipped: dict[str, Counter[str]]  # reason -> rollouts, tokens not audited
    semantics: dict[str, int]  # "joint, keep" -> tokens
    worst: tuple[WorstRow, ...]

    def __len__(self) -> int:
        return len(self.position)

    @property
    def eps(self) -> NDArray[np.float64]:
        """[N, 4] The smallest change of logits, in z/T, that could make each condition true."""
        return np.maximum(0, -self.margins)

    @property
    def classes(self) -> NDArray[np.intp]:
        """[N] Places in `CLASSES`."""
        return classify(self.margins, self.temperature, self.tolerance)

    @property
    def inconsistent_at_least(self) -> float | None:
        """What the gate judges: the share of inconsistent rows, less what chance may add."""
        if not len(self):
            return None
        return lower_bound(int((self.classes == 3).sum()), len(self))

    def as_dict(self) -> dict[str, Any]:
        """`audit` of summary.json."""
        classes = np.bincount(self.classes, minlength=4).tolist()
        limit = self.tolerance.logits / self.temperature[:, None]
        by_condition = {
            name: {
                "needs_change": _share(self.eps[:, i] > 0),
                "inconsistent": _share(self.eps[:, i] > limit[:, 0]),
            }
            for i, name in enumerate(CONDITIONS)
        }
        largest = self.eps.max(axis=1, initial=0) * self.temperature
        largest = largest[np.isfinite(largest)]
        return {
            "tokens": len(self),
            "of": self.sampled_tokens,
            "classes": dict(zip(CLASSES, classes, strict=True)),
            "inconsistent": _share(self.classes == 3),
            "inconsistent_at_least": self.inconsistent_at_least,
            "exact_prefixes": _share(self.margins[:, 0] >= 0),
            "tolerance": asdict(self.tolerance),
            "eps_logits": {
                "p50": float(np.percentile(largest, 50)) if len(largest) else None,
                "p99": float(np.percentile(largest, 99)) if len(largest) else None,
            },
            "conditions": by_condition,
            "semantics": self.semantics,
            "without_prefix_and_mass": {k: dict(v) for k, v in self.partial.items()},
            "skipped": {k: dict(v) for k, v in self.skipped.items()},
            "repair_fingerprints": int(self.is_repaired.sum()),
            "worst": [
                {"rollout_id": self.rollout_id[row.at], "position": int(self.position[row.at])}
                | {"class": CLASSES[self.classes[row.at]]}
                | row.as_dict()
                for row in self.worst
            ],
        }


def _share(values: NDArray[np.bool_]) -> float | None:
    return float(values.mean()) if len(values) else None


def classify(
    margins: NDArray[np.float64], temperature: NDArray[np.float64], tolerance: Tolerance
) -> NDArray[np.intp]:
    """[N] Places in `CLASSES` of [N, 4] margins."""
    least = margins.min(axis=1, initial=np.inf) * temperature
    kinds = [least > tolerance.logits, least >= 0, -least <= tolerance.logits]
    classes: NDArray[np.intp] = np.select(kinds, [0, 1, 2], default=3)
    return classes


def lower_bound(count: int, total: int, z: float = 3.0) -> float:
    """Of a share, at z standard errors (Wilson): 1 of 12 is no 8 %, 41 of 512 are more than 5 %."""
    share, square = count / total, z * z / total
    spread = z * ((share * (1 - share) + square / 4) / total) ** 0.5
    return float(max(0.0, (share + square / 2 - spread) / (1 + square)))

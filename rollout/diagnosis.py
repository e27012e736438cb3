"""Diagnosis: one cause of what is wrong with a run, with its evidence and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

CLEAN = "clean"

SUPERSEDES = {
    "shifted_by_one": {
        "other_weights",
        "sampled_outside_support",
        "singleton_logprob",
        "nonfinite_logprob",
        "logprobs_disagree",
        "support_truncated",
    },
    "full_logprobs_stored": {"singleton_logprob", "logprobs_disagree", "support_truncated"},
    "support_padded": {
        "support_truncated",
        "duplicate_ids",
        "nonfinite_logprob",
        "sentinel_logprob",
        "singleton_logprob",
        "logprobs_disagree",
    },
    "duplicate_ids": {"support_truncated", "logprobs_disagree"},
    "sampled_outside_support": {"logprobs_disagree", "nonfinite_logprob"},
    "support_truncated": {"logprobs_disagree"},
}
"""Codes that follow from another one: an id twice makes probabilities sum to more than 1."""


@dataclass(frozen=True)
class Diagnosis:
    """One cause. `scope` has at least `kind` and `where`; `also` are other codes that predict the
    same data, or that follow from this one."""

    code: str
    scope: dict[str, Any]
    sentence: str
    evidence: dict[str, Any] = field(default_factory=dict)
    advice: str = ""
    also: tuple[str, ...] = ()
    rollouts: frozenset[str] | None = None  # ids of those it is in; None: all of them

    def as_dict(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "scope": self.scope,
            "sentence": self.sentence,
            "evidence": self.evidence,
            "advice": self.advice,
            "also": list(self.also),
        }

    def covers(self, rollout_id: str) -> bool:
        return self.rollouts is None or rollout_id in self.rollouts

    def is_within(self, other: Diagnosis) -> bool:
        """Whether it is in no rollout that `other` is not in."""
        if other.rollouts is None:
            return True
        return self.rollouts is not None and self.rollouts <= other.rollouts

    def explains(self, code: str) -> bool:
        """Whether `code` is its own or follows from it."""
        return code == self.code or code in SUPERSEDES.get(self.code, ())

    def with_also(self, codes: Sequence[str]) -> Diagnosis:
        more = dict.fromkeys((*self.also, *(c for c in codes if c != self.code)))
        return replace(self, also=tuple(more))


def without_consequences(found: Sequence[Diagnosis]) -> list[Diagnosis]:
    """What follows from a diagnosis of the same rollouts is named in its `also` instead.

    A fault in other rollouts is another fault, whatever its code.
    """
    out: list[Diagnosis] = []
    for d in found:
        causes = (c for c in found if c is not d and c.code != d.code and c.explains(d.code))
        same = (c for c in out if c.code == d.code)
        if not any(d.is_within(c) for c in (*causes, *same)):
            out.append(d)
    return [
        d.with_also([c.code for c in found if d.explains(c.code) and c.is_within(d)]) for d in out
    ]

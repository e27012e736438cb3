"""Diagnosis: one cause of what is wrong with a run, with its evidence and what to do."""

from __future__ import annotations

from collections.abc import Iterable
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
    left_out: frozenset[str] = frozenset()  # rollouts whose numbers it makes incomparable

    def as_dict(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "scope": self.scope,
            "sentence": self.sentence,
            "evidence": self.evidence,
            "advice": self.advice,
            "also": list(self.also),
        }


def without_consequences(found: Iterable[Diagnosis]) -> list[Diagnosis]:
    """What follows from another diagnosis is named in its `also`, and a code stands once."""
    out: dict[str, Diagnosis] = {}
    for d in found:
        out.setdefault(d.code, d)
    for code, consequences in SUPERSEDES.items():
        if code in out and (gone := [c for c in out if c in consequences]):
            out[code] = replace(out[code], also=tuple(dict.fromkeys((*out[code].also, *gone))))
            out = {c: d for c, d in out.items() if c not in gone}
    return list(out.values())

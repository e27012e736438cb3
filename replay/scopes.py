"""Scopes of `diagnose`: which tokens a fault may be in, and what they share."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from replay.evidence import Evidence, Mask
from rollout.record import Rollout
from rollout.shared import Traits, endpoint, in_words, settings, what_only_they_share

MAX_VALUES = 12  # of one property; more are not tried one by one
TAILS = (8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)
MIN_TOKENS = 10


@dataclass(frozen=True, eq=False)
class Scope:
    """`kind` is all, setting, endpoint, version, tail, length, rollouts, ids or rest."""

    kind: str
    where: str  # in words, to start a sentence with
    tokens: Mask  # [T]
    facts: dict[str, Any] = field(default_factory=dict)
    freedom: int = 0  # how much choosing it took

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "where": self.where, **self.facts}


def everything(e: Evidence) -> Scope:
    return Scope("all", "In every rollout", np.ones(len(e), bool))


def scopes(e: Evidence) -> list[Scope]:
    """Those that can be named without looking at the mismatch."""
    found = [everything(e), *_shared(e), *_versions(e), *_tails(e), *_lengths(e)]
    return [s for s in found if s.tokens.sum() >= MIN_TOKENS]


def of_rollouts(e: Evidence, affected: Mask, left: Mask | None = None) -> Scope:
    """The rollouts of `affected` [n], with what only they share, if anything."""
    names = [r.rollout_id for r, is_in in zip(e.rollouts, affected, strict=True) if is_in]
    seen = np.isin(np.arange(len(e.rollouts)), e.rollout)  # others were not looked at
    traits = [Traits.of(r) for r in e.rollouts]
    share = what_only_they_share(
        [t for t, is_in in zip(traits, affected, strict=True) if is_in],
        [t for t, is_other in zip(traits, seen & ~affected, strict=True) if is_other],
    )
    where = f"In {len(names)} of {len(e.rollouts)} rollouts ({', '.join(names[:3])}"
    where += ", …)" if len(names) > 3 else ")"
    facts = {"rollouts": len(names), "first": names[:10]} | ({"share": share} if share else {})
    tokens = affected[e.rollout]
    if left is not None:
        tokens &= left
    return Scope("rollouts", where + in_words(share), tokens, facts, freedom=4)


def within(scope: Scope, left: Mask) -> Scope:
    """`scope` without the tokens that another cause was found for."""
    if scope.kind == "all" and not left.all():
        return Scope("rest", "Everywhere else", left, freedom=2)
    return replace(scope, tokens=scope.tokens & left)


def _setting(r: Rollout) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings(r).items())


def _shared(e: Evidence) -> Iterator[Scope]:
    for kind, of in (("setting", _setting), ("endpoint", endpoint)):
        values = [of(r) for r in e.rollouts]
        for value, is_in in _each(values):
            yield Scope(
                kind, f"In rollouts with {kind} {value}", is_in[e.rollout], {kind: value}, 1
            )


def _each(values: list[Any]) -> Iterator[tuple[Hashable, Mask]]:
    distinct = sorted({v for v in values if v is not None}, key=str)
    if len(set(values)) >= 2 and len(distinct) <= MAX_VALUES:
        for value in distinct:
            yield value, np.array([v == value for v in values])


def version_of_tokens(e: Evidence) -> np.ndarray:
    """[T] The weight version of each token, "" where unknown."""
    versions = np.full(len(e), "", dtype=object)
    for i, rollout in enumerate(e.rollouts):
        for span in rollout.weight_versions:
            inside = (e.rollout == i) & (e.position >= span.start) & (e.position < span.end)
            versions[inside] = span.version
    return versions


def _versions(e: Evidence) -> Iterator[Scope]:
    versions = version_of_tokens(e)
    values = sorted(set(versions) - {""})
    if len(set(versions)) >= 2 and len(values) <= MAX_VALUES:
        for value in values:
            yield Scope(
                "version",
                f"In tokens of weight version {value}",
                versions == value,
                {"version": value},
                1,
            )


def _tails(e: Evidence) -> Iterator[Scope]:
    for start in TAILS:
        tail = e.position >= start
        if min(tail.sum(), (~tail).sum()) >= max(MIN_TOKENS, 0.05 * len(e)):
            yield Scope(
                "tail", f"From output token {start} on", tail, {"from_token": start}, freedom=2
            )


def _lengths(e: Evidence) -> Iterator[Scope]:
    lengths = np.array([r.num_output_tokens for r in e.rollouts])
    for limit in sorted({int(np.percentile(lengths, q)) for q in (50, 75, 90)}):
        longer = lengths > limit
        if 0 < longer.sum() < len(longer):
            yield Scope(
                "length",
                f"In rollouts of more than {limit} output tokens",
                longer[e.rollout],
                {"longer_than": limit},
                freedom=3,
            )

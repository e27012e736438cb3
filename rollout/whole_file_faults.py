"""Faults of whole files that break several content rules: shifted, padded, full logprobs stored.

Each judge sees one rollout at a time and keeps a few numbers of it, none of its tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.diagnosis import Diagnosis
from rollout.record import Rollout
from rollout.rules import LOGPROB_SLACK, SENTINEL, SUM_SLACK
from rollout.shared import Traits, in_words, what_only_they_share

MIN_TOKENS = 10
NEARLY_ALL = 0.95
PADS = 3  # ids that are looked at

Implausible = Callable[[int], Mapping[str, int]]
"""By rollout, the tokens where the policy puts an id far below every other id of the support."""


class Group:
    """Rollouts that were judged: their ids and traits, by the number they came with."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.traits: list[Traits] = []

    def add(self, r: Rollout) -> int:
        self.ids.append(r.rollout_id)
        self.traits.append(Traits.of(r))
        return len(self.ids) - 1

    def scope(self, affected: Sequence[int], judged: int | None = None) -> dict[str, Any]:
        """Of the rollouts numbered `affected`; `judged` are those that could have been."""
        total = len(self.ids)
        if len(affected) >= NEARLY_ALL * (total if judged is None else judged):
            return {"kind": "all", "where": "In every rollout"}
        mine = set(affected)
        names = sorted(self.ids[i] for i in mine)
        shared = what_only_they_share(
            [self.traits[i] for i in sorted(mine)],
            [t for i, t in enumerate(self.traits) if i not in mine],
        )
        return {
            "kind": "rollouts",
            "where": f"In {len(names)} of {total} rollouts{in_words(shared)}",
            "rollouts": len(names),
            "first": names[:10],
        } | ({"share": shared} if shared else {})

    def rollouts(self, affected: Sequence[int], scope: Mapping[str, Any]) -> frozenset[str] | None:
        return None if scope["kind"] == "all" else frozenset(self.ids[i] for i in affected)


class Shifted:
    """Supports that hold the neighbouring output token, but not their own."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[int, int]] = {}  # step and tokens
        self._judged = 0

    def add(self, number: int, r: Rollout) -> None:
        if r.num_output_tokens < 5 or r.is_forced.any():
            return
        self._judged += 1
        if r.support.contains(r.output_ids).mean() >= 0.9:
            return
        for step in (1, -1):
            neighbour = r.support.contains(np.roll(r.output_ids, -step))
            held = neighbour[:-1] if step > 0 else neighbour[1:]
            if held.mean() > 0.98:
                self._found[number] = step, r.num_output_tokens
                return

    def diagnose(self, group: Group) -> list[Diagnosis]:
        tokens = sum(n for _, n in self._found.values())
        if tokens < MIN_TOKENS:
            return []
        names = list(self._found)
        scope = group.scope(names, self._judged)
        step = Counter(step for step, _ in self._found.values()).most_common(1)[0][0]
        return [
            Diagnosis(
                "shifted_by_one",
                scope,
                f"{scope['where']}, the support of output token t is that of token t{step:+d}.",
                {"tokens": tokens, "shift": step},
                "align supports with output_ids: row t is what token t was sampled from",
                rollouts=group.rollouts(names, scope),
            )
        ]


class Padded:
    """One id in nearly every support, with next to no probability where it should have some."""

    def __init__(self) -> None:
        self._ids = Counter[int]()  # how many rollouts have it in nearly every support
        self._proof: dict[int, dict[int, tuple[int, int]]] = {}  # id: rollout: proof, supports
        self._judged = 0

    def add(self, number: int, r: Rollout) -> None:
        sampled = int((~r.is_forced).sum())
        if sampled < 3:  # can prove nothing
            return
        self._judged += 1
        ids, times = np.unique(r.support.ids, return_counts=True)
        often = ids[times >= NEARLY_ALL * sampled]
        if not len(often):
            return
        if sampled >= 5:
            self._ids.update(often.tolist())
        total = _mass(r)
        for pad in often.tolist():
            entries = np.flatnonzero(r.support.ids == pad)
            if len(np.unique(r.support.rows[entries])) >= NEARLY_ALL * sampled:
                proof = _proof_of_padding(r, pad, entries, total)
                self._proof.setdefault(pad, {})[number] = proof, len(entries)

    def diagnose(self, group: Group, implausible: Implausible) -> list[Diagnosis]:
        for pad, _ in self._ids.most_common(PADS):
            by_policy = implausible(pad)
            found = {
                number: most
                for number, (proof, size) in self._proof.get(pad, {}).items()
                if (most := max(proof, by_policy.get(group.ids[number], 0))) >= max(3, 0.3 * size)
            }
            if sum(found.values()) < MIN_TOKENS:
                continue
            scope = group.scope(list(found), self._judged)
            return [
                Diagnosis(
                    "support_padded",
                    scope,
                    f"{scope['where']}, id {pad} is in every support and has no probability "
                    "there: padding was recorded as part of the support.",
                    {"id": pad, "tokens": sum(found.values())},
                    "cut each support to its own length before it is recorded",
                    rollouts=group.rollouts(list(found), scope),
                )
            ]
        return []


def _mass(r: Rollout) -> NDArray[np.float64] | None:
    """[R] Probability of each support, where it was recorded."""
    if r.support_logprobs is None:
        return None
    exact = np.exp(r.support_logprobs.astype(np.float64))
    return np.bincount(r.support.rows, exact, len(r.support)).astype(np.float64)


def _proof_of_padding(
    r: Rollout, pad: int, entries: NDArray[np.intp], total: NDArray[np.float64] | None
) -> int:
    """Tokens that were not sampled as `pad` and show that it was no candidate."""
    rows = r.support.rows[entries]
    others = r.output_ids[rows] != pad
    if r.support_logprobs is None or total is None:
        certain = np.abs(r.sampling_logprobs[rows]) <= LOGPROB_SLACK
        return int((others & certain & (r.support.counts[rows] == 2)).sum())
    values = r.support_logprobs[entries]
    of_pad = np.bincount(rows, np.exp(values.astype(np.float64)), len(r.support))[rows]
    rest = total[rows] - of_pad
    # a logprob that no sampler gives, or mass beside ids that have all of it
    is_number = np.isfinite(values) & (values > SENTINEL)
    is_beside = (np.abs(rest - 1) < SUM_SLACK) & (np.abs(total[rows] - 1) > SUM_SLACK)
    return int((others & (~is_number | is_beside)).sum())


class FullStored:
    """sampling_logprobs that are the full ones although ids were left out.

    A cool sampler leaves out nothing that counts, and both are equal. So some of the rollouts must
    prove that mass was left out: a singleton below 0, a support that does not sum to 1.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}
        self._judged = 0
        self._proof = 0

    def add(self, number: int, r: Rollout) -> None:
        many = r.support.counts > 1
        if r.full_logprobs is None or many.sum() < 5:
            return
        self._judged += 1
        if (np.abs(r.full_logprobs - r.sampling_logprobs)[many] < 1e-6).mean() <= NEARLY_ALL:
            return
        self._tokens[number] = int(many.sum())
        lacks = (r.support.counts == 1) & (r.sampling_logprobs < -SUM_SLACK)
        if (mass := _mass(r)) is not None:
            lacks |= many & (mass < 1 - SUM_SLACK)
        self._proof += int(lacks.sum())

    def diagnose(self, group: Group) -> list[Diagnosis]:
        tokens = sum(self._tokens.values())
        if tokens < MIN_TOKENS or not self._proof:
            return []
        names = list(self._tokens)
        scope = group.scope(names, self._judged)
        words = "sampling_logprobs are the full logprobs: no support was applied."
        return [
            Diagnosis(
                "full_logprobs_stored",
                scope,
                f"{scope['where']}, {words}",
                {"tokens": tokens, "tokens_that_left_mass_out": self._proof},
                "store the engine's sampling-mask logprobs, not those over the whole vocabulary",
                rollouts=group.rollouts(names, scope),
            )
        ]

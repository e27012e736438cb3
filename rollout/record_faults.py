"""Causes that the record alone shows, judged over all rollouts of a run or a file at once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from rollout.diagnosis import SUPERSEDES, Diagnosis, without_consequences
from rollout.record import Rollout
from rollout.rules import Fault, count_tokens, find_faults
from rollout.self_check import UNKNOWN, EngineCheck, SelfCheck
from rollout.whole_file_faults import FullStored, Group, Implausible, Padded, Shifted
from rollout.words import number_of

ADVICE = {
    "duplicate_ids": "deduplicate where supports are made: an id twice counts twice in the sum",
    "sampled_outside_support": "record the set that was sampled from; one rebuilt beside the "
    "sampler can miss the token",
    "support_truncated": "record every id of the support; a limit on its length cuts it",
}


class RecordJudge:
    """Sees rollouts one by one, also those that break content rules, and then says what is wrong.

    It keeps facts of each rollout but none of its tokens, so that a file may be larger than memory.
    """

    def __init__(self, vocab_size: int | None = None, *, check_engine: bool = True) -> None:
        self._vocab_size = vocab_size
        self._check_engine = check_engine  # False where somebody else does
        self._group = Group()
        self._shifted, self._padded, self._full_stored = Shifted(), Padded(), FullStored()
        self._broken = _BrokenRules()
        self._declared: dict[tuple[bool, str], list[int]] = {}  # by use of min_p and filter order
        self._engine = SelfCheck()

    def add(self, rollout: Rollout, faults: Sequence[Fault] | None = None) -> None:
        """`rollout` must pass the format rules; `faults`, unless given, are found."""
        number = self._group.add(rollout)
        if faults is None:
            faults = find_faults(rollout, self._vocab_size)
        self._broken.add(number, faults)
        self._shifted.add(number, rollout)
        self._padded.add(number, rollout)
        self._full_stored.add(number, rollout)
        if self._check_engine:
            self._engine.add(rollout)
        if order := json.loads(rollout.engine_meta or "{}").get("filter_order"):
            self._declared.setdefault((rollout.min_p > 0, order), []).append(number)

    def diagnose(self) -> list[Diagnosis]:
        """What is wrong, without a trainer; none where nothing is."""
        causes = [*self.whole_file(), *self._full_stored.diagnose(self._group)]
        found = [*causes, *self.broken_rules(causes), *self.declared_order(self._engine.facts())]
        return without_consequences(found)

    def whole_file(self, implausible: Implausible = lambda pad: {}) -> list[Diagnosis]:
        """Faults of whole files that a trainer's numbers do not show better."""
        return [
            *self._shifted.diagnose(self._group),
            *self._padded.diagnose(self._group, implausible),
        ]

    def broken_rules(self, causes: Sequence[Diagnosis]) -> list[Diagnosis]:
        """Each broken rule by its own code, most tokens first, where no cause explains it."""
        return self._broken.diagnose(self._group, causes)

    def declared_order(self, engine: EngineCheck | None) -> list[Diagnosis]:
        """`engine_meta` names another filter order than the recorded probabilities show."""
        if engine is None:
            return []
        found = []
        for prefix, shown in (("", engine.filter_order), ("min_p_", engine.min_p_filter_order)):
            for (with_min_p, declared), numbers in self._declared.items():
                is_about = with_min_p == (prefix != "") and shown not in (UNKNOWN, "neither")
                if is_about and declared != shown:
                    words = f"engine_meta says that the filters are {declared}; the recorded "
                    words += f"probabilities show that they are {shown}."
                    found.append(self._wrong_order(numbers, words, prefix, engine))
        return found

    def _wrong_order(
        self, numbers: Sequence[int], words: str, prefix: str, engine: EngineCheck
    ) -> Diagnosis:
        scope = self._group.scope(numbers)
        counts = ("order_rows", "joint_violated", "sequential_violated")
        return Diagnosis(
            "filter_order",
            scope,
            f"{scope['where']}, {words}",
            {name: getattr(engine, prefix + name) for name in counts},
            "correct engine_meta; scores do not depend on it, re-deriving supports does",
            rollouts=self._group.rollouts(numbers, scope),
        )


def explain_record(rollouts: Iterable[Rollout]) -> list[Diagnosis]:
    """What is wrong with `rollouts`, which may break content rules; none where nothing is."""
    judge = RecordJudge()
    for rollout in rollouts:
        judge.add(rollout)
    return judge.diagnose()


def reason_of(rollout_id: str, code: str, diagnoses: Sequence[Diagnosis]) -> str:
    """Why a rollout breaks the rule `code`: the code of the diagnosis that explains it."""
    for d in diagnoses:
        if d.explains(code) and d.covers(rollout_id):
            return d.code
    return code


class _BrokenRules:
    """Content rules that rollouts break."""

    def __init__(self) -> None:
        self._found: dict[int, list[Fault]] = {}

    def add(self, number: int, faults: Sequence[Fault]) -> None:
        if faults:
            self._found[number] = list(faults)

    def diagnose(self, group: Group, causes: Sequence[Diagnosis]) -> list[Diagnosis]:
        """One per code and per what explains it; those that something explains come last."""
        broken: dict[tuple[str, str], dict[int, list[Fault]]] = {}
        for number, faults in self._found.items():
            here = [c for c in causes if c.covers(group.ids[number])]
            codes = {f.code for f in faults}
            for fault in faults:
                by = [c.code for c in here if c.explains(fault.code)]
                by += [code for code in codes if fault.code in SUPERSEDES.get(code, ())]
                key = fault.code, by[0] if by else ""
                broken.setdefault(key, {}).setdefault(number, []).append(fault)
        found = [
            (explained != "", _broken_rule(code, by_rollout, group))
            for (code, explained), by_rollout in broken.items()
        ]
        found.sort(key=lambda pair: (pair[0], -pair[1].evidence["tokens"]))
        return [d for _, d in found]


def _broken_rule(code: str, found: Mapping[int, Sequence[Fault]], group: Group) -> Diagnosis:
    numbers = sorted(found)
    scope = group.scope(numbers)
    count = sum(map(count_tokens, found.values()))
    words = f"{number_of(count, 'token')} break{'s' * (count == 1)}"
    first = f"{group.ids[numbers[0]]}: {found[numbers[0]][0].message}"
    return Diagnosis(
        code,
        scope,
        f"{scope['where']}: {words} the rule {code}; first {first}.",
        {"tokens": count},
        ADVICE.get(code, "see the rule in docs/format.md"),
        rollouts=frozenset(group.ids[n] for n in numbers),
    )

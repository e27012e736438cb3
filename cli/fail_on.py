"""`--fail-on`: which parts of a verdict make the exit code 1, and limits of gates."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import click

FINDINGS, GATES, NEVER = "findings", "gates", "never"
WORDS = (FINDINGS, GATES, NEVER)


@dataclass(frozen=True)
class FailOn:
    """`words` choose what exits 1, none of them means everything; `limits` set gates."""

    words: frozenset[str]
    limits: dict[str, float]

    @classmethod
    def parse(cls, values: Sequence[str], gates: Collection[str]) -> Self:
        """From the values of the option; a usage error names what was not understood."""
        words, limits = set(), {}
        for value in values:
            name, equals, limit = value.partition("=")
            if not equals and value in WORDS:
                words.add(value)
                continue
            if name not in gates or not equals:
                known = f"{', '.join(WORDS)}, or one of {', '.join(gates)} with =LIMIT"
                raise click.BadParameter(f"{value!r} is none of {known}", param_hint="--fail-on")
            try:
                limits[name] = float(limit)
            except ValueError:
                raise click.BadParameter(
                    f"{value!r}: the limit is no number", param_hint="--fail-on"
                ) from None
        if NEVER in words and len(words) > 1:
            raise click.BadParameter("never goes with no other word", param_hint="--fail-on")
        return cls(frozenset(words), limits)

    @property
    def overrides(self) -> list[str]:
        """The limits as overrides of a replay's config."""
        return [f"gates.{name}={limit}" for name, limit in self.limits.items()]

    def exit_code(self, summary: Mapping[str, Any]) -> int:
        """0 or 1 for `Report.as_dict()`. A diagnosis counts as a finding: it names a fault."""
        if not self.words:
            return int(summary["verdict"] != "consistent")
        named = bool(summary["findings"]) or any(
            entry.get("code") != "clean" for entry in summary.get("diagnoses") or ()
        )
        failed = {FINDINGS: named, GATES: bool(summary["failed_gates"]), NEVER: False}
        return int(any(failed[word] for word in self.words))

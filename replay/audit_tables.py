"""The support audit in full, for its section of the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from replay.charts import share_bar
from replay.sections import audit_facts
from rollout.words import Facts, label, plain

MOST_ROWS = 100  # of a list
SAID = ("tokens", "classes", "tolerance", "without_prefix_and_mass", "skipped")  # by audit_facts


def audit_section(audit: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A bar of the classes, facts, and a table per list of `Audit.as_dict()`; None without one."""
    if not audit:
        return None
    rest = {k: v for k, v in audit.items() if k not in SAID and not _is_table(v)}
    return {
        "svg": share_bar(audit["classes"]) if audit["tokens"] else Markup(),
        "facts": [*audit_facts(audit), *_flat(rest)],
        "tables": [_table(key, value) for key, value in audit.items() if _is_table(value)],
    }


def _is_table(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Mapping)


def _table(name: str, rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    head = list(rows[0])
    shown = [[plain(row.get(key)) for key in head] for row in rows[:MOST_ROWS]]
    words = f"{len(rows)} row{'s' * (len(rows) != 1)}"
    if len(rows) > MOST_ROWS:
        words = f"the first {MOST_ROWS} of {len(rows)} rows"
    return {"title": name, "head": head, "rows": shown, "words": words}


def _flat(value: Mapping[str, Any], before: str = "") -> Facts:
    """Nested mappings as one list, keys joined by spaces; what is None or empty is left out."""
    facts: Facts = []
    for key, entry in value.items():
        name = f"{before}{label(key)}"
        if isinstance(entry, Mapping):
            facts += _flat(entry, f"{name} ")
        elif entry not in (None, "", [], ()):
            facts.append((name, plain(entry)))
    return facts

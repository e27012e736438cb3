"""summary.json in words: what the page and the Markdown summary say about a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from replay.charts import share_bar

Facts = list[tuple[str, str]]

LABELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("mean |log_ratio|", ("log_ratio_abs", "mean")),
    ("p50", ("log_ratio_abs", "p50")),
    ("p99", ("log_ratio_abs", "p99")),
    ("max", ("log_ratio_abs", "max")),
    ("mean log_ratio", ("log_ratio", "mean")),
    ("mismatch_kl", ("mismatch_kl",)),
    ("ratio outside [0.9, 1.1]", ("ratio_outside",)),
)
NATS = ("log_ratio_abs_mean", "log_ratio_abs_p99", "mismatch_kl", "support_kl")  # gates
MOST_ROWS = 100  # of a list in the audit


def number_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Label, value over the support, value over the whole vocabulary."""
    without = summary["without_support"]
    rows = [(label, _at(summary, path), _at(without, path)) for label, path in LABELS]
    return [*rows, ("support_kl (exact)", _at(summary, ("support_kl",)), "")]


def reasons_of(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the verdict rests on: diagnoses, which explain, then findings, then failed gates.

    Each has `kind`, `code`, `text` and `facts`; empty for a consistent report.
    """
    diagnoses = summary.get("diagnoses") or ()
    reasons = [_diagnosis(entry) for entry in diagnoses if entry.get("code") != "clean"]
    for finding in summary["findings"]:
        text = (
            f"{finding['count']:,} tokens in {finding['rollouts']:,} rollouts; "
            f"first {finding['first']}"
        )
        reasons.append({"kind": "finding", "code": finding["code"], "text": text, "facts": []})
    for name in summary["failed_gates"]:
        gate = summary["gates"][name]
        unit = " nats" if name in NATS else ""
        text = f"{gate['value']:.4g} is above {gate['limit']:g}{unit}"
        reasons.append({"kind": "gate", "code": name, "text": text, "facts": []})
    return reasons


def _diagnosis(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Its code and sentence as they are, all else as facts."""
    sentence = next((key for key in ("sentence", "text", "message") if entry.get(key)), "")
    rest = {key: value for key, value in entry.items() if key not in ("code", sentence)}
    return {
        "kind": "diagnosis",
        "code": str(entry.get("code", "unknown")),
        "text": str(entry.get(sentence, "")),
        "facts": _flat(rest),
    }


def facts_of(summary: Mapping[str, Any]) -> Facts:
    """What was measured, and in which precision."""
    sizes = summary["support_size"]
    facts = [
        (
            "tokens scored",
            f"{summary['scored_tokens']:,} of {summary['tokens']:,} in "
            f"{summary['rollouts']:,} rollouts",
        ),
        (
            "kept mass, engine / trainer",
            f"{_number(summary['kept_mass'])} / {_number(summary['replay_kept_mass'])}",
        ),
        (
            "support size",
            f"mean {sizes['mean']:.1f}, max {sizes['max']}, {sizes['singletons']:,} singletons, "
            f"{sizes['above_top_k']:,} above top_k",
        ),
        ("precision", ", ".join(f"{key} {value}" for key, value in summary["precision"].items())),
    ]
    if engine := summary.get("engine_check"):
        facts.append(("engine, as its numbers say", engine_words(engine)))
    if summary["sampled_outside_support"]:
        facts.append(("sampled outside support", f"{summary['sampled_outside_support']:,} tokens"))
    return facts


def engine_words(engine: Mapping[str, Any]) -> str:
    """What the recorded numbers alone say of how it filters, and of its head."""
    facts = {
        "filter order": engine["filter_order"],
        "ties": engine["tie_policy"],
        "head": engine["head"],
        "full logprobs": engine["full_logprobs"].replace("_", " "),
    }
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def run_facts(run: Mapping[str, Any]) -> Facts:
    """What a run says about itself (`rollout.view.view_run`)."""
    return [(name.replace("_", " "), str(value)) for name, value in run.items()]


def audit_section(audit: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A bar of the rows' classes, facts, and a table per list; None without an audit."""
    if not audit:
        return None
    classes = audit.get("classes") or {}
    facts = {
        key: value for key, value in audit.items() if key != "classes" and not _is_table(value)
    }
    tables = [_table(key, value) for key, value in audit.items() if _is_table(value)]
    return {
        "svg": share_bar(classes) if classes else Markup(),
        "facts": _flat(facts),
        "tables": tables,
    }


def _is_table(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Mapping)


def _table(name: str, rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    head = list(rows[0])
    shown = [[_plain(row.get(key)) for key in head] for row in rows[:MOST_ROWS]]
    words = f"{len(rows)} row{'s' * (len(rows) != 1)}"
    if len(rows) > MOST_ROWS:
        words = f"the first {MOST_ROWS} of {len(rows)} rows"
    return {"title": name, "head": head, "rows": shown, "words": words}


def _flat(value: Mapping[str, Any], before: str = "") -> Facts:
    """Nested mappings as one list, keys joined by spaces; what is None or empty is left out."""
    facts: Facts = []
    for key, entry in value.items():
        label = f"{before}{str(key).replace('_', ' ')}"
        if isinstance(entry, Mapping):
            facts += _flat(entry, f"{label} ")
        elif entry not in (None, "", [], ()):
            facts.append((label, _plain(entry)))
    return facts


def _plain(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(entry) for entry in value)
    return str(value)


def _at(numbers: Mapping[str, Any], path: tuple[str, ...]) -> str:
    value: Any = numbers
    for key in path:
        value = value[key]
    return _number(value)


def _number(value: float | None) -> str:
    return "not recorded" if value is None else f"{value:.4g}"

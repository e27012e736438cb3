"""A report as a few lines of Markdown, for the summary page of a CI job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from replay.report import CONSISTENT
from replay.sections import facts_of, number_rows, reasons_of

MOST_REASONS = 20


def markdown(summary: Mapping[str, Any], name: str = "") -> str:
    """GitHub-flavoured Markdown of `Report.as_dict()`: verdict, reasons, numbers, gates."""
    passed = summary["verdict"] == CONSISTENT
    title = f"rollout replay: {'PASS' if passed else 'FAIL'} {summary['verdict']}"
    lines = [f"### {title}" + (f" ({_text(name)})" if name else ""), ""]
    reasons = reasons_of(summary)
    for reason in reasons[:MOST_REASONS]:
        lines.append(f"- **{reason['kind']} {_text(reason['code'])}**: {_text(reason['text'])}")
    if len(reasons) > MOST_REASONS:
        lines.append(f"- and {len(reasons) - MOST_REASONS} more")
    if reasons:
        lines.append("")
    lines += _table(
        ("per token, nats", "over the support", "whole vocabulary"), number_rows(summary)
    )
    gates = [
        (
            gate,
            "not measured" if entry["value"] is None else f"{entry['value']:.4g}",
            f"{entry['limit']:g}",
            "failed" if gate in summary["failed_gates"] else "ok",
        )
        for gate, entry in summary["gates"].items()
    ]
    lines += ["", *_table(("gate", "value", "limit", ""), gates), ""]
    lines += ["; ".join(f"{label}: {_text(value)}" for label, value in facts_of(summary)), ""]
    return "\n".join(lines)


def _table(head: tuple[str, ...], rows: list[Any]) -> list[str]:
    lines = [_row(head), _row(("---", *("---:" for _ in head[1:])))]
    return lines + [_row(tuple(_text(cell) for cell in row)) for row in rows]


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(value: str) -> str:
    """Data as text: nothing in it starts a tag, a link, emphasis, a cell or a line."""
    text = " ".join(str(value).split())
    text = re.sub(r"[&<>|@#]", lambda sign: f"&#{ord(sign[0])};", text)
    text = re.sub(r"([\\`*\[\]~])", r"\\\1", text)
    return re.sub(r"\b_|_\b", r"\_", text)  # inside a word it means itself

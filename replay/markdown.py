"""A report as a few lines of Markdown, for the summary page of a CI job."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from replay.sections import (
    GATES_HEAD,
    NUMBERS_HEAD,
    facts_of,
    gate_rows,
    number_rows,
    reasons_of,
    verdict_words,
)

MOST_REASONS = 20


def markdown(summary: Mapping[str, Any], name: str = "") -> str:
    """GitHub-flavoured Markdown of `Report.as_dict()`: verdict, reasons, numbers, gates, facts."""
    title = f"rollout replay: {' '.join(verdict_words(summary))}"
    lines = [f"### {title}" + (f" ({_text(name)})" if name else ""), ""]
    reasons = reasons_of(summary)
    for reason in reasons[:MOST_REASONS]:
        lines.append(f"- **{_text(reason.head)}**: {_text(reason.text)}")
        lines += [f"  - {label}: {_text(text)}" for label, text in reason.facts]
    if len(reasons) > MOST_REASONS:
        lines.append(f"- and {len(reasons) - MOST_REASONS} more")
    lines += ["", *_table(NUMBERS_HEAD, number_rows(summary))]
    lines += ["", *_table(GATES_HEAD, gate_rows(summary)), ""]
    lines += [f"- {label}: {_text(value)}" for label, value in facts_of(summary)]
    return "\n".join([*lines, ""])


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
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

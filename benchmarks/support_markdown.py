"""The rows of the scoring benchmark as the tables of docs/performance.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PASSES = ("forward", "forward+backward")
PLAN = "plan"
OVER_SUPPORTS = "support"
Row = dict[str, Any]


def tables(report: dict[str, Any]) -> str:
    rows = [row for row in report["rows"] if row.get("time_ms")]
    versions = ", ".join(f"{name} {report['versions'][name]}" for name in ("torch", "triton"))
    copied = report["copy_bytes_per_s"] / 1e12
    parts = [f"{report['device']}, {versions}; a copy moves {copied:.2f} TB/s."]
    for supports, num_tokens in unique((row["supports"], row["num_tokens"]) for row in rows):
        cell = [r for r in rows if (r["supports"], r["num_tokens"]) == (supports, num_tokens)]
        over_supports = [r for r in cell if r["question"] == OVER_SUPPORTS and r["pass"] in PASSES]
        others = [r for r in cell if r["question"] != OVER_SUPPORTS]
        title = f"{num_tokens:,} tokens, supports: {supports}"
        parts += [f"{title}\n\n{times(over_supports)}"] if over_supports else []
        parts += [f"{title}, whole vocabulary\n\n{times(others)}"] if others else []
        ours = [r for r in over_supports if r["how"] == "score_support" and supports == "real"]
        parts += [f"{title}, `score_support` alone\n\n{details(ours)}"] if ours else []
    planned = [row for row in rows if row["pass"] == PLAN]
    parts += [f"`plan`\n\n{plans(planned)}"] if planned else []
    return "\n\n".join(parts)


def times(rows: Sequence[Row]) -> str:
    """A line for each way; milliseconds, and the multiple of what the row is compared with."""
    heads = unique((row["hidden_size"], row["vocab_size"]) for row in rows)
    passes = [name for name in PASSES if any(row["pass"] == name for row in rows)]
    columns = [(name, head) for name in passes for head in heads]
    lines = header(["ms", *(f"{name}, {size}" for name, (size, _) in columns)])
    for how in unique(row["how"] for row in rows):
        found = {
            (r["pass"], (r["hidden_size"], r["vocab_size"])): r for r in rows if r["how"] == how
        }
        lines.append(line([how, *(time(found.get(column)) for column in columns)]))
    return "\n".join(lines)


def plans(rows: Sequence[Row]) -> str:
    """A line for each batch: its plan depends on the ids, hardly on the head."""
    lines = header(["tokens", "supports", "ids", "ms", "peak MB"])
    for supports, num_tokens in unique((row["supports"], row["num_tokens"]) for row in rows):
        row = next(r for r in rows if (r["supports"], r["num_tokens"]) == (supports, num_tokens))
        peak = figure(row, "peak_bytes", "{:.0f}", 1e-6)
        ms = three_digits(row["time_ms"])
        lines.append(line([f"{num_tokens:,}", supports, f"{row['num_ids']:,}", ms, peak]))
    return "\n".join(lines)


def time(row: Row | None) -> str:
    if row is None:
        return "-"
    ratio = row.get("ratio")
    multiple = "" if ratio is None or ratio == 1 else f" ({three_digits(ratio)}×)"
    return three_digits(row["time_ms"]) + multiple


def three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def details(rows: Sequence[Row]) -> str:
    lines = header(
        [
            "head",
            "pass",
            "ms",
            "of the roofline",
            "of the floor",
            "wall ms",
            "peak MB",
            "error, nats",
        ]
    )
    for row in rows:
        lines.append(
            line(
                [
                    f"{row['hidden_size']} × {row['vocab_size']}",
                    row["pass"],
                    f"{row['time_ms']:.3f}",
                    figure(row, "gather_share", "{:.0%}"),
                    figure(row, "floor_share", "{:.0%}"),
                    figure(row, "wall_ms", "{:.2f}"),
                    figure(row, "peak_bytes", "{:.0f}", 1e-6),
                    figure(row, "logprob_error", "{:.0e}"),
                ]
            )
        )
    return "\n".join(lines)


def figure(row: Row, name: str, pattern: str, scale: float = 1) -> str:
    value = row.get(name)
    return "-" if value is None else pattern.format(scale * value)


def header(cells: Sequence[str]) -> list[str]:
    return [line(cells), "|" + "---|" * len(cells)]


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def unique(values: Any) -> list[Any]:
    return list(dict.fromkeys(values))

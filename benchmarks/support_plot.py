"""The rows of the scoring benchmark as bars on a logarithmic axis, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

WIDTH, LEFT, BAR, TOP = 860, 210, 18, 64
OURS_COLOUR, COLOUR, FLOOR_COLOUR = "#2a78b5", "#b8b8b8", "#d1702a"
PASSES = ("forward", "forward+backward")


def draw(rows: Sequence[dict[str, Any]], device: str) -> str:
    """One group of bars for each head and pass over real supports; the line is the roofline."""
    groups = grouped(rows)
    bars = [row for group in groups.values() for row in group]
    height = TOP + sum((len(group) + 2) * (BAR + 3) for group in groups.values()) + 20
    low, high = limits(bars)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12" fill="#333">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="20" y="24" font-size="15">{escape("Logprobs over recorded supports")}</text>',
        f'<text x="20" y="42">{escape(device)}; ms on a logarithmic axis; the line is the time of '
        "moving each byte once</text>",
    ]
    y = TOP
    for title, group in groups.items():
        lines.append(f'<text x="20" y="{y + BAR}" font-weight="bold">{escape(title)}</text>')
        y += BAR + 6
        for row in group:
            lines += bar(row, y, low, high)
            y += BAR + 3
        y += BAR
    return "\n".join([*lines, "</svg>"]) + "\n"


def grouped(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("time_ms") and row["pass"] in PASSES and row["supports"] == "real":
            head = f"D={row['hidden_size']} V={row['vocab_size']}"
            title = f"{head}, {row['num_tokens']:,} tokens, {row['pass']}"
            groups.setdefault(title, []).append(row)
    return {title: sorted(group, key=lambda row: row["time_ms"]) for title, group in groups.items()}


def limits(bars: Sequence[dict[str, Any]]) -> tuple[float, float]:
    shortest = min((row.get("floor_ms", row["time_ms"]) for row in bars), default=1.0)
    return shortest / 2, max((row["time_ms"] for row in bars), default=1.0)


def bar(row: dict[str, Any], y: int, low: float, high: float) -> list[str]:
    def place(time_ms: float) -> float:
        return LEFT + (WIDTH - LEFT - 110) * math.log(time_ms / low) / math.log(high / low)

    end, floor = place(row["time_ms"]), place(row.get("floor_ms", row["time_ms"]))
    colour = OURS_COLOUR if row["how"] == "score_support" else COLOUR
    name = row["how"] + (" (dense)" if row["question"] == "vocabulary" else "")
    ratio = f", {row['ratio']:.1f}x" if row["ratio_to"] == "support" else ""
    text_y = y + BAR - 5
    return [
        f'<text x="{LEFT - 8}" y="{text_y}" text-anchor="end">{escape(name)}</text>',
        f'<rect x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" height="{BAR}" fill="{colour}"/>',
        f'<line x1="{floor:.1f}" x2="{floor:.1f}" y1="{y}" y2="{y + BAR}" '
        f'stroke="{FLOOR_COLOUR}" stroke-width="2"/>',
        f'<text x="{end + 6:.1f}" y="{text_y}">{row["time_ms"]:.3g}{ratio}</text>',
    ]

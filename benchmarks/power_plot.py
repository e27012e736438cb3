"""How often a fault is named, against tokens: one panel per code, one line per size, as SVG.

python benchmarks/power_plot.py ROWS SVG      ROWS is what `diagnosis.py power` printed
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, PANEL, HEIGHT, LEFT, TOP, COLUMNS = 860, 270, 200, 44, 84, 3
COLOURS = ("#b8d4ea", "#6aa9d8", "#2a78b5", "#123f63")  # the larger the fault, the darker


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """`rows` hold `fault`, `code`, `support_logprobs` and `named` (share by tokens), the smallest
    fault of a code first."""
    panels: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        panels.setdefault(row["code"], []).append(row)
    height = TOP + math.ceil(len(panels) / COLUMNS) * (HEIGHT + 40)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12" fill="#333">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        '<text x="20" y="24" font-size="15">How often the right code comes first</text>',
        '<text x="20" y="44">share of draws against output tokens; solid with support_logprobs, '
        "dashed with the sampled token's alone</text>",
    ]
    for i, (code, group) in enumerate(panels.items()):
        x, y = LEFT + (i % COLUMNS) * (PANEL + 4), TOP + (i // COLUMNS) * (HEIGHT + 40)
        lines += panel(code, group, x, y)
    return "\n".join([*lines, "</svg>"]) + "\n"


def panel(code: str, group: Sequence[dict[str, Any]], left: float, top: float) -> list[str]:
    sizes = sorted({int(n) for row in group for n in row["named"]})
    wide, tall = PANEL - 120, HEIGHT - 50

    def x(tokens: int) -> float:
        return left + wide * math.log(tokens / sizes[0]) / math.log(sizes[-1] / sizes[0])

    def y(share: float) -> float:
        return top + 12 + tall * (1 - share)

    lines = [f'<text x="{left}" y="{top}" font-weight="bold">{escape(code)}</text>']
    for share in (0, 0.5, 1):
        lines.append(
            f'<line x1="{left}" x2="{left + wide}" y1="{y(share)}" y2="{y(share)}" stroke="#ddd"/>'
            f'<text x="{left - 6}" y="{y(share) + 4}" text-anchor="end">{share:g}</text>'
        )
    for tokens in sizes:
        lines.append(
            f'<text x="{x(tokens):.1f}" y="{top + tall + 30}" text-anchor="middle">{tokens}</text>'
        )
    faults = list(dict.fromkeys(row["fault"] for row in group))
    for i, fault in enumerate(faults):
        colour = COLOURS[-len(faults) :][i]
        for row in (row for row in group if row["fault"] == fault):
            points = " ".join(f"{x(int(n)):.1f},{y(s):.1f}" for n, s in row["named"].items())
            dash = "" if row["support_logprobs"] else ' stroke-dasharray="5 4"'
            lines.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"'
                f"{dash}/>"
            )
        place = top + 24 + 18 * (len(faults) - 1 - i)
        lines.append(
            f'<rect x="{left + wide + 12}" y="{place - 9}" width="10" height="10" fill="{colour}"/>'
            f'<text x="{left + wide + 26}" y="{place}">{escape(fault)}</text>'
        )
    return lines


if __name__ == "__main__":
    printed, svg = map(Path, sys.argv[1:])
    svg.write_text(draw([json.loads(line) for line in printed.read_text().splitlines()]))

"""Charts of the page as inline SVG: legible without JavaScript, coloured by the page's CSS."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from replay.bins import SIDE, Density, Rows

WIDTH, HEIGHT = 520, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 14, 44
LEVELS = 8  # shades of the density
SUPPORT, WHOLE = "over the support", "whole vocabulary"


@dataclass(frozen=True)
class Axes:
    """From values to places of the drawing; linear, x from `x0` to `x1`, y from 0 to `y1`."""

    x0: float
    x1: float
    y1: float
    left: int = LEFT
    y0: float = 0.0

    def x(self, value: float) -> float:
        part = (value - self.x0) / (self.x1 - self.x0)
        return self.left + part * (WIDTH - RIGHT - self.left)

    def y(self, value: float) -> float:
        part = (value - self.y0) / (self.y1 - self.y0)
        return HEIGHT - BOTTOM - part * (HEIGHT - BOTTOM - TOP)


def histogram(rows: Rows) -> Markup:
    """Overlaid step histograms of |log_ratio| on a logarithmic axis; the value 0 stands apart."""
    zero, bins = rows[0], rows[1:]
    if not bins:
        return _nothing("every |log_ratio| is exactly 0" if zero["support"] else "no scored token")
    first, last = math.log10(bins[0]["from"]), math.log10(bins[-1]["to"])
    top = max(max(row["support"], row["whole"]) for row in rows)
    axes = Axes(first, last, top * 1.08, left=LEFT + 46)
    parts = [*_y_axis(axes, "share of tokens", lambda v: f"{v:.0%}" if top > 0.05 else f"{v:.1%}")]
    parts += _decades(axes)
    for name, series in (("whole", "s2"), ("support", "s1")):
        path = [f"M{axes.x(first):.1f},{axes.y(0):.1f}"]
        for row in bins:
            y = axes.y(row[name])
            left, right = (axes.x(math.log10(row[end])) for end in ("from", "to"))
            path.append(f"L{left:.1f},{y:.1f}L{right:.1f},{y:.1f}")
        path.append(f"L{axes.x(last):.1f},{axes.y(0):.1f}Z")
        parts.append(f'<path class="area {series}" d="{"".join(path)}"/>')
        place = LEFT + 8 if name == "support" else LEFT + 24
        parts.append(_bar(place, axes.y(zero[name]), 14, axes.y(0), series))
    parts.append(_text(LEFT + 23, HEIGHT - BOTTOM + 16, "0", "middle"))
    parts.append(_x_label("|log_ratio| (nats, logarithmic)"))
    words = f"|log_ratio| per token, {SUPPORT} and {WHOLE}, shares of tokens"
    return _svg(parts, words, [(SUPPORT, "s1"), (WHOLE, "s2")])


def density_map(counts: Density) -> Markup:
    """Tokens by engine's (x) and trainer's (y) logprob; shade is the logarithm of the number."""
    if not counts.tokens:
        return _nothing("no scored token with a choice")
    axes = Axes(counts.floor, 0.0, 0.0, y0=counts.floor)
    most = int(counts.counts.max())
    shade = np.ceil(np.log1p(counts.counts) / np.log1p(most) * LEVELS).astype(int)
    step = -counts.floor / SIDE
    parts = []
    for level in range(1, LEVELS + 1):
        path = []
        for i, j in np.argwhere(shade == level).tolist():
            x0, x1 = axes.x(counts.floor + i * step), axes.x(counts.floor + (i + 1) * step)
            y0, y1 = axes.y(counts.floor + j * step), axes.y(counts.floor + (j + 1) * step)
            path.append(f"M{x0:.1f},{y0:.1f}H{x1:.1f}V{y1:.1f}H{x0:.1f}Z")
        if path:
            strength = 0.12 + 0.88 * level / LEVELS
            drawn = "".join(path)
            parts.append(f'<path class="s1 fill" fill-opacity="{strength:.2f}" d="{drawn}"/>')
    ends = [f"{f(v):.1f}" for v in (counts.floor, 0.0) for f in (axes.x, axes.y)]
    parts.append(
        f'<line class="guide" x1="{ends[0]}" y1="{ends[1]}" x2="{ends[2]}" y2="{ends[3]}"/>'
    )
    for value in ticks(counts.floor, 0.0):
        parts.append(_text(axes.x(value), HEIGHT - BOTTOM + 16, f"{value:g}", "middle"))
        parts.append(_text(LEFT - 8, axes.y(value) + 4, f"{value:g}", "end"))
    parts.append(_x_label("engine's logprob over the support (nats)"))
    parts.append(_y_label("trainer's logprob (nats)"))
    words = "Trainer's against engine's logprob; tokens on the diagonal agree"
    return _svg(parts, words, [(f"darkest: {most:,} tokens", "s1")])


def position_lines(rows: Rows) -> Markup:
    """Mean and 90th percentile of |log_ratio| by position in the output."""
    if not rows:
        return _nothing("no scored token")
    last = rows[-1]["to"]
    top = max(row["p90"] for row in rows) or max(row["mean"] for row in rows) or 1e-9
    axes = Axes(0, max(last, 1), top * 1.08)
    parts = [*_y_axis(axes, "|log_ratio| (nats)", _short)]
    for value in ticks(0, last):
        parts.append(_text(axes.x(value), HEIGHT - BOTTOM + 16, f"{value:g}", "middle"))
    for name, series in (("p90", "s1 thin"), ("mean", "s1")):
        points = [(axes.x((r["from"] + r["to"]) / 2), axes.y(r[name])) for r in rows]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="line {series}" points="{drawn}"/>')
        if len(points) == 1:
            parts.append(f'<circle class="fill s1" cx="{points[0][0]}" cy="{points[0][1]}" r="3"/>')
    parts.append(_x_label("position in the output (tokens)"))
    words = "|log_ratio| by position in the output"
    return _svg(parts, words, [("mean", "s1"), ("90th percentile", "s1 thin")])


def size_bars(rows: Rows) -> Markup:
    """Mean |log_ratio| by size of the support, with and without the support."""
    if not rows:
        return _nothing("no scored token")
    top = max(max(row["mean"], row["whole"]) for row in rows) or 1e-9
    axes = Axes(0, len(rows), top * 1.08)
    parts = [*_y_axis(axes, "mean |log_ratio| (nats)", _short)]
    room = axes.x(1) - axes.x(0)
    wide = min(26.0, room * 0.36)
    for i, row in enumerate(rows):
        middle = axes.x(i + 0.5)
        parts.append(_bar(middle - wide, axes.y(row["mean"]), wide, axes.y(0), "s1"))
        parts.append(_bar(middle, axes.y(row["whole"]), wide, axes.y(0), "s2"))
        short = f"≤{row['to']}" if row["to"] < 1024 else f"≤{row['to'] // 1024}k"
        label = span(row) if room >= 56 else short
        parts.append(_text(middle, HEIGHT - BOTTOM + 16, label, "middle"))
    parts.append(_x_label("ids in the support"))
    words = "Mean |log_ratio| by size of the support"
    return _svg(parts, words, [(SUPPORT, "s1"), (WHOLE, "s2")])


def version_bars(rows: Rows) -> Markup:
    """Mean |log_ratio| by the weights that sampled, oldest first."""
    top = max(row["mean"] for row in rows) or 1e-9
    axes = Axes(0, len(rows), top * 1.08)
    parts = [*_y_axis(axes, "mean |log_ratio| (nats)", _short)]
    room = axes.x(1) - axes.x(0)
    wide = min(40.0, room * 0.7)
    every = math.ceil(56 / room)
    for i, row in enumerate(rows):
        middle = axes.x(i + 0.5)
        parts.append(_bar(middle - wide / 2, axes.y(row["mean"]), wide, axes.y(0), "s1"))
        if i % every == 0:
            name = row["version"]
            label = name if len(name) <= 9 else f"{name[:8]}…"
            parts.append(_text(middle, HEIGHT - BOTTOM + 16, label, "middle"))
    parts.append(_x_label("weight version"))
    return _svg(parts, "Mean |log_ratio| by weight version", [(SUPPORT, "s1")])


def share_bar(classes: Mapping[str, int]) -> Markup:
    """One bar split by class; the last class, the worst, in the colour of faults."""
    total = sum(classes.values())
    if not total:
        return _nothing("nothing audited")
    series = ["s1", "s3", "s2", "s4"][-len(classes) :] if len(classes) <= 4 else []
    series = series or ["s1"] * (len(classes) - 1) + ["s4"]
    parts, x = [], 0.0
    for (_, count), colour in zip(classes.items(), series, strict=True):
        wide = count / total * WIDTH
        parts.append(
            f'<rect class="fill {colour}" x="{x:.1f}" y="0" width="{wide:.1f}" height="14"/>'
        )
        x += wide
    keys = [
        (f"{name} {count:,} ({count / total:.1%})", colour)
        for (name, count), colour in zip(classes.items(), series, strict=True)
    ]
    return _svg(parts, "Audited supports by class", keys, height=14)


def span(row: dict[str, Any]) -> str:
    """The values of an integer bin in words."""
    return f"{row['from']}" if row["from"] == row["to"] else f"{row['from']}–{row['to']}"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round values from `low` to `high`, about as many as asked for."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _y_axis(axes: Axes, label: str, form: Callable[[float], str]) -> list[str]:
    parts = [_y_label(label)]
    for value in ticks(0, axes.y1, 4):
        y = axes.y(value)
        kind = "base" if value == 0 else "grid"
        parts.append(
            f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(_text(LEFT - 8, y + 4, form(value), "end"))
    return parts


def _decades(axes: Axes) -> list[str]:
    first, last = math.ceil(axes.x0 - 1e-9), math.floor(axes.x1 + 1e-9)
    every = math.ceil((last - first + 1) / 8)
    return [
        _text(axes.x(i), HEIGHT - BOTTOM + 16, _power(i), "middle")
        for i in range(first, last + 1, every)
    ]


def _power(exponent: int) -> str:
    return f"{10.0**exponent:g}" if -4 < exponent < 3 else f"1e{exponent}"


def _short(value: float) -> str:
    return f"{value:.3g}"


def _bar(x: float, y: float, width: float, base: float, series: str) -> str:
    tall = max(base - y, 0)
    return (
        f'<rect class="bar {series}" x="{x:.1f}" y="{y:.1f}" '
        f'width="{width:.1f}" height="{tall:.1f}"/>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _x_label(text: str) -> str:
    return _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, text, "middle")


def _y_label(text: str) -> str:
    y = (TOP + HEIGHT - BOTTOM) / 2
    place = f'x="14" y="{y:.0f}" transform="rotate(-90 14 {y:.0f})"'
    return f'<text {place} text-anchor="middle">{escape(text)}</text>'


def _svg(
    parts: Sequence[str], words: str, legend: Sequence[tuple[str, str]], height: int = HEIGHT
) -> Markup:
    keys = "".join(
        f'<span class="key"><i class="{series}"></i>{escape(label)}</span>'
        for label, series in legend
    )
    drawing = "".join(parts)
    return Markup(
        f'<p class="legend">{keys}</p><svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(words)}">{drawing}</svg>'
    )


def _nothing(why: str) -> Markup:
    return Markup('<p class="nothing">{}</p>').format(why)

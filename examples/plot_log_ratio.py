"""Draw |log_ratio| with and without the recorded supports, from the report of a replay, as SVG.

python examples/plot_log_ratio.py runs/first/reports/<id> picture.svg
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
import pyarrow as pa

BINS = np.linspace(0, 1, 41)
WIDTH, HEIGHT, LEFT, TOP, BASE = 720, 300, 60, 56, 244
SERIES = (("over the recorded support", "#2a78b5"), ("whole vocabulary", "#d1702a"))


def main(report: Path, picture: Path) -> None:
    with pa.memory_map(str(report / "tokens.arrow")) as source:
        tokens = pa.ipc.open_stream(source).read_all()
    sampled = tokens["sampling_logprobs"].to_numpy()
    ratios = [
        tokens[name].to_numpy() - sampled for name in ("replay_logprobs", "replay_full_logprobs")
    ]
    picture.write_text(draw([np.abs(r[np.isfinite(r)]) for r in ratios]))


def draw(sizes: list[np.ndarray]) -> str:
    """Two overlaid step histograms of shares, on a logarithmic axis from 0.05 % to 100 %."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#333">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="15">|log_ratio| per token: trainer - engine</text>',
    ]
    for share in (1.0, 0.1, 0.01, 0.001):
        y = height(share)
        lines.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        )
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{share:.1%}</text>')
    for index, (size, (label, colour)) in enumerate(zip(sizes, SERIES, strict=True)):
        counts, _ = np.histogram(np.minimum(size, BINS[-1]), BINS)
        lines.append(steps(counts / counts.sum(), colour))
        text = escape(f"{label}: mean {size.mean():.3f} nats over {len(size):,} tokens")
        place = f'x="{WIDTH - 20}" y="{TOP + 12 + 18 * index}" text-anchor="end"'
        lines.append(f'<text {place} fill="{colour}">{text}</text>')
    for tick in np.linspace(0, 1, 6):
        x = position(tick)
        label = f"{tick:.1f}" if tick < 1 else "1 and above"
        lines.append(f'<text x="{x:.1f}" y="{BASE + 20}" text-anchor="middle">{label}</text>')
    lines.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">nats</text></svg>')
    return "\n".join(lines) + "\n"


def steps(shares: np.ndarray, colour: str) -> str:
    path = [f"M{position(0):.1f},{BASE}"]
    for share, left, right in zip(shares, BINS[:-1], BINS[1:], strict=True):
        y = height(share) if share else BASE
        path.append(f"L{position(left):.1f},{y:.1f}L{position(right):.1f},{y:.1f}")
    path.append(f"L{position(1):.1f},{BASE}Z")
    return f'<path d="{"".join(path)}" fill="{colour}" fill-opacity="0.35" stroke="{colour}"/>'


def position(value: float) -> float:
    return LEFT + value * (WIDTH - 20 - LEFT - 40)


def height(share: float) -> float:
    return float(TOP + (BASE - TOP) * -np.log10(max(share, 5e-4)) / -np.log10(5e-4))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

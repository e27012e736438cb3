"""Draws how three causes look, docs/images/causes.svg, from seeded faults: `make images`.

python tests/draw_causes.py MODEL      MODEL is the folder of SmolLM2-135M-Instruct
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
from builders import RECORDED, recorded_lines
from fault_injector import declared_temperature, full_stored_for_every_id, in_some, softcapped
from numpy.typing import NDArray
from scorer import Scorer

from replay import Policy
from replay.evidence import Evidence
from rollout.adapters.sglang_jsonl import parse_line

IMAGE = Path(__file__).parent.parent / "docs" / "images" / "causes.svg"
WIDTH, SIDE, LEFT, TOP, POINTS = 860, 230, 46, 70, 350
Floats = NDArray[np.float64]


def below_the_largest(e: Evidence) -> tuple[Floats, Floats]:
    """Both sides' logits / T, relative to the id that the policy finds likeliest."""
    starts = e.support.offsets[:-1]
    top = np.maximum.reduceat(e.replay_support, starts)[e.rows]
    is_top = e.replay_support == top
    of_engine = np.zeros(len(e))
    of_engine[e.rows[is_top]] = e.support_logprobs[is_top]
    return e.replay_support - top, e.support_logprobs - of_engine[e.rows]


def as_they_are(e: Evidence) -> tuple[Floats, Floats]:
    return e.replay_support, e.support_logprobs


def panel(title: str, axis: str, x: Floats, y: Floats, left: float, low: float) -> list[str]:
    def place(value: float) -> float:
        return SIDE * (value - low) / -low

    lines = [
        f'<text x="{left}" y="{TOP - 10}" font-weight="bold">{escape(title)}</text>',
        f'<rect x="{left}" y="{TOP}" width="{SIDE}" height="{SIDE}" fill="none" stroke="#bbb"/>',
        f'<line x1="{left}" y1="{TOP + SIDE}" x2="{left + SIDE}" y2="{TOP}" stroke="#d1702a"/>',
        f'<text x="{left + SIDE / 2}" y="{TOP + SIDE + 32}" text-anchor="middle">'
        f"{escape(axis)}</text>",
    ]
    for value in (low, low / 2, 0):
        lines.append(
            f'<text x="{left + place(value):.1f}" y="{TOP + SIDE + 16}" text-anchor="middle">'
            f"{value:g}</text>"
            f'<text x="{left - 6}" y="{TOP + SIDE - place(value) + 4:.1f}" text-anchor="end">'
            f"{value:g}</text>"
        )
    inside = np.flatnonzero((x > low) & (y > low) & (x <= 0) & (y <= 0))
    for i in inside[np.linspace(0, len(inside) - 1, min(POINTS, len(inside))).astype(int)]:
        cx, cy = left + place(x[i]), TOP + SIDE - place(y[i])
        lines.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="1.6"/>')
    return lines


def main(model: Path) -> None:
    lines = recorded_lines(RECORDED[2])
    rollouts = [parse_line(json.dumps(line).encode(), str(i)) for i, line in enumerate(lines)]
    scorer = Scorer(Policy.load(str(model), dtype="bfloat16", device="cpu", packed=False))
    capped = scorer.with_policy(softcapped(30.0)(scorer.policy))
    panels = [
        (
            "temperature_other: a slope",
            "nats below the likeliest id, policy",
            below_the_largest(scorer.evidence(in_some(declared_temperature(1.2))(rollouts))),
            -6.0,
        ),
        (
            "softcap: no single slope",
            "nats below the likeliest id, policy",
            below_the_largest(capped.evidence(rollouts)),
            -6.0,
        ),
        (
            "full_logprobs_stored: a gap",
            "logprob over the support, policy",
            as_they_are(scorer.evidence(in_some(full_stored_for_every_id)(rollouts))),
            -6.0,
        ),
    ]
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {TOP + SIDE + 44}" '
        'font-family="sans-serif" font-size="12" fill="#333">',
        f'<rect width="{WIDTH}" height="{TOP + SIDE + 44}" fill="white"/>',
        '<text x="20" y="24" font-size="15">Ids of supports: the engine (up) against the policy'
        "</text>",
        '<text x="20" y="42">SmolLM2-135M, seeded faults; on the line both sides agree</text>',
    ]
    for i, (title, axis, (x, y), low) in enumerate(panels):
        drawn += panel(title, axis, x, y, LEFT + i * (SIDE + 44), low)
    IMAGE.write_text("\n".join([*drawn, "</svg>"]) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

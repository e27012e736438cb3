"""Draws how causes look, docs/images/causes.svg, from seeded faults: `make images`.

python tests/draw_causes.py MODEL      MODEL is the folder of SmolLM2-135M-Instruct
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
from builders import RECORDED, recorded_rollouts
from fault_cases import CASES
from numpy.typing import NDArray
from scorer import Scorer

from replay import Policy
from replay.evidence import Evidence

IMAGE = Path(__file__).parent.parent / "docs" / "images" / "causes.svg"
WIDTH, SIDE, LEFT, TOP, POINTS = 900, 168, 46, 92, 250
ACROSS, LOW = 4, -6.0
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


PANELS = (
    ("nothing", "on the line", as_they_are),
    ("T ignored", "slopes T", below_the_largest),
    ("T doubled", "slopes 1/T", below_the_largest),
    ("T off by 20 %", "one slope", below_the_largest),
    ("full stored for every id", "a gap", as_they_are),
    ("supports shifted", "no relation", as_they_are),
    ("softcap 30", "no single slope", below_the_largest),
    ("penalty 0.5", "some ids leave the line", as_they_are),
    ("bias +1", "one id leaves the line", as_they_are),
    ("body noise 5 %", "wide", as_they_are),
    ("BOS not recorded", "wide, first tokens most", as_they_are),
    ("support cut to 8", "the policy has too much", as_they_are),
)


def panel(code: str, look: str, x: Floats, y: Floats, left: float, top: float) -> list[str]:
    def place(value: float) -> float:
        return SIDE * (value - LOW) / -LOW

    lines = [
        f'<text x="{left}" y="{top - 20}" font-weight="bold">{escape(code)}</text>',
        f'<text x="{left}" y="{top - 6}">{escape(look)}</text>',
        f'<rect x="{left}" y="{top}" width="{SIDE}" height="{SIDE}" fill="none" stroke="#bbb"/>',
        f'<line x1="{left}" y1="{top + SIDE}" x2="{left + SIDE}" y2="{top}" stroke="#d1702a"/>',
    ]
    for value in (LOW, LOW / 2, 0):
        lines.append(
            f'<text x="{left + place(value):.1f}" y="{top + SIDE + 14}" text-anchor="middle">'
            f"{value:g}</text>"
            f'<text x="{left - 6}" y="{top + SIDE - place(value) + 4:.1f}" text-anchor="end">'
            f"{value:g}</text>"
        )
    inside = np.flatnonzero((x > LOW) & (y > LOW) & (x <= 0) & (y <= 0))
    for i in inside[np.linspace(0, len(inside) - 1, min(POINTS, len(inside))).astype(int)]:
        cx, cy = left + place(x[i]), top + SIDE - place(y[i])
        lines.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="1.4"/>')
    return lines


def main(model: Path) -> None:
    rollouts = recorded_rollouts(RECORDED[2])
    scorer = Scorer(Policy.load(str(model), dtype="bfloat16", device="cpu", packed=False))
    cases = {case.name: case for case in CASES}
    height = TOP + -(-len(PANELS) // ACROSS) * (SIDE + 58)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="11" fill="#333">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        '<text x="20" y="24" font-size="15">Ids of supports: the engine (up) against the policy, '
        "in nats</text>",
        '<text x="20" y="42">SmolLM2-135M, seeded faults; on the line both sides agree. Slopes are '
        "drawn below the likeliest id.</text>",
    ]
    for i, (name, look, view) in enumerate(PANELS):
        case = cases[name]
        asked = scorer if case.policy is None else scorer.with_policy(case.policy(scorer.policy))
        x, y = view(asked.evidence(case.inject(rollouts)))
        left, top = LEFT + i % ACROSS * (SIDE + 48), TOP + i // ACROSS * (SIDE + 58)
        drawn += panel(case.code, look, x, y, left, top)
    IMAGE.write_text("\n".join([*drawn, "</svg>"]) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

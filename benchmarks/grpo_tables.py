"""Tables of the arms of examples/grpo, as Markdown.

python benchmarks/grpo_tables.py docs/data/grpo
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from grpo_curves import ARMS, Steps, read

LAST = 10  # steps that the reward and the entropy at the end are means of
WARM = 5  # steps left out of times: they compile
TIMES = ("engine_s", "replay_s", "update_s", "transfer_s")


def column(steps: Steps, name: str) -> np.ndarray:
    return np.array([step[name] for step in steps])


def result(label: str, seed: int, steps: Steps) -> str:
    """What both sides said of the steps, and where the arm got."""
    ratio = column(steps, "ratio_mean")
    off = np.abs(ratio - 1).max()
    from_mass, clean = "-", "-"
    if "kept_mass" in steps[0]:
        from_mass = f"{np.abs(ratio - column(steps, 'kept_mass')).max():.4f}"
        clean = f"{(column(steps, 'diagnosis') == 'clean').sum()} of {len(steps)}"
    reward, entropy = (column(steps, name)[-LAST:].mean() for name in ("reward", "entropy"))
    means = [column(steps, name).mean() for name in ("mismatch_kl", "ratio_std", "share_clipped")]
    return (
        f"| {label} | {seed} | {len(steps)} | {ratio[0]:.3f} to {ratio[-1]:.3f} | {off:.4f} "
        f"| {from_mass} | {clean} | {means[0]:.4f} | {means[1]:.3f} | {means[2]:.3f} "
        f"| {entropy:.2f} | {reward:.2f} |"
    )


def times(label: str, seed: int, steps: Steps) -> str:
    """Medians of the seconds of a step, and the share that the update waited for batches."""
    seconds = [f"{np.median(column(steps[WARM:], name)):.2f}" for name in TIMES]
    whole = sum(column(steps[WARM:], name) for name in TIMES)
    waiting = np.max(column(steps[WARM:], "waiting_s") / whole)
    tokens = np.median(column(steps[WARM:], "tokens"))
    return f"| {label} | {seed} | {tokens:.0f} | {' | '.join(seconds)} | {100 * waiting:.2f} % |"


def main(folder: Path) -> None:
    rows = [
        (ARMS[arm][0], n, x) for arm, seeds in read(folder).items() for n, x in enumerate(seeds)
    ]
    print(
        "| arm | seed | steps | ratio, first to last step | farthest from 1 | from the kept mass "
        "| clean | mismatch_kl | ratio's deviation | clipped | entropy, last 10 | reward, last 10 |"
    )
    print("|" + "---|" * 12)
    print("\n".join(result(*row) for row in rows))
    print("\n| arm | seed | tokens | engine | replay | update | transfer | waiting, at most |")
    print("|" + "---|" * 8)
    print("\n".join(times(*row) for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

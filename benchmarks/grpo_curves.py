"""Curves of the arms of examples/grpo, as one SVG.

python benchmarks/grpo_curves.py docs/data/grpo docs/images/grpo.svg

The folder holds a metrics.jsonl of each arm and seed, named ARM-SEED.jsonl. Thin lines are steps,
thick ones means of five; each seed has a line of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("svg")
from matplotlib import pyplot as plt

ARMS = {
    "supports": ("truncated, supports replayed", "#1f6fb4"),
    "full": ("truncated, whole vocabulary", "#d1495b"),
    "untruncated": ("untruncated", "#6b7a8f"),
}
PANELS = {
    "reward": "reward",
    "ratio_mean": "importance ratio before the update, mean",
    "ratio_std": "importance ratio, standard deviation",
    "mismatch_kl": "mismatch_kl, nats",
    "share_clipped": "share of clipped tokens",
    "entropy": "entropy over the vocabulary, nats",
}
WINDOW = 5  # steps of a mean
Steps = list[dict[str, Any]]


def read(folder: Path) -> dict[str, list[Steps]]:
    """The steps of each seed, by arm."""
    return {
        arm: [
            [json.loads(line) for line in path.read_text().splitlines()]
            for path in sorted(folder.glob(f"{arm}-*.jsonl"))
        ]
        for arm in ARMS
    }


def main(folder: Path, svg: Path) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "grpo", "font.size": 9}
    arms = read(folder)
    figure, axes = plt.subplots(2, 3, figsize=(11, 5.6), layout="constrained")
    for axis, (name, title) in zip(axes.flat, PANELS.items(), strict=True):
        for arm, seeds in arms.items():
            label, colour = ARMS[arm]
            for number, steps in enumerate(seeds):
                values = np.array([step[name] for step in steps])
                axis.plot(values, color=colour, linewidth=0.6, alpha=0.35)
                smooth = np.convolve(values, np.full(WINDOW, 1 / WINDOW), "valid")
                at = np.arange(len(smooth)) + WINDOW // 2
                axis.plot(at, smooth, color=colour, label=label if number == 0 else None)
        axis.set_title(title, fontsize=9.5, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#eee")
    for axis in axes[1]:
        axis.set_xlabel("step")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(ARMS), frameon=False)
    figure.savefig(svg, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

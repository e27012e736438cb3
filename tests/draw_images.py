"""Draws the pictures of the page in docs/images from a recorded set: `make images`.

python tests/draw_images.py MODEL      MODEL is the folder of SmolLM2-135M-Instruct
"""

from __future__ import annotations

import gzip
import os
import sys
import tempfile
from pathlib import Path

from browser import Browser
from builders import DATA

from replay import replay_run
from rollout.adapters.sglang_jsonl import import_sglang_jsonl

SET = "sglang_0.5.21_h200_flashinfer"
IMAGES = Path(__file__).parent.parent / "docs" / "images"
SHARP = 1.5  # pixels of a picture per pixel of the page


def main(model: Path) -> None:
    """report.png, the top of the page; report_token.png, strips and the card of a token."""
    model = model.resolve()
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "rollouts.jsonl"
        lines.write_bytes(gzip.decompress((DATA / SET / "rollouts.jsonl.gz").read_bytes()))
        run = Path(folder) / SET
        import_sglang_jsonl(lines, run)
        os.chdir(model.parent)  # the page shows the model as it was named
        _, report = replay_run(run, model.name)
        with Browser(width=1120, height=1080) as browser:
            browser.open(report / "report.html")
            browser.screenshot(IMAGES / "report.png", SHARP)
        with Browser(width=1120, height=740) as browser:
            browser.open(report / "report.html")
            browser.choose("#order", "length")
            browser.ask("document.querySelector('#controls').scrollIntoView()")
            browser.click(".rollout:nth-child(2) .t.n2")  # kept: a card of the pointer would go
            browser.screenshot(IMAGES / "report_token.png", SHARP)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

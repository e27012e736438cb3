"""How many steps an engine may be behind before its runs show it.

python benchmarks/grpo_behind.py runs/grpo/supports
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from replay import Policy, ReplayConfig, make_report, verify
from replay.job import resolve_device
from rollout import open_run

BEHIND = (1, 2, 3, 4, 6, 8, 16, 32, 48)


def main(out: Path) -> None:
    """A line of JSON for each number of steps that OUT has runs of.

    The noise is what both sides were apart with the same weights, when the run was sampled.
    """
    runs = sorted(out.glob("step-*"))
    lines = (out / "metrics.jsonl").read_text().splitlines()
    noise = [json.loads(line)["log_ratio_abs_mean"] for line in lines]
    device = resolve_device("auto")
    policy = Policy.load(str(out / "checkpoint"), dtype="float32", device=device)
    config = ReplayConfig(audit_tokens=0)
    for behind in BEHIND[: np.searchsorted(BEHIND, len(runs), side="right")]:
        verified = verify(open_run(runs[-behind]), policy, config)
        report = make_report(verified, config.gates, policy.description)
        first = report.diagnoses[0]
        apart = float(np.abs(verified.tokens.log_ratio).mean())
        facts = {
            "steps_behind": behind,
            "log_ratio_abs_mean": apart,
            "times_the_noise": apart / noise[-behind],
            "over_noise_floor": first.evidence.get("over_noise_floor"),
            "verdict": report.verdict,
            "diagnosis": first.code,
            "sentence": first.sentence,
        }
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

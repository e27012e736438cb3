"""How many updates an engine may be behind before its runs show it.

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

BEHIND = (1, 2, 4, 8, 16, 32, 48)


def main(out: Path) -> None:
    """A line of JSON for each number of updates that OUT has runs of."""
    runs = sorted(out.glob("step-*"))
    device = resolve_device("auto")
    policy = Policy.load(str(out / "checkpoint"), dtype="float32", device=device)
    config = ReplayConfig(audit_tokens=0)
    for behind in BEHIND[: np.searchsorted(BEHIND, len(runs), side="right")]:
        verified = verify(open_run(runs[-behind]), policy, config)
        report = make_report(verified, config.gates, policy.description)
        first = report.diagnoses[0]
        facts = {
            "updates_behind": behind,
            "log_ratio_abs_mean": float(np.abs(verified.tokens.log_ratio).mean()),
            "over_noise_floor": first.evidence.get("over_noise_floor"),
            "verdict": report.verdict,
            "diagnosis": first.code,
            "sentence": first.sentence,
        }
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

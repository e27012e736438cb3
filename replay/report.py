"""Report: the numbers of a replay, the gates, and the verdict. Keys are documented in docs/."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.config import GatesConfig
from replay.metrics import ratio_numbers, trainer_metrics
from replay.verify import Finding, Verified
from rollout.diagnosis import CLEAN, Diagnosis
from rollout.stats import support_sizes

CONSISTENT, INCONSISTENT = "consistent", "inconsistent"


@dataclass(frozen=True)
class Gate:
    """One limit of the verdict; `value` is None where it could not be measured."""

    name: str
    value: float | None
    limit: float

    @property
    def passed(self) -> bool:
        # a NaN never passes: comparisons with it are false
        return self.value is None or self.value <= self.limit


@dataclass(frozen=True)
class Report:
    """What a replay found; `as_dict` is summary.json."""

    numbers: dict[str, Any]
    gates: tuple[Gate, ...]
    findings: tuple[Finding, ...]
    precision: dict[str, str]
    diagnoses: tuple[Diagnosis, ...] = ()
    audit: dict[str, Any] | None = None  # of the supports, where it was asked for
    engine: dict[str, Any] | None = None  # what the recorded numbers say about the engine

    @property
    def faults(self) -> tuple[Diagnosis, ...]:
        """The diagnoses that are not `clean`."""
        return tuple(d for d in self.diagnoses if d.code != CLEAN)

    @property
    def failed_gates(self) -> tuple[Gate, ...]:
        return tuple(gate for gate in self.gates if not gate.passed)

    @property
    def verdict(self) -> str:
        wrong = self.findings or self.failed_gates or self.faults
        return INCONSISTENT if wrong else CONSISTENT

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; numbers that could not be measured are None."""
        return {
            "verdict": self.verdict,
            "diagnoses": [d.as_dict() for d in self.diagnoses],
            "findings": [asdict(finding) for finding in self.findings],
            "failed_gates": [gate.name for gate in self.failed_gates],
            "gates": {gate.name: {"value": gate.value, "limit": gate.limit} for gate in self.gates},
            **self.numbers,
            "engine_check": self.engine,
            "audit": self.audit,
            "precision": self.precision,
        }


def make_report(verified: Verified, gates: GatesConfig, precision: dict[str, str]) -> Report:
    """Measure and judge. Means are over every token that both sides scored, singletons included."""
    numbers, audit = measure(verified), verified.audit
    values = {
        "log_ratio_abs_mean": numbers["log_ratio_abs"]["mean"],
        "log_ratio_abs_p99": numbers["log_ratio_abs"]["p99"],
        "mismatch_kl": numbers["mismatch_kl"],
        "support_kl": numbers["support_kl"],
        "audit_inconsistent": None if audit is None else audit.inconsistent_at_least,
    }
    judged = tuple(Gate(name, values[name], limit) for name, limit in gates.model_dump().items())
    told = None if audit is None else audit.as_dict()
    engine = None if verified.engine is None else verified.engine.as_dict()
    return Report(numbers, judged, verified.findings, precision, verified.diagnoses, told, engine)


def measure(verified: Verified) -> dict[str, Any]:
    """The numbers of summary.json."""
    tokens = verified.tokens
    scored = np.isfinite(tokens.log_ratio)
    return {
        "rollouts": verified.rollouts,
        "tokens": len(tokens),
        "scored_tokens": int(scored.sum()),
        "sampled_outside_support": int(np.isneginf(tokens.replay_logprobs).sum()),
        **ratio_numbers(tokens.log_ratio[scored]),
        "support_kl": _mean(tokens.support_kl[scored]),
        "noise_floor": None if verified.evidence is None else _mean(verified.evidence.floor),
        "kept_mass": _mean(tokens.kept_mass[scored]),
        "replay_kept_mass": _mean(tokens.replay_kept_mass[scored]),
        "without_support": ratio_numbers(tokens.log_ratio_without_support[scored]),
        "support_size": support_sizes(tokens.support_size, tokens.top_k),
        "metrics": trainer_metrics(tokens),
    }


def _mean(values: NDArray[np.floating]) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.astype(np.float64).mean()) if len(known) else None

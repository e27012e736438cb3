"""What is said about a report, once: the page, `--md` and the table on screen only lay it out.

All of it comes from summary.json (`Report.as_dict()`), as data without markup.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from replay.report import CONSISTENT
from rollout.diagnosis import CLEAN
from rollout.words import Facts, counts_in_words, engine_facts, label, number_of, plain

LABELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("mean |log_ratio|", ("log_ratio_abs", "mean")),
    ("p50", ("log_ratio_abs", "p50")),
    ("p99", ("log_ratio_abs", "p99")),
    ("max", ("log_ratio_abs", "max")),
    ("mean log_ratio", ("log_ratio", "mean")),
    ("mismatch_kl", ("mismatch_kl",)),
    ("ratio outside [0.9, 1.1]", ("ratio_outside",)),
)
NUMBERS_HEAD = ("per token, in nats", "over the support", "whole vocabulary")
GATES_HEAD = ("gate", "value", "limit", "")
NATS = ("log_ratio_abs_mean", "log_ratio_abs_p99", "mismatch_kl", "support_kl")  # gates
ADVICE = "what to do"


@dataclass(frozen=True)
class Reason:
    """One line of what the verdict rests on; `kind` is diagnosis, finding, gate or clean."""

    kind: str
    code: str
    text: str
    facts: tuple[tuple[str, str], ...] = ()

    @property
    def head(self) -> str:
        """A diagnosis goes by its code alone."""
        return f"{self.kind} {self.code}" if self.kind in ("finding", "gate") else self.code


def verdict_words(summary: Mapping[str, Any]) -> tuple[str, str]:
    """PASS or FAIL, and the verdict."""
    verdict = str(summary["verdict"])
    return "PASS" if verdict == CONSISTENT else "FAIL", verdict


def reasons_of(summary: Mapping[str, Any]) -> list[Reason]:
    """Diagnoses, which explain, then findings, then failed gates; `clean` where none is broken.

    Where content rules are broken nothing is said to be clean. Where only gates failed it is: the
    limits are tighter than the precision of this run.
    """
    diagnoses = summary["diagnoses"]
    reasons = [_diagnosis(entry) for entry in diagnoses if entry["code"] != CLEAN]
    for finding in summary["findings"]:
        tokens, rollouts = finding["count"], finding["rollouts"]
        words = f"{number_of(tokens, 'token')} in {number_of(rollouts, 'rollout')}"
        words += f"; first {finding['first']}"
        reasons.append(Reason("finding", finding["code"], words))
    for name in summary["failed_gates"]:
        gate = summary["gates"][name]
        unit = " nats" if name in NATS else ""
        words = f"{gate['value']:.4g} is above {gate['limit']:g}{unit}"
        reasons.append(Reason("gate", name, words))
    clean = [entry["sentence"] for entry in diagnoses if entry["code"] == CLEAN]
    if not reasons:
        scored = number_of(summary["scored_tokens"], "scored token")
        clean.append(f"No finding in {scored}, and every gate passes.")
    if clean and not summary["findings"]:
        reasons.append(Reason(CLEAN, CLEAN, " ".join(clean)))
    return reasons


def _diagnosis(entry: Mapping[str, Any]) -> Reason:
    also = ", ".join(entry["also"])
    scope = {k: v for k, v in entry["scope"].items() if k not in ("kind", "where")}
    facts = [
        (ADVICE, entry["advice"]),
        ("also", also and f"{also} (the same data, or what follows from it)"),
        ("evidence", plain(entry["evidence"])),
        ("scope", plain(scope)),
    ]
    said = tuple(fact for fact in facts if fact[1])
    return Reason("diagnosis", entry["code"], entry["sentence"], said)


def number_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Under `NUMBERS_HEAD`."""
    without = summary["without_support"]
    rows = [(name, _at(summary, path), _at(without, path)) for name, path in LABELS]
    return [*rows, ("support_kl (exact)", _at(summary, ("support_kl",)), "")]


def gate_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Under `GATES_HEAD`; the last cell is "passes", "above the limit" or "not measured"."""
    rows = []
    for name, gate in summary["gates"].items():
        words = "above the limit" if name in summary["failed_gates"] else "passes"
        known = gate["value"] is not None
        value = f"{gate['value']:.4g}" if known else "-"
        rows.append((name, value, f"{gate['limit']:g}", words if known else "not measured"))
    return rows


def facts_of(summary: Mapping[str, Any]) -> Facts:
    """What was measured, in which precision, and what engine and supports look like."""
    sizes, outside = summary["support_size"], summary["sampled_outside_support"]
    floor = summary["noise_floor"]
    facts = [
        (
            "tokens scored",
            f"{summary['scored_tokens']:,} of {summary['tokens']:,} in "
            f"{number_of(summary['rollouts'], 'rollout')}",
        ),
        ("sampled outside support", number_of(outside, "token") if outside else ""),
        (
            "kept mass, engine / trainer",
            f"{_number(summary['kept_mass'])} / {_number(summary['replay_kept_mass'])}",
        ),
        (
            "support size",
            f"mean {sizes['mean']:.1f}, max {sizes['max']:,}, {sizes['singletons']:,} singletons, "
            f"{sizes['above_top_k']:,} above top_k",
        ),
        (
            "noise floor",
            "not measured" if floor is None else f"{floor:.4g} nats, which bfloat16 explains",
        ),
        ("precision", ", ".join(f"{key} {value}" for key, value in summary["precision"].items())),
        *(engine_facts(summary["engine_check"]) if summary["engine_check"] else ()),
        *(audit_facts(summary["audit"]) if summary["audit"] else ()),
    ]
    return [fact for fact in facts if fact[1]]


def audit_facts(audit: Mapping[str, Any]) -> Facts:
    """What the audit of the supports found, and what it left out."""
    if not audit["tokens"]:
        return [("support audit", "no token that could be audited")]
    tolerance, words = audit["tolerance"], []
    partial = sum(count["tokens"] for count in audit["without_prefix_and_mass"].values())
    if partial:
        settings = ", ".join(audit["without_prefix_and_mass"])
        words.append(f"{partial:,} without prefix and mass ({settings})")
    skipped = sum(count["tokens"] for count in audit["skipped"].values())
    if skipped:
        words.append(f"{skipped:,} skipped ({', '.join(audit['skipped'])})")
    if audit["repair_fingerprints"]:
        words.append(f"{audit['repair_fingerprints']:,} explained without the drawn token")
    found = counts_in_words(audit["classes"])
    limit = f"{tolerance['logits']:.3g} logits, from {tolerance['source']}"
    return [
        ("support audit", f"{found} of {number_of(audit['tokens'], 'token')}"),
        ("audit tolerance", "; ".join([limit, *words])),
    ]


def run_facts(run: Mapping[str, Any]) -> Facts:
    """What a run says about itself (`rollout.inspection.view_run`)."""
    return [(label(name), str(value)) for name, value in run.items()]


def _at(numbers: Mapping[str, Any], path: tuple[str, ...]) -> str:
    value: Any = numbers
    for key in path:
        value = value[key]
    return _number(value)


def _number(value: float | None) -> str:
    return "not recorded" if value is None else f"{value:.4g}"

"""What is said about a report: exact words, the same on the page, in Markdown and on screen."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from pages import synthetic

from cli.tables import print_report
from replay import GatesConfig, Verified, make_report
from replay.audit_tables import audit_section
from replay.html import render_page
from replay.markdown import markdown
from replay.report import Report
from replay.sections import Reason, facts_of, gate_rows, number_rows, reasons_of, verdict_words
from replay.verify import Finding
from rollout.diagnosis import CLEAN, Diagnosis
from rollout.self_check import check_engine

DIAGNOSIS = Diagnosis(
    code="temperature_other",
    scope={"kind": "rollouts", "where": "In 2 of 3 rollouts", "rollouts": 2, "first": ["0:0"]},
    sentence="In 2 of 3 rollouts, the engine sampled at temperature 0.5.",
    evidence={"logit_factor": 0.95238, "tokens": 48},
    advice="record the temperature that was used",
    also=("logit_scale", "other_weights"),
)
HONEST = Diagnosis(CLEAN, {"kind": "all", "where": "In every rollout"}, "Honest numerics.")
FINDING = Finding("duplicate_ids", 1, 1, "0:0: output token 3: its support holds an id twice")
AUDIT = {
    "tokens": 1000,
    "of": 2000,
    "classes": {"robust": 900, "consistent": 90, "explainable": 8, "inconsistent": 2},
    "inconsistent": 0.002,
    "inconsistent_at_least": 0.0001,
    "tolerance": {"logits": 0.31234, "source": "support_logprobs", "tokens": 800},
    "without_prefix_and_mass": {"regex": {"rollouts": 1, "tokens": 40}},
    "skipped": {"duplicate_ids": {"rollouts": 1, "tokens": 1}},
    "repair_fingerprints": 1,
    "worst": [{"rollout_id": "1:0", "eps": None}],
}


@pytest.fixture(scope="module")
def made() -> Any:
    rollouts, verified, collector = synthetic(rollouts=2, tokens=20)
    return rollouts, replace(verified, engine=check_engine(rollouts)), collector


def report(verified: Verified, gates: GatesConfig | None = None, **changes: Any) -> Report:
    made = make_report(verified, gates or GatesConfig(), {"model": "m", "dtype": "bfloat16"})
    return replace(made, **changes)


def test_a_consistent_report_says_so_and_why(made: Any) -> None:
    summary = report(made[1], diagnoses=(HONEST,)).as_dict()
    assert verdict_words(summary) == ("PASS", "consistent")
    assert reasons_of(summary) == [
        Reason(
            "clean",
            "clean",
            "Honest numerics. No finding in 40 scored tokens, and every gate passes.",
        )
    ]


def test_reasons_are_diagnoses_then_findings_then_gates(made: Any) -> None:
    summary = report(
        made[1],
        GatesConfig(mismatch_kl=0, audit_inconsistent=0),
        diagnoses=(DIAGNOSIS,),
        findings=(FINDING,),
    ).as_dict()
    assert verdict_words(summary) == ("FAIL", "inconsistent")
    kl = f"{summary['mismatch_kl']:.4g}"
    assert reasons_of(summary) == [
        Reason(
            "diagnosis",
            "temperature_other",
            "In 2 of 3 rollouts, the engine sampled at temperature 0.5.",
            (
                ("what to do", "record the temperature that was used"),
                ("also", "logit_scale, other_weights (the same data, or what follows from it)"),
                ("evidence", "logit factor 0.9524, tokens 48"),
                ("scope", "rollouts 2, first 0:0"),
            ),
        ),
        Reason(
            "finding",
            "duplicate_ids",
            "1 token in 1 rollout; first 0:0: output token 3: its support holds an id twice",
        ),
        Reason("gate", "mismatch_kl", f"{kl} is above 0 nats"),
    ]


def test_a_failed_gate_alone_is_told_beside_the_clean_line(made: Any) -> None:
    summary = report(made[1], GatesConfig(mismatch_kl=0), diagnoses=(HONEST,)).as_dict()
    assert [(r.head, r.text) for r in reasons_of(summary)][1:] == [("clean", "Honest numerics.")]


def test_nothing_is_clean_beside_a_broken_rule(made: Any) -> None:
    summary = report(made[1], diagnoses=(HONEST,), findings=(FINDING,)).as_dict()
    assert [r.head for r in reasons_of(summary)] == ["finding duplicate_ids"]


def test_gates_say_whether_they_pass_or_were_not_measured(made: Any) -> None:
    summary = report(made[1], GatesConfig(mismatch_kl=0)).as_dict()
    rows = {name: (limit, words) for name, _, limit, words in gate_rows(summary)}
    assert rows == {
        "log_ratio_abs_mean": ("0.06", "passes"),
        "log_ratio_abs_p99": ("0.3", "passes"),
        "mismatch_kl": ("0", "above the limit"),
        "support_kl": ("0.005", "passes"),
        "audit_inconsistent": ("0.01", "not measured"),
    }
    assert next(row for row in gate_rows(summary) if row[3] == "not measured")[1] == "-"


def test_facts_in_words(made: Any) -> None:
    summary = report(made[1], audit=AUDIT).as_dict()
    summary |= {
        "noise_floor": 0.0123456,
        "kept_mass": 0.91,
        "replay_kept_mass": None,
        "rollouts": 1234,
        "tokens": 56789,
        "scored_tokens": 56788,
        "sampled_outside_support": 1,
        "support_size": {"mean": 8.24, "max": 1512, "singletons": 26000, "above_top_k": 7},
    }
    facts = facts_of(summary)
    assert [fact for fact in facts if "as seen" not in fact[0]] == [
        ("tokens scored", "56,788 of 56,789 in 1,234 rollouts"),
        ("sampled outside support", "1 token"),
        ("kept mass, engine / trainer", "0.91 / not recorded"),
        ("support size", "mean 8.2, max 1,512, 26,000 singletons, 7 above top_k"),
        ("noise floor", "0.01235 nats, which bfloat16 explains"),
        ("precision", "model m, dtype bfloat16"),
        (
            "support audit",
            "900 robust, 90 consistent, 8 explainable, 2 inconsistent of 1,000 tokens",
        ),
        (
            "audit tolerance",
            "0.312 logits, from support_logprobs; 40 without prefix and mass (regex); "
            "1 skipped (duplicate_ids); 1 explained without the drawn token",
        ),
    ]
    assert [label for label, _ in facts if "as seen" in label] == [
        "filter order, as seen",
        "ties at top_k, as seen",
        "head, as seen",
        "full logprobs, as seen",
    ]


def test_an_audit_of_nothing_is_one_line(made: Any) -> None:
    facts = facts_of(report(made[1], audit=AUDIT | {"tokens": 0}).as_dict())
    assert facts[-1] == ("support audit", "no token that could be audited")


def test_the_audit_of_the_page_adds_what_the_lines_leave_out() -> None:
    found = audit_section(AUDIT)
    assert found is not None
    assert [label for label, _ in found["facts"]] == [
        "support audit",
        "audit tolerance",
        "of",
        "inconsistent",
        "inconsistent at least",
        "repair fingerprints",
    ]
    assert [(t["title"], t["rows"]) for t in found["tables"]] == [("worst", [["1:0", "-"]])]
    assert audit_section(None) is None


class Text(HTMLParser):
    """What stands on a page outside of its scripts and style."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self._inside = "", ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.text += f" {data}"


def on_page(made: Any, found: Report) -> str:
    rollouts, verified, collector = made
    return Text(render_page(found.as_dict(), verified, rollouts, collector.strips())).text


def in_markdown(_: Any, found: Report) -> str:
    text = re.sub(r"&#(\d+);", lambda match: chr(int(match[1])), markdown(found.as_dict()))
    return text.replace("\\", "")


@pytest.mark.parametrize("view", ["page", "markdown", "screen"])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"diagnoses": (HONEST,), "audit": AUDIT}, id="clean"),
        pytest.param({"diagnoses": (DIAGNOSIS,), "findings": (FINDING,)}, id="faulty"),
        pytest.param({"diagnoses": (HONEST,), "gates": GatesConfig(mismatch_kl=0)}, id="gate"),
    ],
)
def test_every_view_says_all_of_it(
    view: str, changes: dict[str, Any], made: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = dict(changes)
    found = report(made[1], changes.pop("gates", None), **changes)
    if view == "screen":
        print_report(found)
        text = capsys.readouterr().out
    else:
        text = {"page": on_page, "markdown": in_markdown}[view](made, found)
    text = " ".join(text.split())
    summary = found.as_dict()
    for reason in reasons_of(summary):
        assert reason.head in text and reason.text in text
        for label, words in reason.facts:
            assert words in text
            assert label in text or view == "screen", "there, an arrow stands for what to do"
    for rows in (number_rows(summary), gate_rows(summary), facts_of(summary)):
        for row in rows:
            assert all(cell in text for cell in row), row


def test_on_screen_advice_follows_an_arrow_and_the_verdict_is_last(
    made: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    print_report(report(made[1], diagnoses=(DIAGNOSIS,), findings=(FINDING,)))
    assert capsys.readouterr().out.splitlines()[-7:] == [
        "temperature_other: In 2 of 3 rollouts, the engine sampled at temperature 0.5.",
        "  -> record the temperature that was used",
        "  also: logit_scale, other_weights (the same data, or what follows from it)",
        "  evidence: logit factor 0.9524, tokens 48",
        "  scope: rollouts 2, first 0:0",
        "finding duplicate_ids: 1 token in 1 rollout; first 0:0: output token 3: its support "
        "holds an id twice",
        "FAIL  inconsistent",
    ]


def test_in_markdown_facts_are_below_their_reason(made: Any) -> None:
    lines = markdown(report(made[1], diagnoses=(DIAGNOSIS,)).as_dict(), "a_run").splitlines()
    assert lines[:7] == [
        "### rollout replay: FAIL inconsistent (a_run)",
        "",
        "- **temperature_other**: In 2 of 3 rollouts, the engine sampled at temperature 0.5.",
        "  - what to do: record the temperature that was used",
        "  - also: logit_scale, other_weights (the same data, or what follows from it)",
        "  - evidence: logit factor 0.9524, tokens 48",
        "  - scope: rollouts 2, first 0:0",
    ]

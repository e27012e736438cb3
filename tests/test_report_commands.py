"""What CI gets: trainers' metric names, Markdown, `--fail-on`, `rollout diff`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from builders import make_rollout
from click.testing import CliRunner, Result
from pages import synthetic

from cli.fail_on import FailOn
from cli.main import cli
from replay import GatesConfig, ReplayConfig, make_report, replay_run
from replay.markdown import markdown
from replay.metrics import trainer_metrics
from replay.verify import Finding
from rollout import errors
from rollout.diff import Side, compare, load_side
from rollout.support import Support
from rollout.writer import RunWriter

GATES = list(GatesConfig.model_fields)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def test_trainers_find_their_own_numbers() -> None:
    """Against the formulas of each trainer, written out per rollout."""
    rollouts, verified, _ = synthetic(rollouts=3, tokens=40)
    got = trainer_metrics(verified.tokens)
    engine = [r.sampling_logprobs.astype(np.float64) for r in rollouts]
    trainer = np.split(verified.tokens.replay_logprobs.astype(np.float64), 3)
    ratio = np.concatenate(trainer) - np.concatenate(engine)
    gaps = [e.mean() - t.mean() for e, t in zip(engine, trainer, strict=True)]
    p, q = np.exp(np.concatenate(engine)), np.exp(np.concatenate(trainer))
    verl = {
        "rollout_corr/kl": -ratio.mean(),
        "rollout_corr/k3_kl": (np.exp(ratio) - ratio - 1).mean(),
        "rollout_corr/training_ppl": np.mean([np.exp(-t.mean()) for t in trainer]),
        "rollout_corr/rollout_ppl": np.mean([np.exp(-e.mean()) for e in engine]),
        "rollout_corr/log_ppl_diff": np.mean(gaps),
        "rollout_corr/log_ppl_abs_diff": np.mean(np.abs(gaps)),
        "rollout_corr/ppl_ratio": np.mean(np.exp(gaps)),
        "rollout_corr/chi2_token": (np.exp(ratio) ** 2).mean() - 1,
        "rollout_corr/chi2_seq": np.mean([np.exp(r.sum()) ** 2 for r in np.split(ratio, 3)]) - 1,
        "training/rollout_probs_diff_mean": np.abs(p - q).mean(),
        "training/rollout_probs_diff_max": np.abs(p - q).max(),
        "training/rollout_probs_diff_std": np.abs(p - q).std(ddof=1),
        "training/rollout_actor_probs_pearson_corr": np.corrcoef(p, q)[0, 1],
    }
    for name, value in verl.items():
        assert got["verl"][name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
    assert got["trl"]["sampling/sampling_logp_difference/mean"] == pytest.approx(
        np.abs(ratio).mean()
    )
    assert got["trl"]["sampling/importance_sampling_ratio/max"] == pytest.approx(
        np.exp(ratio).max()
    )
    assert got["prime_rl"]["mismatch_kl"] == pytest.approx(verl["rollout_corr/k3_kl"])


def test_metrics_of_nothing_are_null() -> None:
    _, verified, _ = synthetic(rollouts=1, tokens=4)
    scores = np.full(4, np.nan, np.float32)
    got = trainer_metrics(replace(verified.tokens, replay_logprobs=scores))
    assert {value for names in got.values() for value in names.values()} == {None}


def summary(**changes: Any) -> dict[str, Any]:
    _, verified, _ = synthetic(rollouts=2, tokens=20)
    return make_report(replace(verified, **changes), GatesConfig(), {}).as_dict()


HOSTILE = Finding("bad_code", 1, 1, "a|b <script>\n# [x](http://e) `c` @someone: text")


def test_markdown_is_a_verdict_and_two_tables() -> None:
    lines = markdown(summary(), "a_run").splitlines()
    assert lines[0] == "### rollout replay: PASS consistent (a_run)"
    assert "| per token, in nats | over the support | whole vocabulary |" in lines
    assert "| gate | value | limit |  |" in lines
    rows = [line for line in lines if line.startswith("|")]
    assert {row.count("|") for row in rows[:10]} == {4}


def test_markdown_from_data_is_text() -> None:
    text = markdown(summary(findings=(HOSTILE,)))
    (line,) = [line for line in text.splitlines() if "bad_code" in line]
    assert "<" not in line and "`" not in line.replace("\\`", "")
    assert "@someone" not in line and "a|b" not in line


@pytest.mark.parametrize(
    ("given", "words", "limits"),
    [
        pytest.param([], set(), {}, id="nothing"),
        pytest.param(["never"], {"never"}, {}, id="never"),
        pytest.param(["mismatch_kl=1e-3"], set(), {"mismatch_kl": 1e-3}, id="a limit"),
        pytest.param(
            ["gates", "support_kl=0.5", "findings"],
            {"gates", "findings"},
            {"support_kl": 0.5},
            id="both",
        ),
    ],
)
def test_fail_on_is_words_and_limits(
    given: list[str], words: set[str], limits: dict[str, float]
) -> None:
    assert FailOn.parse(given, GATES) == FailOn(frozenset(words), limits)


@pytest.mark.parametrize(
    "given",
    [["gate"], ["mismatch=1"], ["mismatch_kl"], ["mismatch_kl=x"], ["never", "gates"], ["never=1"]],
    ids=str,
)
def test_what_fail_on_does_not_know_is_refused(given: list[str]) -> None:
    with pytest.raises(click.BadParameter):
        FailOn.parse(given, GATES)


@pytest.mark.parametrize(
    ("words", "finding", "gate", "code"),
    [
        ([], False, False, 0),
        ([], True, False, 1),
        ([], False, True, 1),
        (["findings"], False, True, 0),
        (["findings"], True, True, 1),
        (["gates"], True, False, 0),
        (["gates"], False, True, 1),
        (["findings", "gates"], True, False, 1),
        (["never"], True, True, 0),
    ],
    ids=str,
)
def test_fail_on_chooses_the_exit_code(
    words: list[str], finding: bool, gate: bool, code: int
) -> None:
    found = {
        "verdict": "inconsistent" if finding or gate else "consistent",
        "findings": [{"code": "x"}] * finding,
        "failed_gates": ["mismatch_kl"] * gate,
    }
    assert FailOn.parse(words, GATES).exit_code(found) == code


def test_a_diagnosis_is_a_finding_and_clean_is_none() -> None:
    found = {"verdict": "inconsistent", "findings": [], "failed_gates": []}
    fails = FailOn.parse(["findings"], GATES)
    assert fails.exit_code(found | {"diagnoses": [{"code": "softcap"}]}) == 1
    assert fails.exit_code(found | {"diagnoses": [{"code": "clean"}]}) == 0


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up rollouts: a tiny model disagrees with them thoroughly."""
    path = tmp_path_factory.mktemp("runs") / "first"
    with RunWriter(path, {}) as writer:
        for rollout in synthetic(rollouts=2, tokens=12)[0]:
            writer.write(rollout)
    return path


Replayed = Callable[..., Result]


@pytest.fixture
def replayed(stored: Path, tiny_model_path: Path) -> Replayed:
    return lambda *flags: run(
        "replay", stored, "--model", tiny_model_path, "--dtype", "float32", *flags
    )


def test_replay_names_the_page_and_prints_markdown(replayed: Replayed) -> None:
    result = replayed("--md")
    assert result.exit_code == 1
    assert result.stdout.startswith("### rollout replay: FAIL inconsistent (first)")
    page = Path(result.stderr.split("report: ")[1].split("\n")[0])
    assert page.name == "report.html" and page.read_text().startswith("<!doctype html>")
    assert json.loads((page.parent / "summary.json").read_text())["metrics"]["verl"]


def test_replay_that_never_fails_still_tells(replayed: Replayed) -> None:
    result = replayed("--fail-on", "never")
    assert result.exit_code == 0
    assert result.stdout.endswith("FAIL  inconsistent\n")
    assert "exit 0: --fail-on never" in result.stderr


def test_fail_on_sets_a_gate_over_config_and_override(replayed: Replayed) -> None:
    limits = ["--fail-on=gates", *(f"--fail-on={gate}=1000" for gate in GATES)]
    assert replayed(*limits, "-o", "gates.mismatch_kl=0.1").exit_code == 0


def test_json_and_markdown_together_are_refused(replayed: Replayed) -> None:
    assert replayed("--md", "--json").exit_code == 2


def test_one_run_under_two_models_is_compared_token_by_token(
    stored: Path, tiny_model_path: Path, tmp_path: Path
) -> None:
    arguments = ["diff", stored, "--model", tiny_model_path, "--model", tiny_model_path]
    result = run(*arguments, "-o", "dtype=float32", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["same"], found["numbers"], found["tokens"]["tokens"]) == (True, [], 24)
    a, b = found["a"], found["b"]
    assert run("diff", a, b).stdout.splitlines()[-1].startswith("SAME")
    summary = json.loads((Path(a) / "summary.json").read_text())
    summary["mismatch_kl"] *= 1.05
    summary["precision"]["dtype"] = "bfloat16"
    other = tmp_path / "summary.json"
    other.write_text(json.dumps(summary))
    result = run("diff", a, other)
    assert result.exit_code == 1
    assert "precision.dtype" in result.stdout.split("mismatch_kl")[0], "settings first"
    assert result.stdout.splitlines()[-1].startswith("DIFFERS  1 of")
    assert run("diff", a, other, "--rtol", "0.1").exit_code == 0, "settings decide nothing"


def test_two_runs_are_compared_by_what_is_in_them(stored: Path, tmp_path: Path) -> None:
    other = tmp_path / "second"
    with RunWriter(other, {"config": {"seed": 7}}) as writer:
        writer.write(make_rollout())
    result = run("diff", stored, other, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert {"key": "config.seed", "a": None, "b": 7, "change": None} in found["settings"]
    (rollouts,) = [n for n in found["numbers"] if n["key"] == "rollouts"]
    assert (rollouts["a"], rollouts["b"], rollouts["change"]) == (2, 1, -1)
    assert run("diff", stored, stored).exit_code == 0


def test_two_runs_with_reports_are_compared_by_their_newest(
    stored: Path, replayed: Replayed, tmp_path: Path
) -> None:
    replayed()
    copy = tmp_path / "copy"
    shutil.copytree(stored, copy)
    replayed("-o", "dtype=float32", "--head-dtype", "float16")
    found = json.loads(run("diff", copy, stored, "--json").stdout)
    assert [d["key"] for d in found["settings"]] == ["report.precision.head_dtype"]
    assert found["tokens"]["tokens"] == 24 and 0 < found["tokens"]["mean"] < 0.1


def test_a_damaged_table_of_tokens_is_one_line(replayed: Replayed, tmp_path: Path) -> None:
    report = Path(replayed().stderr.split("report: ")[1].split("\n")[0]).parent
    broken = tmp_path / "broken"
    shutil.copytree(report, broken)
    (broken / "tokens.arrow").write_bytes(b"no arrow")
    result = run("diff", report, broken)
    assert result.exit_code == 3
    assert "not the tokens.arrow of a report" in result.stderr


def test_tokens_of_another_vocabulary_are_shown_by_their_ids(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    info = {"tokenizer": {"path": "elsewhere", "vocabulary_sha256": "another"}}
    with RunWriter(tmp_path / "run", info) as writer:
        writer.write(synthetic(rollouts=1, tokens=4)[0][0])
    _, report = replay_run(tmp_path / "run", str(tiny_model_path), ReplayConfig(dtype="float32"))
    page = (report / "report.html").read_text()
    assert "There are no texts for this model and run" in page
    assert re.search(r"<mark>#\d+</mark>", page)


def test_a_rollout_with_an_id_outside_the_vocabulary_is_shown_token_by_token(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    """A run of another model: it cannot be run, and is what somebody needs to see."""
    good, odd = synthetic(rollouts=2, tokens=12)[0]
    ids, output = odd.support.ids.copy(), odd.output_ids.copy()
    row = slice(*odd.support.offsets[[5, 6]].tolist())
    ids[row][ids[row] == output[5]] = output[5] = 70_000
    odd = replace(odd, support=Support(ids, odd.support.offsets), output_ids=output)
    with RunWriter(tmp_path / "run", {}) as writer:
        for rollout in (good, odd):
            writer.write(rollout)
    config = ReplayConfig(dtype="float32")
    report, folder = replay_run(tmp_path / "run", str(tiny_model_path), config)
    assert {f.code: f.count for f in report.findings} == {"id_outside_vocabulary": 1}
    html = (folder / "report.html").read_text()
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert found
    data = json.loads(found[1])
    strip = {strip["id"]: strip for strip in data["rollouts"]}["1:0"]
    assert data["vocab_size"] < 70_000 == strip["ids"][5]
    assert data["texts"]["70000"] == "#70000"
    assert strip["finding"] == [None] * 5 + ["id_outside_vocabulary"] + [None] * 6
    assert strip["faults"] == 12


def test_counts_must_be_equal_and_fractions_nearly() -> None:
    a = Side("a", {}, {"count": 1000, "mean": 1.0, "verdict": "consistent", "only_a": 1})
    b = Side("b", {}, {"count": 1001, "mean": 1.009, "verdict": "consistent"})
    found = compare(a, b, rtol=0.01, atol=0)
    assert [d.key for d in found.numbers] == ["count", "only_a"]
    assert [d.key for d in compare(a, b, rtol=0.001).numbers] == ["count", "mean", "only_a"]


def test_one_cause_in_two_places_is_not_the_same_as_in_one(tmp_path: Path) -> None:
    sides = []
    for places in (["at a"], ["at a", "at b"]):
        diagnoses = [{"code": "penalty", "scope": {"where": where}} for where in places]
        file = tmp_path / str(len(places)) / "summary.json"
        file.parent.mkdir()
        file.write_text(json.dumps({"verdict": "inconsistent", "diagnoses": diagnoses}))
        sides.append(load_side(file))
    (found,) = compare(*sides).numbers
    assert (found.key, found.a, found.b) == ("diagnoses.penalty", "at a", "at a; at b")


def test_what_is_neither_run_nor_report_is_refused(tmp_path: Path, stored: Path) -> None:
    with pytest.raises(errors.NotARun, match="neither"):
        load_side(tmp_path)
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(errors.NotARun, match="no verdict"):
        load_side(tmp_path)
    assert run("diff", tmp_path, stored).exit_code == 3
    (tmp_path / "summary.json").write_text('{"verdict": "consistent"}')
    result = run("diff", stored, tmp_path)
    assert result.exit_code == 2
    assert f"{stored} is a run and {tmp_path} a report" in result.stderr
    assert run("diff", stored).exit_code == 2
    assert run("diff", stored, stored, "--model", "m").exit_code == 2

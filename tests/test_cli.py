"""The commands: output, exit codes, and what goes to stdout and to stderr."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import click
import datasets
import numpy as np
import pytest
from builders import RECORDED, make_rollout, recorded_lines, write_lines
from click.testing import CliRunner, Result

from cli.main import cli
from cli.options import reports_errors
from rollout.schema import to_batch
from rollout.shard import ShardFile
from rollout.writer import RunWriter


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def config(tmp_path: Path, tiny_model_path: Path) -> Path:
    """Six rollouts of the tiny model in this process."""
    prompts = write_lines(tmp_path / "p.jsonl", [{"prompt": f"The {w} statement"} for w in "abc"])
    path = tmp_path / "small.yaml"
    path.write_text(
        f"""
model: {tiny_model_path}
prompts: {{dataset: {prompts}, format: text, rollouts_per_prompt: 2}}
sampling: {{temperature: 0.7, top_k: 20, top_p: 0.9, max_new_tokens: 8}}
engine: {{kind: embedded, dtype: float32}}
"""
    )
    return path


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory, tiny_model_path: Path) -> Path:
    """A collected run for tests that only read it."""
    folder = tmp_path_factory.mktemp("collected")
    prompts = write_lines(folder / "p.jsonl", [{"prompt": "The while statement"}] * 2)
    settings = folder / "c.yaml"
    settings.write_text(
        f"""
model: {tiny_model_path}
prompts: {{dataset: {prompts}, format: text}}
sampling: {{top_k: 20, max_new_tokens: 8}}
engine: {{kind: embedded}}
"""
    )
    assert run("collect", settings, "--out", folder / "run").exit_code == 0
    return folder / "run"


def test_collect_then_replay_agree_to_fp32(
    config: Path, tmp_path: Path, tiny_model_path: Path
) -> None:
    out = tmp_path / "run"
    result = run("collect", config, "--out", out)
    assert result.exit_code == 0, result.output
    assert "rollouts" in result.stdout and "singletons" in result.stdout
    assert f"next: rollout replay {out} --model {tiny_model_path}" in result.stderr
    rows = datasets.load_from_disk(str(out))
    assert sorted(rows["rollout_id"]) == [f"{p}:{i}" for p in range(3) for i in range(2)]
    info = json.loads((out / "run.json").read_text())
    assert (info["vocab_size"], info["tokenizer"]["path"]) == (1024, str(tiny_model_path))
    assert info["config"]["sampling"]["top_k"] == 20

    result = run("replay", out, "--model", tiny_model_path, "--dtype", "float32", "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["verdict"] == "consistent"
    assert summary["log_ratio_abs"]["max"] <= 1e-4
    assert summary["findings"] == []


def test_json_is_all_of_stdout(config: Path, tmp_path: Path) -> None:
    result = run("collect", config, "--out", tmp_path / "run", "--json")
    stats = json.loads(result.stdout)
    assert (stats["rollouts"], stats["failed"], stats["rejected"]) == (6, {}, {})
    assert "\r" not in result.stderr
    assert "collect 6/6 rollouts" in result.stderr
    assert json.loads((tmp_path / "run" / "stats.json").read_text()) == stats


def test_the_same_command_again_collects_what_is_missing(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run("collect", config, "--out", out, "-o", "prompts.limit=1")
    result = run("collect", config, "--out", out, "--json", "-o", "concurrency=2")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rollouts"] == 6
    ids = datasets.load_from_disk(str(out))["rollout_id"]
    assert len(ids) == len(set(ids)) == 6


def test_an_override_is_what_is_stored(config: Path, tmp_path: Path) -> None:
    run("collect", config, "--out", tmp_path / "run", "-o", "sampling.top_k=50")
    stored = json.loads((tmp_path / "run" / "run.json").read_text())["config"]["sampling"]
    assert stored["top_k"] == 50
    assert set(datasets.load_from_disk(str(tmp_path / "run"))["top_k"]) == {50}


def test_collecting_with_other_settings_is_refused(config: Path, tmp_path: Path) -> None:
    run("collect", config, "--out", tmp_path / "run")
    result = run("collect", config, "--out", tmp_path / "run", "-o", "sampling.top_k=5")
    assert result.exit_code == 2
    assert "config.sampling.top_k: 20 there, 5 now" in result.stderr


@pytest.mark.parametrize(
    ("override", "words"),
    [
        pytest.param("sampling.temprature=1", "did you mean 'temperature'", id="misspelt key"),
        pytest.param("sampling.top_k=null", "top_p bounds probability mass", id="no top_k"),
        pytest.param("sampling.top_k=-1", "must be finite", id="top_k -1"),
        pytest.param("sampling.top_k=5000", "the engine allows at most 1024", id="above the vocab"),
        pytest.param("sampling.repetition_penalty=1.1", "repetition_penalty", id="penalty"),
        pytest.param("sampling.regex='a+'", "the sglang engine", id="grammar"),
        pytest.param("prompts.column=question", "no column 'question'", id="column"),
        pytest.param("prompts.limit=0", "prompts.limit", id="no prompts"),
        pytest.param("model=/nowhere", "no tokenizer to be had", id="model"),
        pytest.param("engine.dtype=int8", "'float32', 'bfloat16' or 'float16'", id="dtype"),
    ],
)
def test_usage_errors_exit_2_and_leave_no_directory(
    config: Path, tmp_path: Path, override: str, words: str
) -> None:
    result = run("collect", config, "--out", tmp_path / "run", "-o", override)
    assert result.exit_code == 2, result.output
    assert words in result.stderr and result.stdout == ""
    assert not (tmp_path / "run").exists()


def test_a_dead_url_exits_4_and_leaves_no_directory(config: Path, tmp_path: Path) -> None:
    engine = "engine={kind: sglang, url: 'http://127.0.0.1:9'}"
    result = run("collect", config, "--out", tmp_path / "run", "-o", engine)
    assert result.exit_code == 4
    assert "is the server up, and is engine.url right?" in result.stderr
    assert not (tmp_path / "run").exists()


def test_too_many_failures_exit_5_and_keep_what_came(
    config: Path, tmp_path: Path, tiny_model_path: Path
) -> None:
    """One prompt is longer than the tiny model's context: that rollout fails, the others stay."""
    rows = [{"prompt": "The if statement"}, {"prompt": "x = 1\n" * 2000}]
    prompts = write_lines(tmp_path / "p.jsonl", rows)
    out = tmp_path / "run"
    options = ("-o", f"prompts.dataset={prompts}", "-o", "prompts.rollouts_per_prompt=1")
    result = run("collect", config, "--out", out, *options, "-o", "concurrency=1")
    assert result.exit_code == 5
    assert "1 rollouts failed and 0 were rejected of 2, over the error budget" in result.stderr
    assert datasets.load_from_disk(str(out))["rollout_id"][:] == ["0:0"]
    line = json.loads((out / "errors.jsonl").read_text())
    assert (line["rollout_id"], line["reason"]) == ("1:0", "engine_refused")
    result = run("collect", config, "--out", out, *options, "-o", "error_budget=0.5", "--json")
    assert result.exit_code == 0, "within the budget: counted and printed"
    assert json.loads(result.stdout)["failed"] == {"engine_refused": 2}


def test_replay_prints_the_verdict_last(collected: Path, tiny_model_path: Path) -> None:
    result = run("replay", collected, "--model", tiny_model_path, "--dtype", "float32")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "PASS  consistent"
    assert "report: " in result.stderr


def test_replay_audits_as_many_tokens_as_asked_for(collected: Path, tiny_model_path: Path) -> None:
    arguments = ("replay", collected, "--model", tiny_model_path, "--dtype", "float32")
    result = run(*arguments, "--audit", "5")
    assert "0 inconsistent of 5 tokens" in result.stdout
    without = json.loads(run(*arguments, "--audit", "0", "--json").stdout)
    assert (without["audit"], without["verdict"]) == (None, "consistent")


def test_replay_names_the_gates_that_failed(
    collected: Path, tiny_model_path: Path, tmp_path: Path
) -> None:
    strict = tmp_path / "strict.yaml"
    strict.write_text("gates: {log_ratio_abs_mean: 0.0, mismatch_kl: 1.0}\ndtype: float32\n")
    result = run("replay", collected, "--model", tiny_model_path, "--config", strict)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "FAIL  inconsistent"
    assert "gate log_ratio_abs_mean: " in result.stdout and "mismatch_kl: " not in result.stdout
    override = ("-o", "gates.log_ratio_abs_mean=0.06")
    result = run("replay", collected, "--model", tiny_model_path, "--config", strict, *override)
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["--dtype", "int4"], "'int4' is not one of", id="dtype"),
        pytest.param(["-o", "gates.mismatch=1"], "did you mean 'mismatch_kl'", id="gate"),
        pytest.param(["--max-tokens", "0"], "max_tokens", id="max tokens"),
        pytest.param(["--device", "cuda:99"], "device", id="device"),
    ],
)
def test_replay_usage_errors_exit_2(
    collected: Path, tiny_model_path: Path, arguments: list[str], words: str
) -> None:
    result = run("replay", collected, "--model", tiny_model_path, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(_flip, id="one byte flipped"),
        pytest.param(lambda p: p.write_bytes(p.read_bytes()[:-64]), id="tail cut"),
        pytest.param(lambda p: p.unlink(), id="shard gone"),
    ],
)
def test_damaged_data_exits_3(
    tmp_path: Path, tiny_model_path: Path, damage: Callable[[Path], None]
) -> None:
    with RunWriter(tmp_path / "run", {}) as writer:
        writer.write(make_rollout())
    damage(tmp_path / "run" / "shard-00000.arrow")
    result = run("replay", tmp_path / "run", "--model", tiny_model_path)
    assert result.exit_code == 3
    assert "shard-00000.arrow" in result.stderr


def test_one_token_outside_its_support_exits_1_and_is_named(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    outside = make_rollout(output_ids=np.array([4, 8, 2], np.int32))
    shard = tmp_path / "run" / "shard-00000.arrow"
    with RunWriter(tmp_path / "run", {}):
        pass
    (tmp_path / "run" / "manifest.jsonl").unlink()
    with ShardFile(shard) as written:
        written.commit(to_batch([outside]))
    result = run("replay", tmp_path / "run", "--model", tiny_model_path, "--dtype", "float32")
    assert result.exit_code == 1
    assert (
        "finding sampled_outside_support: 1 token in 1 rollout; first 7:0: output token 0"
        in result.stdout
    )
    assert result.stdout.splitlines()[-1] == "FAIL  inconsistent"


@pytest.mark.parametrize("folder", ["", "nowhere"], ids=["not a run", "not there"])
def test_no_run_exits_3(tmp_path: Path, tiny_model_path: Path, folder: str) -> None:
    assert run("replay", tmp_path / folder, "--model", tiny_model_path).exit_code == 3


def test_import_of_good_lines_exits_0(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "d.jsonl", recorded_lines(RECORDED[2])[:3])
    result = run("import", "--from", "sglang-jsonl", file, "--out", tmp_path / "run", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {
        "rollouts": 3,
        "output_tokens": 119,
        "rejected": {},
        "already_stored": 0,
        "diagnoses": [],
    }


def test_import_with_a_bad_line_exits_3_and_names_the_reason(tmp_path: Path) -> None:
    lines = copy.deepcopy(recorded_lines(RECORDED[2])[:3])
    lines[1]["response"]["meta_info"]["output_token_sampling_mask"].pop()
    file = write_lines(tmp_path / "d.jsonl", lines)
    result = run("import", "--from", "sglang-jsonl", file, "--out", tmp_path / "run")
    assert result.exit_code == 3
    assert result.stdout.startswith("2 rollouts, ") and ", 1 rejected" in result.stdout
    assert "rejected: 1 x length_mismatch" in result.stderr


def test_import_checks_ids_against_a_model_or_a_number(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    file = write_lines(tmp_path / "d.jsonl", recorded_lines(RECORDED[2])[:1])
    common = ("import", "--from", "sglang-jsonl", file, "--out")
    result = run(*common, tmp_path / "a", "--tokenizer", tiny_model_path)
    assert "1 x id_outside_vocabulary" in result.stderr
    assert run(*common, tmp_path / "b", "--vocab-size", "49152").exit_code == 0
    both = ("--vocab-size", "9", "--tokenizer", str(tiny_model_path))
    assert run(*common, tmp_path / "c", *both).exit_code == 2


def test_import_of_nothing_is_not_success(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("\n")
    result = run("import", "--from", "sglang-jsonl", tmp_path / "d.jsonl", "--out", tmp_path / "r")
    assert result.exit_code == 3


@pytest.mark.parametrize("command", [[], ["collect"], ["import"], ["replay"]], ids=str)
def test_help_has_an_example_or_the_exit_codes(command: list[str]) -> None:
    result = run(*command, "-h")
    assert result.exit_code == 0
    assert ("Example:" if command else "130  interrupted") in result.stdout


def test_an_interrupt_exits_130_and_says_what_is_kept() -> None:
    @click.command()
    @reports_errors
    def interrupted() -> None:
        raise KeyboardInterrupt

    result = CliRunner().invoke(interrupted, [])
    assert (result.exit_code, "what was committed is kept" in result.stderr) == (130, True)

"""`rollout export` and `rollout import` of every format: files, exit codes, what is said where."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from builders import (
    RECORDED,
    assert_same_rollout,
    make_rollout,
    make_two_turns,
    recorded_lines,
    write_lines,
)
from click.testing import CliRunner, Result

from cli.main import cli
from rollout.adapters.formats import FORMATS, READABLE, WRITABLE
from rollout.reader import open_run
from rollout.record import Rollout
from rollout.writer import RunWriter

PRIME_RL = ("--top-p", "0.875", "--top-k", "2", "--min-p", "0", "--max-new-tokens", "8")
SAID = {
    "slime": (),
    "miles": (),
    "prime-rl": (*PRIME_RL, "--finish-reason", "stop"),
    "skyrl": (),
}


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def stored(path: Path, rollouts: Sequence[Rollout]) -> Path:
    with RunWriter(path, {}) as writer:
        for rollout in rollouts:
            writer.write(rollout)
    return path


@pytest.fixture
def two_turns(tmp_path: Path) -> Path:
    """A run of four rollouts of two prompts, in the order in which they ended."""
    ids = (("b", 0), ("a", 0), ("a", 1), ("b", 1))
    return stored(tmp_path / "run", [make_two_turns(*at) for at in ids])


def test_what_is_offered_is_what_the_registry_has() -> None:
    assert {*READABLE, *WRITABLE} == FORMATS.keys()
    assert {*SAID} == {*READABLE} & {*WRITABLE}


@pytest.mark.parametrize("name", SAID)
def test_an_export_is_imported_whole(name: str, two_turns: Path, tmp_path: Path) -> None:
    file, back = tmp_path / "dump", tmp_path / "back"
    exported = run("export", two_turns, "--to", name, "--out", file, "--json")
    assert exported.exit_code == 0, exported.stderr
    numbers = json.loads(exported.stdout)
    assert (numbers["rollouts"], numbers["output_tokens"]) == (4, 28)
    assert numbers["bytes"] == file.stat().st_size
    assert "note: " in exported.stderr
    imported = run("import", "--from", name, file, "--out", back, "--json", *SAID[name])
    assert imported.exit_code == 0, imported.stderr
    assert json.loads(imported.stdout)["rollouts"] == 4
    ids = [r.rollout_id for r in open_run(back)]
    assert ids == ["b:0", "b:1", "a:0", "a:1"]


@pytest.mark.parametrize("name", ["slime", "miles", "skyrl"])
def test_an_imported_export_is_the_run_again(name: str, two_turns: Path, tmp_path: Path) -> None:
    run("export", two_turns, "--to", name, "--out", tmp_path / "dump")
    run("import", "--from", name, tmp_path / "dump", "--out", tmp_path / "back")
    wanted = {r.rollout_id: r for r in open_run(two_turns)}
    for got in open_run(tmp_path / "back"):
        assert_same_rollout(got, wanted[got.rollout_id])


def test_a_file_that_is_there_is_only_replaced_when_asked(two_turns: Path, tmp_path: Path) -> None:
    file = tmp_path / "dump"
    file.write_text("mine")
    common = ("export", two_turns, "--to", "slime", "--out", file)
    refused = run(*common)
    assert (refused.exit_code, file.read_text()) == (2, "mine")
    assert "is there already; choose another --out, or give --overwrite" in refused.stderr
    assert run(*common, "--overwrite").exit_code == 0
    assert len(torch.load(file, weights_only=True)["samples"]) == 4


def test_an_export_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    mixed = stored(tmp_path / "run", [make_rollout(), make_rollout("8", temperature=1.0)])
    failed = run("export", mixed, "--to", "slime", "--out", tmp_path / "dump.pt")
    assert failed.exit_code == 2
    assert "one temperature for all, so choose one: rollout export --temp" in failed.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_temperature_chooses_what_is_exported(tmp_path: Path) -> None:
    warm = [make_rollout("8", i, temperature=0.7) for i in range(2)]
    mixed = stored(tmp_path / "run", [make_rollout(), *warm])
    common = ("export", mixed, "--to", "slime", "--out", tmp_path / "dump.pt", "--json")
    done = run(*common, "--temperature", "0.7")  # float32 holds another number
    assert done.exit_code == 0, done.stderr
    numbers = json.loads(done.stdout)
    assert (numbers["rollouts"], numbers["left_out"]) == (2, {"at temperature 0.5": 1})
    assert "left out: 1 at temperature 0.5" in done.stderr
    samples = torch.load(tmp_path / "dump.pt", weights_only=True)["samples"]
    assert [s["metadata"]["rollout"]["rollout_id"] for s in samples] == ["8:0", "8:1"]


def test_a_temperature_that_nothing_was_sampled_at_names_the_others(tmp_path: Path) -> None:
    mixed = stored(tmp_path / "run", [make_rollout(), make_rollout("8", temperature=1.0)])
    common = ("export", mixed, "--to", "slime", "--out", tmp_path / "dump.pt")
    failed = run(*common, "--temperature", "0.7")
    assert failed.exit_code == 2
    assert "left out: 1 at temperature 0.5, 1 at temperature 1; choose others" in failed.stderr
    assert not (tmp_path / "dump.pt").exists()


@pytest.mark.parametrize(
    ("out", "words"),
    [
        pytest.param("run", "is there already", id="a directory"),
        pytest.param("nowhere/dump.pt", "no such directory; make it first", id="no directory"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused(
    out: str, words: str, two_turns: Path, tmp_path: Path
) -> None:
    failed = run("export", two_turns, "--to", "slime", "--out", tmp_path / out, "--overwrite")
    assert failed.exit_code == 2
    assert words in failed.stderr


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    failed = run("export", tmp_path, "--to", "slime", "--out", tmp_path / "dump.pt")
    assert failed.exit_code == 3
    assert "not a run directory" in failed.stderr


def test_aborted_rollouts_are_left_out_when_asked_and_counted(tmp_path: Path) -> None:
    aborted = make_rollout("8", rollout_id="8:0#abort0", finish_reason="abort")
    source = stored(tmp_path / "run", [make_rollout(), aborted])
    common = ("export", source, "--to", "prime-rl", "--out", tmp_path / "samples.bin")
    refused = run(*common)
    assert refused.exit_code == 2
    assert "8:0#abort0: aborted" in refused.stderr
    done = run(*common, "--without-aborted")
    assert done.exit_code == 0
    assert "left out: 1 aborted\n" in done.stderr
    assert done.stdout.startswith("1 rollouts, 3 output tokens into ")


@pytest.mark.parametrize("name", ["slime", "prime-rl", "trl"])
def test_an_export_of_nothing_is_not_success(name: str, tmp_path: Path) -> None:
    empty = stored(tmp_path / "run", [])
    failed = run("export", empty, "--to", name, "--out", tmp_path / "dump.pt")
    assert failed.exit_code == 3
    assert "must hold a rollout to export, got none" in failed.stderr
    assert not (tmp_path / "dump.pt").exists()


def test_an_import_that_lacks_facts_names_every_option_and_makes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "dump.pt"
    FORMATS["slime"].write([make_rollout()], file)
    dump = torch.load(file, weights_only=True)
    dump["samples"][0]["metadata"] = {}
    torch.save(dump, file)
    common = ("import", "--from", "slime", file, "--out", tmp_path / "run")
    refused = run(*common, "--temperature", "0.5")
    assert refused.exit_code == 2
    assert "rollout import --top-p --top-k --min-p --max-new-tokens" in refused.stderr
    assert not (tmp_path / "run").exists()
    assert run(*common, "--temperature", "0.5", *PRIME_RL).exit_code == 0
    (rollout,) = open_run(tmp_path / "run")
    assert (rollout.temperature, rollout.top_p, rollout.max_new_tokens) == (0.5, 0.875, 8)


def test_a_broken_sample_is_rejected_with_its_reason_and_as_json(tmp_path: Path) -> None:
    file = tmp_path / "dump.pt"
    FORMATS["slime"].write([make_rollout("a"), make_rollout("b")], file)
    dump = torch.load(file, weights_only=True)
    dump["samples"][1]["rollout_top_p_token_ids"][1] = 6
    torch.save(dump, file)
    done = run("import", "--from", "slime", file, "--out", tmp_path / "run", "--json")
    assert done.exit_code == 3
    assert json.loads(done.stdout)["rejected"] == {"sampled_outside_support": 1}
    assert "rejected: 1 x sampled_outside_support" in done.stderr
    rejected = json.loads((tmp_path / "run" / "rejected.jsonl").read_text())
    assert (rejected["reason"], rejected["sample"]) == ("sampled_outside_support", 1)
    body = json.loads(rejected["body"])
    assert body["rollout_top_p_token_ids"] == [5, 6, 2]
    assert body["metadata"]["rollout"]["rollout_id"] == "b:0"
    assert [r.rollout_id for r in open_run(tmp_path / "run")] == ["a:0"]


def test_a_file_that_needs_a_foreign_class_is_refused(tmp_path: Path) -> None:
    torch.save({"samples": [{"path": tmp_path}]}, tmp_path / "dump.pt")
    refused = run("import", "--from", "miles", tmp_path / "dump.pt", "--out", tmp_path / "run")
    assert refused.exit_code == 3
    assert "only tensors and plain containers are read" in refused.stderr
    assert not (tmp_path / "run").exists()


def test_the_same_import_again_goes_on_and_says_what_was_there(tmp_path: Path) -> None:
    lines = recorded_lines(RECORDED[0])
    # the second line comes twice: one of them is rejected, at every import
    file = write_lines(tmp_path / "d.jsonl", [*lines[:2], lines[1], lines[2]])
    common = ("import", "--from", "sglang-jsonl", file, "--out", tmp_path / "run")
    first = run(*common, "--json")
    assert json.loads(first.stdout)["rollouts"] == 3
    before = [r.rollout_id for r in open_run(tmp_path / "run")]
    again = run(*common, "--json")
    assert again.exit_code == 3
    numbers = json.loads(again.stdout)
    assert (numbers["rollouts"], numbers["already_stored"]) == (0, 3)
    assert numbers["rejected"] == {"bad_rollout_id": 1}
    assert "3 rollouts of this file were stored in " in again.stderr
    assert [r.rollout_id for r in open_run(tmp_path / "run")] == before


def test_what_was_rejected_is_not_taken_for_what_was_stored_under_its_id(tmp_path: Path) -> None:
    file = tmp_path / "dump.pt"
    FORMATS["slime"].write([make_rollout("a"), make_rollout("b")], file)
    dump = torch.load(file, weights_only=True)
    broken = dump["samples"][0]
    broken["rollout_top_p_token_ids"][1] = 6
    broken["metadata"]["rollout"] |= {"rollout_id": "b:0", "prompt_id": "b"}
    torch.save(dump, file)
    common = ("import", "--from", "slime", file, "--out", tmp_path / "run", "--json")
    first, again = (json.loads(run(*common).stdout) for _ in range(2))
    assert (first["rollouts"], first["already_stored"]) == (1, 0)
    assert (again["rollouts"], again["already_stored"]) == (0, 1)
    assert first["rejected"] == again["rejected"] == {"sampled_outside_support": 1}


def test_an_import_of_a_whole_file_again_is_success(two_turns: Path, tmp_path: Path) -> None:
    run("export", two_turns, "--to", "slime", "--out", tmp_path / "dump")
    common = ("import", "--from", "slime", tmp_path / "dump", "--out", tmp_path / "back")
    assert [run(*common).exit_code for _ in range(2)] == [0, 0]


def test_another_file_of_that_name_or_other_facts_need_another_directory(tmp_path: Path) -> None:
    file = tmp_path / "samples.bin"
    common = ("import", "--from", "prime-rl", file, "--out", tmp_path / "run", *SAID["prime-rl"])
    FORMATS["prime-rl"].write([make_rollout()], file)
    assert run(*common).exit_code == 0
    other_facts = run(*common, "--max-new-tokens", "9")
    assert other_facts.exit_code == 2
    assert "imported.facts.max_new_tokens: 8 there, 9 now" in other_facts.stderr
    FORMATS["prime-rl"].write([make_rollout(reward=1.0, output_text="why not")], file)
    assert run(*common).exit_code == 0  # the same bytes: a sample holds neither
    FORMATS["prime-rl"].write([make_rollout("8")], file)
    other_file = run(*common)
    assert other_file.exit_code == 2
    assert "imported.sha256: " in other_file.stderr


def test_recorded_lines_say_their_settings_themselves(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "d.jsonl", recorded_lines(RECORDED[0])[:1])
    common = ("import", "--from", "sglang-jsonl", file, "--out", tmp_path / "run")
    refused = run(*common, "--temperature", "1")
    assert refused.exit_code == 2
    assert "each line says how it was sampled" in refused.stderr
    assert run(*common).exit_code == 0

"""`rollout export` to the trainers that are given a batch: SkyRL, verl, TRL, OpenRLHF."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from adapters.layouts import longer, multi_turn, scored
from builders import assert_same_rollout
from click.testing import CliRunner, Result

from cli.main import cli
from rollout.reader import open_run
from rollout.writer import RunWriter

PAD = {"verl": ("--pad-id", "0")}


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A run in which the rollouts of prompt 7 do not stand together."""
    with RunWriter(tmp_path / "run", {}) as writer:
        for rollout in (scored(), multi_turn(), longer()):
            writer.write(rollout)
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["openrlhf", "skyrl", "trl", "verl"])
def test_an_export_has_the_rollouts_of_a_prompt_together(
    name: str, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "dump"
    done = run("export", source, "--to", name, "--out", out, *PAD.get(name, ()))
    assert done.exit_code == 0, done.output
    content = json.loads(out.read_text()) if name == "trl" else torch.load(out, weights_only=True)
    ids = {
        "openrlhf": lambda: [sample["rollout_id"] for sample in content["samples"]],
        "skyrl": lambda: [carried["rollout_id"] for carried in content["rollout"]],
        "trl": lambda: content["rollout_id"],
        "verl": lambda: content["non_tensors"]["rollout_id"],
    }
    assert ids[name]() == ["7:0", "7:1", "chat:0"]


def test_a_file_for_skyrl_is_imported_whole(source: Path, tmp_path: Path) -> None:
    file, back = tmp_path / "dump", tmp_path / "back"
    run("export", source, "--to", "skyrl", "--out", file)
    done = run("import", "--from", "skyrl", file, "--out", back)
    assert done.exit_code == 0, done.output
    wanted = {r.rollout_id: r for r in open_run(source)}
    assert len(open_run(back)) == len(wanted)
    for got in open_run(back):
        assert_same_rollout(got, wanted[got.rollout_id])


def test_a_broken_row_for_skyrl_is_rejected_by_its_number(source: Path, tmp_path: Path) -> None:
    run("export", source, "--to", "skyrl", "--out", tmp_path / "dump")
    output = torch.load(tmp_path / "dump", weights_only=True)
    output["rollout_sample_support"][1][0] = -1  # its first token is trained on
    torch.save(output, tmp_path / "dump")
    done = run("import", "--from", "skyrl", tmp_path / "dump", "--out", tmp_path / "back")
    assert done.exit_code == 3
    rejected = json.loads((tmp_path / "back" / "rejected.jsonl").read_text())
    assert (rejected["reason"], rejected["row"]) == ("missing_support", 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(("--to", "verl"), "give --pad-id, the pad_token_id", id="no pad id"),
        pytest.param(("--to", "trl", "--pad-id", "0"), "not padded; leave out", id="a pad id"),
    ],
)
def test_the_pad_id_is_given_where_rows_are_padded(
    arguments: tuple[str, ...], words: str, source: Path, tmp_path: Path
) -> None:
    refused = run("export", source, *arguments, "--out", tmp_path / "dump")
    assert refused.exit_code == 2
    assert words in " ".join(refused.output.split())
    assert not (tmp_path / "dump").exists()

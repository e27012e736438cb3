"""merge: one run out of several, each rollout once, nothing mixed that must not be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import assert_same_rollout, make_rollout
from test_cli import run
from test_run_directory import foreign

from rollout import errors
from rollout.annotate import annotate
from rollout.annotations import Annotation, read_annotations
from rollout.merge import Merged, merge_runs
from rollout.reader import open_run
from rollout.record import Rollout
from rollout.schema import to_batch
from rollout.writer import RunWriter

TOKENIZER = {"path": "here", "vocabulary_sha256": "abc"}
IDENTITY = {"tokenizer": TOKENIZER, "vocab_size": 100, "config": {"seed": 1}}


def write(path: Path, *rollouts: Rollout, **changes: Any) -> Path:
    with RunWriter(path, IDENTITY | changes) as writer:
        for rollout in rollouts:
            writer.write(rollout)
    return path


def files(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.iterdir()}


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """a:0 and b:0."""
    return write(tmp_path / "first", make_rollout("a"), make_rollout("b", reward=1.0))


def test_rollouts_of_both_runs_once(first: Path, tmp_path: Path) -> None:
    bare = make_rollout("c", full_logprobs=None, support_logprobs=None, seed=None)
    second = write(tmp_path / "second", make_rollout("b", reward=1.0), bare)
    before = [files(first), files(second)]
    assert merge_runs(tmp_path / "out", [first, second]) == Merged(3, 1, 0, {})
    wanted = [make_rollout("a"), make_rollout("b", reward=1.0), bare]
    for got, rollout in zip(open_run(tmp_path / "out"), wanted, strict=True):
        assert_same_rollout(got, rollout)
    assert [files(first), files(second)] == before, "sources are only read"


def test_run_json_names_the_sources_and_keeps_what_they_share(first: Path, tmp_path: Path) -> None:
    second = write(
        tmp_path / "second", tokenizer=TOKENIZER | {"path": "there"}, config={"seed": 2}, engine="e"
    )
    merge_runs(tmp_path / "out", [first, second])
    info = open_run(tmp_path / "out").info
    assert info["merged"] == [
        {"path": path.name, "run_id": open_run(path).info["run_id"]} for path in (first, second)
    ]
    assert (info["tokenizer"], info["vocab_size"]) == (TOKENIZER, 100)
    assert "config" not in info and "engine" not in info
    merge_runs(tmp_path / "copy", [first])
    assert open_run(tmp_path / "copy").info["config"] == {"seed": 1}


def test_annotations_come_along(first: Path, tmp_path: Path) -> None:
    second = write(tmp_path / "second", make_rollout("a"), make_rollout("c"))
    annotate(first, {"b:0": 0.5})
    annotate(second, {"c:0": 0.25})
    assert merge_runs(tmp_path / "out", [first, second]).annotations == 2
    assert read_annotations(tmp_path / "out") == {
        "b:0": Annotation(0.5),
        "c:0": Annotation(0.25),
    }


def test_two_scores_for_one_rollout_are_refused(first: Path, tmp_path: Path) -> None:
    second = write(tmp_path / "second", make_rollout("a"))
    annotate(first, {"a:0": 0.5})
    annotate(second, {"a:0": 0.25})
    with pytest.raises(errors.BadRolloutId, match="a:0"):
        merge_runs(tmp_path / "out", [first, second])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"reward": 2.0}, id="scalar"),
        pytest.param({"prompt_ids": np.array([1, 4], np.int32)}, id="array"),
        pytest.param({"support_logprobs": None}, id="optional array"),
        pytest.param({"weight_versions": ()}, id="spans"),
        pytest.param({"output_text": None}, id="text"),
    ],
)
def test_one_id_for_two_rollouts_is_refused(
    first: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    second = write(tmp_path / "second", make_rollout("c"), make_rollout("a", **changes))
    result = run("merge", tmp_path / "out", first, second)
    assert result.exit_code == 3
    assert f"a:0: {first} and {second} hold different rollouts" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param(
            {"tokenizer": {"vocabulary_sha256": "xyz"}},
            "tokenizer.vocabulary_sha256 is 'xyz', but 'abc' in ",
            id="vocabulary",
        ),
        pytest.param(
            {"tokenizer": None},
            "tokenizer.vocabulary_sha256 is None, but 'abc' in ",
            id="unknown vocabulary",
        ),
        pytest.param({"vocab_size": 101}, "vocab_size is 101, but 100 in ", id="vocabulary size"),
    ],
)
def test_other_tokenizers_are_refused(
    first: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    second = write(tmp_path / "second", make_rollout("c"), **changes)
    result = run("merge", tmp_path / "out", first, second)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{second}: {words}{first}" in result.stderr
    assert not (tmp_path / "out").exists()


def test_another_schema_version_is_refused(first: Path, tmp_path: Path) -> None:
    second = write(tmp_path / "second", make_rollout("c"))
    info = json.loads((second / "run.json").read_text())
    (second / "run.json").write_text(json.dumps(info | {"schema_version": 2}))
    with pytest.raises(errors.SchemaVersionUnknown, match="second/run.json: schema version 2"):
        merge_runs(tmp_path / "out", [first, second])


@pytest.mark.parametrize("name", ["first", "other"], ids=["a source", "not empty"])
def test_a_merge_makes_a_new_directory(first: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").touch()
    with pytest.raises(
        errors.ConfigError, match="is there already.*remove it if .* unfinished merge"
    ):
        merge_runs(tmp_path / name, [first])


def test_a_rollout_that_breaks_a_rule_is_rejected_with_its_reason(tmp_path: Path) -> None:
    outside = make_rollout("a", output_ids=np.array([4, 8, 2], np.int32))
    source = foreign(tmp_path / "foreign", to_batch([outside, make_rollout("b")]))
    result = run("merge", tmp_path / "out", source, "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout) == {
        "rollouts": 1,
        "duplicates": 0,
        "annotations": 0,
        "rejected": {"sampled_outside_support": 1},
    }
    assert "rejected: 1 x sampled_outside_support" in result.stderr
    line = json.loads((tmp_path / "out" / "rejected.jsonl").read_text())
    assert (line["reason"], line["rollout_id"]) == ("sampled_outside_support", "a:0")
    assert (line["source"], line["run_id"]) == ("foreign", open_run(source).info["run_id"])
    assert [r.rollout_id for r in open_run(tmp_path / "out")] == ["b:0"]


def test_the_command_counts(first: Path, tmp_path: Path) -> None:
    result = run("merge", tmp_path / "out", first, first)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        f"2 rollouts of 2 runs into {tmp_path / 'out'}, 2 duplicates, 0 annotations, 0 rejected\n"
    )


def test_nothing_merged_is_not_success(tmp_path: Path) -> None:
    assert run("merge", tmp_path / "out", write(tmp_path / "empty")).exit_code == 3
    assert run("merge", tmp_path / "out").exit_code == 2

"""`rollout inspect`: a run in short, and a rollout token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import make_rollout
from test_cli import run

from rollout.inspection import make_decode
from rollout.prompts import describe_tokenizer, load_tokenizer
from rollout.record import Rollout
from rollout.support import Support
from rollout.writer import RunWriter


def write(path: Path, *rollouts: Rollout, **identity: Any) -> Path:
    with RunWriter(path, identity) as writer:
        for rollout in rollouts:
            writer.write(rollout)
    return path


def spoken(tokenizer: Any, text: str) -> Rollout:
    """A greedy rollout that says `text`."""
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    zero = np.zeros(len(ids), np.float32)
    return make_rollout(
        output_ids=ids,
        loss_mask=np.ones(len(ids), np.int8),
        sampling_logprobs=zero,
        full_logprobs=zero - 1,
        support_logprobs=zero,
        support=Support.from_rows([[i] for i in ids.tolist()]),
        weight_versions=(),
        output_text=text,
    )


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Three rollouts; run.json names no tokenizer."""
    rewarded = make_rollout("b", reward=0.25, finish_reason="length", output_text="x\x1b[31m" * 20)
    return write(
        tmp_path / "run",
        make_rollout("a"),
        rewarded,
        make_rollout("c", output_text=None),
        engine={"name": "sglang", "version": "0.5.23", "model": "tiny"},
        imported={"from": "sglang-jsonl", "file": "dump.jsonl"},
        vocab_size=1024,
    )


def test_a_run_in_short(small: Path) -> None:
    result = run("inspect", small, "--json")
    assert result.exit_code == 0, result.output
    view = json.loads(result.stdout)
    about = json.loads((small / "run.json").read_text())
    assert view["run"].pop("created").endswith("+00:00")
    assert view["run"] == {
        "run_id": about["run_id"],
        "writer": about["writer"],
        "engine": "sglang 0.5.23 tiny",
        "vocab_size": 1024,
        "imported": "sglang-jsonl dump.jsonl",
    }
    assert view["rollouts"] == 3
    assert (
        view["first"][1]
        == {
            "rollout_id": "b:0",
            "output_tokens": 3,
            "finish_reason": "length",
            "reward": 0.25,
            "mean_support_size": 1.5,  # of the two sampled tokens
            "text": ("x\x1b[31m" * 20)[:40],
        }
    )


def test_the_list_escapes_texts_and_ends_at_its_limit(small: Path) -> None:
    result = run("inspect", small, "--limit", "2")
    assert result.exit_code == 0, result.output
    assert r"'x\x1b[31mx\x1b[31m" in result.stdout and "\x1b" not in result.stdout
    assert "a:0" in result.stdout and "c:0" not in result.stdout
    assert result.stdout.splitlines()[-1] == "2 of 3 rollouts"


def test_tokens_have_the_numbers_of_the_record(small: Path) -> None:
    result = run("inspect", small, "a:0", "--json")
    assert result.exit_code == 0, result.output
    assert "run.json names no tokenizer; for text give --model" in result.stderr
    view = json.loads(result.stdout)
    assert view["rollout"]["output_text"] == "because"
    first, forced, singleton = view["tokens"]
    assert first == {
        "position": 0,
        "id": 9,
        "text": None,
        "forced": False,
        "support_size": 2,
        "sampling_logprob": pytest.approx(np.log(0.25)),
        "kept_mass": pytest.approx(0.8),
        "top": [
            {"id": 5, "text": None, "probability": pytest.approx(0.75)},
            {"id": 9, "text": None, "probability": pytest.approx(0.25)},
        ],
    }
    assert (forced["forced"], forced["support_size"], forced["top"]) == (True, 0, [])
    assert forced["kept_mass"] is None
    assert singleton["kept_mass"] == pytest.approx(0.9)


def test_the_table_of_a_rollout(small: Path) -> None:
    result = run("inspect", small, "a:0", "--limit", "2")
    at_0, at_1 = (line.split() for line in result.stdout.splitlines()[-2:])
    assert at_0 == ["0", "9", "2", "-1.3863", "0.8000", "5", "0.750,", "9", "0.250"]
    assert at_1 == ["1", "8", "forced", "-", "-"]


def test_what_was_not_recorded_is_not_shown(tmp_path: Path) -> None:
    bare = make_rollout("a", full_logprobs=None, support_logprobs=None)
    view = json.loads(run("inspect", write(tmp_path / "run", bare), "a:0", "--json").stdout)
    assert [(t["kept_mass"], t["top"]) for t in view["tokens"]] == [(None, None)] * 3


@pytest.mark.parametrize("option", [True, False], ids=["--model", "run.json"])
def test_texts_come_from_the_tokenizer(tmp_path: Path, tiny_model_path: Path, option: bool) -> None:
    tokenizer = load_tokenizer(str(tiny_model_path))
    named = None if option else describe_tokenizer(tokenizer, str(tiny_model_path))
    path = write(tmp_path / "run", spoken(tokenizer, "while x:\n\treturn [b]"), tokenizer=named)
    model = ("--model", tiny_model_path) if option else ()
    result = run("inspect", path, "7:0", *model)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    assert r"\n" in result.stdout and r"\t" in result.stdout and "[b]" in result.stdout
    view = json.loads(run("inspect", path, "7:0", *model, "--json").stdout)
    assert "".join(token["text"] for token in view["tokens"]) == "while x:\n\treturn [b]"
    assert [token["top"][0]["text"] for token in view["tokens"]] == [
        token["text"] for token in view["tokens"]
    ]


def test_half_a_character_shows_its_piece_and_an_id_beyond_none(tiny_model_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model_path))
    decode = make_decode(tokenizer)
    halves = [decode(i) for i in tokenizer("é", add_special_tokens=False)["input_ids"]]
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(map(str, halves))
    assert decode(10**6) is None and decode(-1) is None


def test_the_space_that_sentencepiece_drops_is_kept() -> None:
    class Llama:
        def convert_ids_to_tokens(self, token: int) -> str:
            return "▁the"

        def decode(self, ids: list[int], clean_up_tokenization_spaces: bool) -> str:
            return "the"

    assert make_decode(Llama())(3) == " the"


def test_another_vocabulary_is_said(tmp_path: Path, tiny_model_path: Path) -> None:
    other = {"path": "elsewhere", "vocabulary_sha256": "0" * 64}
    path = write(tmp_path / "run", make_rollout("a"), tokenizer=other)
    result = run("inspect", path, "a:0", "--model", tiny_model_path)
    assert result.exit_code == 0
    assert "has another vocabulary than the run" in result.stderr


def test_a_tokenizer_that_is_gone_leaves_ids(tmp_path: Path) -> None:
    path = write(tmp_path / "run", make_rollout("a"), tokenizer={"path": "/nowhere/model"})
    result = run("inspect", path, "a:0")
    assert result.exit_code == 0
    assert "note: model '/nowhere/model'" in result.stderr
    assert run("inspect", path, "a:0", "--model", "/nowhere/model").exit_code == 2


def test_an_unknown_id_exits_3_with_the_closest(tmp_path: Path) -> None:
    path = write(
        tmp_path / "run", *(make_rollout("prompt", i) for i in range(4)), make_rollout("x")
    )
    result = run("inspect", path, "promt:2")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "promt:2: no such rollout; closest: prompt:2, " in result.stderr
    assert "x:0" not in result.stderr


def test_among_too_many_ids_the_closest_is_not_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "run", *(make_rollout("prompt", i) for i in range(4)))
    monkeypatch.setattr("rollout.inspection.MOST_COMPARED", 3)
    result = run("inspect", path, "promt:2")
    assert result.exit_code == 3
    assert "promt:2: no such rollout; ids look like prompt:0, " in result.stderr


def test_an_empty_run_has_no_ids(tmp_path: Path) -> None:
    path = write(tmp_path / "run")
    assert run("inspect", path).stdout.splitlines()[-1] == "0 of 0 rollouts"
    result = run("inspect", path, "a:0")
    assert result.exit_code == 3 and "the run is empty" in result.stderr

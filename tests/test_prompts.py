"""Prompts: rows become token ids once, here, with BOS exactly once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout.config import PromptsConfig
from rollout.errors import ConfigError
from rollout.prompts import PromptSet, load_prompts, load_tokenizer, tokenise


def load(tmp_path: Path, rows: list[dict[str, Any]], model: Path, **config: Any) -> PromptSet:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_prompts(PromptsConfig(dataset=str(file), **config), str(model))


@pytest.fixture(scope="module")
def tokenizer(tiny_model_path: Path) -> Any:
    return load_tokenizer(str(tiny_model_path))


@pytest.mark.parametrize("form", ["chat", "text"])
def test_bos_is_neither_doubled_nor_lost(tokenizer: Any, form: str) -> None:
    ids = tokenise("for loops", form, tokenizer, "0").ids.tolist()
    bos = tokenizer.bos_token_id
    assert ids[0] == bos and bos not in ids[1:]


def test_text_that_brings_its_own_bos_gets_no_second(tokenizer: Any) -> None:
    ids = tokenise(tokenizer.bos_token + "for loops", "text", tokenizer, "0").ids.tolist()
    assert ids == tokenise("for loops", "text", tokenizer, "0").ids.tolist()


def test_chat_takes_a_string_or_messages(tokenizer: Any) -> None:
    one = tokenise("why", "chat", tokenizer, "0")
    same = tokenise([{"role": "user", "content": "why"}], "chat", tokenizer, "0")
    assert one.ids.tolist() == same.ids.tolist()
    wanted = tokenizer.apply_chat_template(
        [{"role": "user", "content": "why"}], add_generation_prompt=True, return_dict=False
    )
    assert one.ids.tolist() == wanted


def test_a_prompt_set_says_where_it_comes_from(tmp_path: Path, tiny_model_path: Path) -> None:
    rows = [{"prompt": f"row {i}"} for i in range(5)]
    prompts = load(tmp_path, rows, tiny_model_path, limit=3)
    assert [p.prompt_id for p in prompts.prompts] == ["0", "1", "2"]
    assert prompts.prompts[1].text.find("row 1") >= 0
    assert (prompts.dataset["rows"], prompts.vocab_size, prompts.doubled_bos) == (5, 1024, 0)
    assert prompts.tokenizer["size"] <= prompts.vocab_size
    again = load(tmp_path, rows, tiny_model_path)
    assert again.dataset["fingerprint"] == prompts.dataset["fingerprint"]
    rows[4]["prompt"] = "changed"
    changed = load(tmp_path, rows, tiny_model_path)
    assert changed.dataset["fingerprint"] != prompts.dataset["fingerprint"]


def test_doubled_bos_in_the_data_is_counted_not_repaired(
    tmp_path: Path, tiny_model_path: Path, tokenizer: Any
) -> None:
    bos = tokenizer.bos_token
    rows = [{"prompt": bos + bos + "a"}, {"prompt": bos + "a"}, {"prompt": "a"}]
    prompts = load(tmp_path, rows, tiny_model_path, format="text")
    assert prompts.doubled_bos == 1
    assert prompts.prompts[0].ids[:2].tolist() == [tokenizer.bos_token_id] * 2


@pytest.mark.parametrize(
    ("rows", "config", "words"),
    [
        pytest.param(
            [{"prompt": "a"}],
            {"column": "question"},
            "no column 'question', it has prompt",
            id="column",
        ),
        pytest.param([{"prompt": 3}], {"format": "text"}, "row 0 holds int", id="not text"),
        pytest.param([{"prompt": "a"}], {"split": "test"}, "cannot be loaded", id="split"),
    ],
)
def test_what_the_dataset_does_not_have_is_an_error(
    tmp_path: Path, tiny_model_path: Path, rows: Any, config: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, rows, tiny_model_path, **config)


def test_a_file_that_is_not_there_is_an_error(tiny_model_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.jsonl is not there"):
        load_prompts(PromptsConfig(dataset="nowhere.jsonl"), str(tiny_model_path))


def test_a_model_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    for name in (str(tmp_path / "nowhere"), "./nowhere", "~/nowhere"):
        with pytest.raises(ConfigError, match="no tokenizer to be had: no such folder$"):
            load_tokenizer(name)
    with pytest.raises(ConfigError, match="no tokenizer to be had") as caught:
        load_tokenizer(str(tmp_path))
    assert "no such folder" not in str(caught.value)


def test_our_own_prompts_are_many_and_varied() -> None:
    lines = (Path(__file__).parent.parent / "configs" / "prompts.jsonl").read_text().splitlines()
    assert len({json.loads(line)["prompt"] for line in lines}) >= 64

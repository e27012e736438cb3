"""Prompts: rows become token ids once, here, with BOS exactly once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout.config import PromptsConfig
from rollout.errors import ConfigError
from rollout.prompts import (
    Chat,
    PromptSet,
    load_prompts,
    load_tokenizer,
    tokenise_chat,
    tokenise_text,
)


def load(tmp_path: Path, rows: list[dict[str, Any]], model: Path, **config: Any) -> PromptSet:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_prompts(PromptsConfig(dataset=str(file), **config), str(model))


@pytest.fixture(scope="module")
def tokenizer(tiny_model_path: Path) -> Any:
    return load_tokenizer(str(tiny_model_path))


def user(text: str, **about: Any) -> Chat:
    return Chat([{"role": "user", "content": text}], **about)


@pytest.mark.parametrize("form", ["chat", "text"])
def test_bos_is_neither_doubled_nor_lost(tokenizer: Any, form: str) -> None:
    if form == "chat":
        ids = tokenise_chat(user("for loops"), tokenizer, "0").ids.tolist()
    else:
        ids = tokenise_text("for loops", tokenizer, "0").ids.tolist()
    bos = tokenizer.bos_token_id
    assert ids[0] == bos and bos not in ids[1:]


def test_text_that_brings_its_own_bos_gets_no_second(tokenizer: Any) -> None:
    ids = tokenise_text(tokenizer.bos_token + "for loops", tokenizer, "0").ids.tolist()
    assert ids == tokenise_text("for loops", tokenizer, "0").ids.tolist()


def test_chat_takes_a_string_or_messages(
    tokenizer: Any, tmp_path: Path, tiny_model_path: Path
) -> None:
    wanted = tokenizer.apply_chat_template(
        [{"role": "user", "content": "why"}], add_generation_prompt=True, return_dict=False
    )
    for cell in ("why", [{"role": "user", "content": "why"}]):
        (prompt,) = load(tmp_path, [{"prompt": cell}], tiny_model_path).prompts
        assert prompt.ids.tolist() == wanted
        assert prompt.chat is not None
        assert prompt.chat.messages == [{"role": "user", "content": "why"}]


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


def test_tools_and_template_arguments_reach_the_template(
    tmp_path: Path, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    class Spy:
        chat_template = "a template"
        bos_token_id = None

        def __init__(self, tokenizer: Any) -> None:
            self.tokenizer = tokenizer

        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            seen.append({"messages": messages, **options})
            return "why"

        def __call__(self, *arguments: Any, **options: Any) -> Any:
            return self.tokenizer(*arguments, **options)

        def __len__(self) -> int:
            return len(self.tokenizer)

        def get_vocab(self) -> Any:
            return self.tokenizer.get_vocab()

    spy = Spy(load_tokenizer(str(tiny_model_path)))
    monkeypatch.setattr("rollout.prompts.load_tokenizer", lambda model: spy)
    tools = [{"type": "function", "function": {"name": "weather", "default": None}}]
    messages = [{"role": "user", "content": "why", "name": None}]
    rows = [{"prompt": messages, "tools": json.dumps(tools)}]
    given = {"tools": "tools", "template_kwargs": {"enable_thinking": False}}
    (prompt,) = load(tmp_path, rows, tiny_model_path, **given).prompts
    assert seen == [
        {
            "messages": [{"role": "user", "content": "why"}],
            "tools": tools,
            "tokenize": False,
            "add_generation_prompt": True,
            "enable_thinking": False,
        }
    ]
    assert prompt.chat is not None
    assert (prompt.chat.tools, prompt.chat.template_kwargs) == (tools, {"enable_thinking": False})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param({"tools": "tool"}, "prompts.tools: .* no column 'tool'", id="no column"),
        pytest.param({"tools": "prompt"}, "prompts.tools: row 0 is not JSON", id="not JSON"),
    ],
)
def test_tools_that_cannot_be_read_are_refused(
    tmp_path: Path, tiny_model_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, [{"prompt": "why"}], tiny_model_path, **settings)


def test_what_the_template_refuses_is_told_with_its_row(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no system role') }}")
    with pytest.raises(ConfigError, match="row 3: the chat template: no system role"):
        tokenise_chat(user("why"), tokenizer, "3")


def test_arguments_of_a_tool_call_are_an_object_for_the_template(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    call = {"type": "function", "function": {"name": "w", "arguments": '{"city": "Rome"}'}}
    chat = Chat([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert tokenise_chat(chat, tokenizer, "0").text == '{"city": "Rome"}'
    assert chat.messages[0]["tool_calls"] == [call], "the server gets what the dataset has"


@pytest.mark.parametrize("name", ["tokenize", "add_generation_prompt", "continue_final_message"])
def test_arguments_that_are_ours_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"template_kwargs: {name} cannot be set"):
        PromptsConfig(dataset="x", template_kwargs={name: True})

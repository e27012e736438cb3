"""Prompts: rows of a dataset as token ids, made here with the model's own tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.config import PromptsConfig
from rollout.errors import ConfigError
from rollout.files import is_missing_folder

FILE_LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


@dataclass(frozen=True, eq=False)
class Chat:
    """A conversation before its template: for engines that render it themselves."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Prompt:
    """One prompt, ready to send. `prompt_id` is the row of the dataset."""

    prompt_id: str
    ids: NDArray[np.int32]  # [P], as rendered here
    text: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)  # kept columns of the row
    chat: Chat | None = None  # what `ids` were rendered from, where it was a conversation


@dataclass(frozen=True, eq=False)
class PromptSet:
    """The prompts of a run, and what run.json keeps about where they came from."""

    prompts: tuple[Prompt, ...]
    dataset: dict[str, Any]  # path, split, rows, fingerprint
    tokenizer: dict[str, Any]  # path, hashes
    vocab_size: int  # rows of the model's head: every id must be below
    doubled_bos: int  # prompts that start with BOS twice


def load_tokenizer(model: str) -> Any:
    """The model's tokenizer; `ConfigError` where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        why = "no such folder" if is_missing_folder(model) else error
        raise ConfigError(f"model {model!r}: no tokenizer to be had: {why}") from error


def load_prompts(config: PromptsConfig, model: str) -> PromptSet:
    """Load, render and tokenise; raises `ConfigError` for what the dataset does not have."""
    tokenizer = load_tokenizer(model)
    rows = _load_dataset(config)
    _check_columns(config, rows.column_names)
    if config.format == "chat" and not tokenizer.chat_template:
        raise ConfigError(
            f"prompts.format: {model!r} has no chat template; set prompts.format=text (and "
            "engine.route=generate)"
        )
    chosen = rows.select(range(min(len(rows), config.limit or len(rows))))
    prompts = tuple(
        _make_prompt(row, config, tokenizer, str(index)) for index, row in enumerate(chosen)
    )
    bos = tokenizer.bos_token_id
    return PromptSet(
        prompts=prompts,
        dataset={
            "path": config.dataset,
            "split": config.split,
            "rows": len(rows),
            "fingerprint": _fingerprint(rows.select_columns(_columns(config))),
        },
        tokenizer=describe_tokenizer(tokenizer, model),
        vocab_size=vocabulary_size(tokenizer, model),
        doubled_bos=sum(p.ids[:2].tolist() == [bos, bos] for p in prompts),
    )


def _make_prompt(
    row: Mapping[str, Any], config: PromptsConfig, tokenizer: Any, prompt_id: str
) -> Prompt:
    value = row[config.column]
    if config.format == "text":
        prompt = tokenise_text(value, tokenizer, prompt_id)
    else:
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
        tools = None if config.tools is None else _tools(row[config.tools], prompt_id)
        chat = Chat(_without_nulls(messages), tools, config.template_kwargs)
        prompt = tokenise_chat(chat, tokenizer, prompt_id)
    return replace(prompt, extra={name: row[name] for name in config.keep})


def tokenise_chat(chat: Chat, tokenizer: Any, prompt_id: str) -> Prompt:
    """A conversation as a `Prompt`, through the model's chat template, ready for the answer.

    The template writes BOS itself, so its text is encoded without special tokens. Raises
    `ConfigError` for what the template refuses.
    """
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            [_with_parsed_calls(message) for message in chat.messages],
            tools=chat.tools,
            tokenize=False,
            add_generation_prompt=True,
            **chat.template_kwargs,
        )
    except (TemplateError, ValueError) as error:
        raise ConfigError(f"prompts: row {prompt_id}: the chat template: {error}") from error
    return replace(_encode(text, tokenizer, prompt_id, special=False), chat=chat)


def tokenise_text(text: Any, tokenizer: Any, prompt_id: str) -> Prompt:
    """Raw text as a `Prompt`, with the special tokens that the tokenizer adds, unless the text
    already starts with BOS."""
    if not isinstance(text, str):
        raise ConfigError(
            f"prompts: row {prompt_id} holds {type(text).__name__}, format text wants a string"
        )
    special = not (tokenizer.bos_token and text.startswith(tokenizer.bos_token))
    return _encode(text, tokenizer, prompt_id, special=special)


def _with_parsed_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """OpenAI writes the arguments of a tool call as JSON in a string; templates want the object,
    and servers parse it before they render, too."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_with_parsed_arguments(call) for call in calls]}


def _with_parsed_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function", {})
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return call  # free text stays text
    return {**call, "function": {**function, "arguments": parsed}}


def _encode(text: str, tokenizer: Any, prompt_id: str, *, special: bool) -> Prompt:
    ids = tokenizer(text, add_special_tokens=special)["input_ids"]
    if not ids:
        raise ConfigError(f"prompts: row {prompt_id} is empty, there is nothing to continue")
    return Prompt(prompt_id, np.array(ids, np.int32), text)


def _tools(cell: Any, prompt_id: str) -> Any:
    """A list of tools, or the JSON of one: Arrow has one type per column, and tools differ."""
    if not isinstance(cell, str):
        return _without_nulls(cell)
    try:
        return json.loads(cell)
    except ValueError as error:
        raise ConfigError(f"prompts.tools: row {prompt_id} is not JSON: {error}") from error


def _without_nulls(value: Any) -> Any:
    """Arrow fills what a message or tool lacks with nulls, and templates would print those."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(v) for key, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def describe_tokenizer(tokenizer: Any, path: str) -> dict[str, Any]:
    """What identifies a tokenizer: two that agree here give the same ids."""
    vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return {
        "path": path,
        "size": len(tokenizer),
        "vocabulary_sha256": _sha256(vocabulary),
        "chat_template_sha256": _sha256(str(tokenizer.chat_template or "")),
    }


def vocabulary_size(tokenizer: Any, model: str) -> int:
    """Rows of the model's head where its config is to be had, else the tokenizer's size."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError):
        return len(tokenizer)  # a tokenizer folder without a model is enough to collect
    return int(config.get_text_config().vocab_size)


def _load_dataset(config: PromptsConfig) -> Any:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    path = Path(config.dataset)
    loader = FILE_LOADERS.get(path.suffix)
    if loader and not path.is_file():
        raise ConfigError(
            f"prompts.dataset: {config.dataset} is not there; "
            "paths are relative to the current directory"
        )
    source: Mapping[str, Any] = (
        {"path": loader, "data_files": str(path)}
        if loader
        else {"path": config.dataset, "name": config.name}
    )
    try:
        return load_dataset(**source, split=config.split)
    except (OSError, ValueError, DatasetsError) as error:
        raise ConfigError(f"prompts.dataset: {config.dataset} cannot be loaded: {error}") from error


def _check_columns(config: PromptsConfig, names: list[str]) -> None:
    kept = [("keep", name) for name in config.keep]
    named = [("column", config.column), ("tools", config.tools), *kept]
    for key, name in named:
        if name is not None and name not in names:
            raise ConfigError(
                f"prompts.{key}: {config.dataset} has no column {name!r}, it has {', '.join(names)}"
            )


def _columns(config: PromptsConfig) -> list[str]:
    """Each once; what a run's dataset is recognised by."""
    names = [config.column, *config.keep, *([] if config.tools is None else [config.tools])]
    return list(dict.fromkeys(names))


def _fingerprint(rows: Any) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

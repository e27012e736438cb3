"""What is asked of /generate and of the chat endpoint, and the recorded answers of the latter."""

from __future__ import annotations

import copyreg
import io
import json
import pickle
from typing import Any

import numpy as np
import pytest
from builders import DATA, RECORDED, make_prompt

from rollout import errors
from rollout.engines.sglang.reply import parse_chat_reply
from rollout.engines.sglang.routes import BAN_PROCESSOR, ROUTES
from rollout.prompts import Chat
from rollout.sampling import SamplingParams

MESSAGES = [{"role": "user", "content": "Name a capital city."}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
REFUSED = {
    "chat_reject_without_meta_info": "return_sampling_mask requires return_meta_info=true",
    "chat_reject_top_p_only": "got top_k=1073741824",
    "chat_reject_stream": "not supported with streaming",
}


def wire(name: str) -> dict[str, Any]:
    cases: dict[str, Any] = json.loads((DATA / name / "wire.json").read_text())
    return cases


def chat_request(**settings: Any) -> dict[str, Any]:
    prompt = make_prompt(1, 2, chat=Chat(MESSAGES))
    return ROUTES["chat"].request(prompt, SamplingParams(top_k=20, **settings), "support", "m")


def test_chat_says_every_setting_since_it_has_defaults_of_its_own() -> None:
    assert chat_request(top_p=0.9, max_new_tokens=8, sampling_seed=3, min_new_tokens=2) == {
        "model": "m",
        "messages": MESSAGES,
        "stream": False,
        "logprobs": True,
        "return_sampling_mask": True,
        "sampling_logprobs_mode": "support",
        "return_meta_info": True,
        "return_token_ids": True,
        "separate_reasoning": False,
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.0,
        "max_tokens": 8,
        "min_tokens": 2,
        "seed": 3,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
    }


def test_a_colon_in_the_models_name_would_ask_for_an_adapter() -> None:
    prompt = make_prompt(1, chat=Chat(MESSAGES))
    request = ROUTES["chat"].request(prompt, SamplingParams(top_k=5), "support", "C:/model")
    assert request["model"] == "default"


def test_tools_and_template_arguments_pass_through() -> None:
    chat = Chat(MESSAGES, TOOLS, {"enable_thinking": False})
    params = SamplingParams(top_k=20)
    request = ROUTES["chat"].request(make_prompt(1, chat=chat), params, "selected", "m")
    assert request["tools"] == TOOLS
    assert request["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        pytest.param({"regex": "[0-9]+"}, {"regex": "[0-9]+"}, id="regex"),
        pytest.param(
            {"json_schema": '{"type": "object"}'},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "schema", "schema": {"type": "object"}},
                }
            },
            id="JSON schema",
        ),
        pytest.param(
            {"structural_tag": '{"type": "structural_tag", "format": {}}'},
            {"response_format": {"type": "structural_tag", "format": {}}},
            id="structural tag",
        ),
    ],
)
def test_a_grammar_has_its_form_in_chat(settings: dict[str, Any], wanted: dict[str, Any]) -> None:
    request = chat_request(**settings)
    assert request.items() >= wanted.items()
    assert not {"json_schema", "structural_tag"} & request.keys()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param({"spaces_between_special_tokens": False}, "route=generate", id="spaces"),
        pytest.param({"json_schema": "{"}, "json_schema: not JSON", id="schema"),
        pytest.param({"structural_tag": "<"}, "structural_tag: not JSON", id="tag"),
    ],
)
def test_what_chat_cannot_be_asked_is_refused(settings: dict[str, Any], words: str) -> None:
    params = SamplingParams(top_k=5, **settings)
    ROUTES["generate"].check(params)
    with pytest.raises(errors.ConfigError, match=words):
        ROUTES["chat"].check(params)


def test_a_prompt_without_messages_cannot_be_chatted() -> None:
    with pytest.raises(errors.ConfigError, match="prompt 7: has no messages"):
        ROUTES["chat"].request(make_prompt(1), SamplingParams(top_k=5), "support", "m")


@pytest.mark.parametrize("name", list(ROUTES))
def test_bans_are_sent_as_the_one_processor_that_masks_go_with(name: Any) -> None:
    params = SamplingParams(top_k=5, disallowed_token_ids=[3, 9])
    request = ROUTES[name].request(make_prompt(1, chat=Chat(MESSAGES)), params, "support", "m")
    assert request["custom_logit_processor"] == BAN_PROCESSOR
    assert request.get("sampling_params", request)["custom_params"] == {"token_ids": [3, 9]}


def test_the_ban_processor_is_a_reference_to_code_of_the_server() -> None:
    found = []

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found.append((module, name))
            return copyreg

    Unpickler(io.BytesIO(bytes.fromhex(json.loads(BAN_PROCESSOR)["callable"]))).load()
    assert found == [
        ("sglang.srt.sampling.custom_logit_processor", "DisallowedTokensLogitsProcessor")
    ]


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("key", ["chat", "chat_support"])
def test_every_recorded_chat_reply_is_a_completion(name: str, key: str) -> None:
    reply = wire(name)[key]["response"]
    choice = reply["choices"][0]
    meta = choice["meta_info"]
    got = parse_chat_reply(200, json.dumps(reply).encode())
    assert got.prompt_ids is not None
    assert got.prompt_ids.tolist() == choice["prompt_token_ids"]
    assert got.output_ids.tolist() == choice["response_token_ids"]
    rows = [got.support[t].tolist() for t in range(len(got.output_ids))]
    assert rows == meta["output_token_sampling_mask"]
    assert got.text == choice["message"]["content"]
    assert (got.support_logprobs is None) == (key == "chat")
    assert got.full_logprobs is None, "not asked for when it was recorded"
    assert [tuple(s) for s in got.weight_versions] == [("default", 0, len(got.output_ids))]


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("key", list(REFUSED))
def test_every_recorded_refusal_has_the_servers_words(name: str, key: str) -> None:
    case = wire(name)[key]
    with pytest.raises(errors.EngineRefused, match=REFUSED[key]):
        parse_chat_reply(case["status"], json.dumps(case["response"]).encode())


@pytest.mark.parametrize("name", RECORDED)
def test_completions_has_no_mask_in_any_version(name: str) -> None:
    case = wire(name)["completions_ignores_mask"]
    assert case["status"] == 200
    assert "output_token_sampling_mask" not in json.dumps(case["response"])


def changed(**changes: Any) -> bytes:
    reply = wire(RECORDED[0])["chat_support"]["response"]
    choice = reply["choices"][0]
    for name, value in changes.items():
        place = choice["meta_info"] if name in choice["meta_info"] else choice
        if value is None:
            del place[name]
        else:
            place[name] = value
    return json.dumps(reply).encode()


def test_0_5_17_spells_the_output_ids_otherwise() -> None:
    ids = wire(RECORDED[0])["chat_support"]["response"]["choices"][0]["response_token_ids"]
    body = changed(response_token_ids=None, token_ids=ids)
    assert parse_chat_reply(200, body).output_ids.tolist() == ids


def test_the_text_beside_full_logprobs_is_ignored() -> None:
    ids = wire(RECORDED[0])["chat_support"]["response"]["choices"][0]["response_token_ids"]
    entries = [[-0.5 - t, token, 'a "quoted", [token]'] for t, token in enumerate(ids)]
    entries[1][0] = float("nan")
    choice = json.loads(changed())["choices"][0]
    choice["meta_info"]["output_token_logprobs"] = entries
    got = parse_chat_reply(200, json.dumps({"choices": [choice]}).encode())
    assert got.full_logprobs is not None and got.full_logprobs.dtype == np.float32
    assert np.isnan(got.full_logprobs[1])
    assert got.full_logprobs[[0, 2]].tolist() == [-0.5, -2.5]


def test_a_message_with_tool_calls_has_no_text_of_its_own() -> None:
    body = changed(message={"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]})
    assert parse_chat_reply(200, body).text is None


def test_half_a_character_in_a_message_keeps_its_ids() -> None:
    body = changed(message={"role": "assistant", "content": "\ud83d"})
    assert parse_chat_reply(200, body).text == "\ud83d"


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        pytest.param({"meta_info": None}, errors.SamplingMaskMissing, "router", id="no meta_info"),
        pytest.param(
            {"output_token_sampling_mask": None}, errors.SamplingMaskMissing, "router", id="no mask"
        ),
        pytest.param(
            {"output_token_sampling_mask": None, "response_token_ids": None,
             "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}},
            errors.GenerationAborted, "waiting queue", id="aborted in the queue",
        ),
        pytest.param(
            {"response_token_ids": None}, errors.ReplyMalformed, "no response_tok", id="no ids"
        ),
        pytest.param(
            {"prompt_token_ids": None}, errors.ReplyMalformed, "no prompt_token_ids", id="no prompt"
        ),
        pytest.param(
            {"prompt_tokens": 3}, errors.PromptTokenCount, "prompt_tokens is 3", id="other prompt"
        ),
    ],
)  # fmt: skip
def test_a_broken_chat_reply_has_its_error(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        parse_chat_reply(200, changed(**changes))


def test_more_than_one_choice_is_malformed() -> None:
    reply = wire(RECORDED[0])["chat"]["response"]
    reply["choices"] *= 2
    with pytest.raises(errors.ReplyMalformed, match="2 choices"):
        parse_chat_reply(200, json.dumps(reply).encode())

"""The two endpoints that return a sampling mask: what each is asked, and how it answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

from rollout.engines.base import Completion
from rollout.engines.sglang.reply import parse_chat_reply, parse_reply
from rollout.errors import ConfigError
from rollout.prompts import Prompt
from rollout.sampling import SamplingParams

RouteName = Literal["generate", "chat"]
Parse = Callable[[int, bytes], Completion]
"""From status and body to a completion; can be sent to another process."""

BAN_PROCESSOR = json.dumps(
    {
        # a pickle by reference: the processor's code is the server's own
        "callable": (
            b"csglang.srt.sampling.custom_logit_processor\nDisallowedTokensLogitsProcessor\n."
        ).hex()
    }
)
"""The one custom logit processor that SGLang combines with a sampling mask."""

CHAT_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}


class Route(NamedTuple):
    """One endpoint; `request` takes prompt, settings, the mode of sampling logprobs, and the name
    under which the model is served."""

    name: RouteName
    path: str
    request: Callable[[Prompt, SamplingParams, str, str], dict[str, Any]]
    parse: Callable[[Prompt], Parse]
    check: Callable[[SamplingParams], None]  # raises `ConfigError` for what it cannot be asked


def _generate_request(
    prompt: Prompt, params: SamplingParams, mode: str, model: str
) -> dict[str, Any]:
    return {
        "input_ids": prompt.ids.tolist(),
        "sampling_params": params.to_request(),
        "stream": False,
        "return_logprob": True,
        "return_sampling_mask": True,
        "sampling_logprobs_mode": mode,
        "return_prompt_token_ids": True,
        **_ban(params),
    }


def _generate_parse(prompt: Prompt) -> Parse:
    return partial(parse_reply, prompt_ids=prompt.ids.tolist())


def _chat_request(prompt: Prompt, params: SamplingParams, mode: str, model: str) -> dict[str, Any]:
    """Everything is said explicitly: what is left out, SGLang takes from the model's own
    generation config."""
    chat = prompt.chat
    if chat is None:
        raise ConfigError(
            f"prompt {prompt.prompt_id}: has no messages, which engine.route chat sends; "
            "set engine.route=generate"
        )
    sampling = params.to_request()
    constraint = _response_format(sampling.pop("json_schema", None), sampling)
    request = {
        # routers want the model's name; SGLang takes any, but a colon in it for a LoRA adapter's
        "model": "default" if ":" in model else model,
        "messages": chat.messages,
        "stream": False,
        "logprobs": True,
        "return_sampling_mask": True,
        "sampling_logprobs_mode": mode,
        "return_meta_info": True,
        "return_token_ids": True,
        "separate_reasoning": False,  # the text stays one
        **{CHAT_NAMES.get(name, name): value for name, value in sampling.items()},
        **constraint,
        **_ban(params),
    }
    if chat.tools is not None:
        request["tools"] = chat.tools
    if chat.template_kwargs:
        request["chat_template_kwargs"] = chat.template_kwargs
    return request


def _response_format(schema: str | None, sampling: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema or a structural tag, which chat takes as OpenAI's response_format."""
    if schema is not None:
        named = {"name": "schema", "schema": json.loads(schema)}
        return {"response_format": {"type": "json_schema", "json_schema": named}}
    tag = sampling.pop("structural_tag", None)
    return {} if tag is None else {"response_format": json.loads(tag)}


def _chat_parse(prompt: Prompt) -> Parse:
    return parse_chat_reply


def _chat_check(params: SamplingParams) -> None:
    if not params.spaces_between_special_tokens:
        raise ConfigError(
            "sampling.spaces_between_special_tokens: cannot be asked of /v1/chat/completions; "
            "remove it or set engine.route=generate"
        )
    for name in ("json_schema", "structural_tag"):
        text = getattr(params, name)
        try:
            json.loads(text or "{}")
        except ValueError as error:
            raise ConfigError(f"sampling.{name}: not JSON: {error}") from error


def _ban(params: SamplingParams) -> dict[str, Any]:
    return {"custom_logit_processor": BAN_PROCESSOR} if params.disallowed_token_ids else {}


ROUTES: dict[RouteName, Route] = {
    "generate": Route(
        "generate", "/generate", _generate_request, _generate_parse, lambda params: None
    ),
    "chat": Route("chat", "/v1/chat/completions", _chat_request, _chat_parse, _chat_check),
}

"""What each probe finds out, from local endpoints that behave like each release."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from aiohttp import web
from endpoints import (
    BEFORE,
    WIRE,
    Answer,
    changed,
    chat_reply,
    examined,
    refused,
    reply,
    row,
    selected_alone,
    without_mask,
)


def test_an_ordinary_server_is_usable_as_it_is() -> None:
    found = examined()
    assert found.usable and found.reason == "masks arrive, and rollouts can be collected"
    assert {probe.name: probe.value for probe in found.probes} == {
        "endpoint": "SGLang",
        "version": "0.5.23",
        "model": "smollm2-135m-instruct",
        "sampler": "pytorch",
        "top_k": "at most 4096",
        "speculative decoding": "off",
        "deterministic": "off",
        "custom logit processors": "off",
        "weight version": "default",
        "mask on /generate": "yes",
        "mask on /v1/chat/completions": "yes",
        "support logprobs": "of every id of the support",
        "full logprobs": "after temperature",
        "sampling_params": "arrive",
        "seeds": "honoured",
    }
    assert {probe.ok for probe in found.probes} == {True}
    assert row(found, "top_k")[1] == "auto becomes 512"


@pytest.mark.parametrize(
    ("version", "backend", "sampler", "top_k"),
    [
        pytest.param(
            "0.5.17",
            "pytorch",
            "filters joint, ties cut, support reconstructed, not what was sampled from",
            "no limit",
            id="reconstructed",
        ),
        pytest.param(
            "0.5.20",
            "flashinfer",
            "filters joint (sequential once min_p is used), ties kept: a support may exceed top_k, "
            "support captured",
            "at most 4096",
            id="flashinfer",
        ),
        pytest.param(
            "0.6.0",
            "pytorch",
            "filters joint, ties cut, support captured",
            "at most 4096",
            id="newer than any that is known",
        ),
    ],
)
def test_the_sampler_follows_from_release_and_backend(
    version: str, backend: str, sampler: str, top_k: str
) -> None:
    found = examined(version=version, sampling_backend=backend)
    assert row(found, "sampler") == (backend, sampler, version != "0.5.17")
    assert row(found, "top_k") == (top_k, "auto becomes 512", True)


def test_a_cap_that_makes_auto_greedy_is_said() -> None:
    found = examined(sampling_mask_max_tokens=64)
    value, detail, ok = row(found, "top_k")
    assert (value, ok) == ("at most 64", False)
    assert detail.startswith("auto becomes 1, which is greedy; set a number")
    assert found.as_yaml().endswith("  top_k: auto  # 1 here\n")


def test_a_release_without_masks_is_named() -> None:
    found = examined(without_mask, version="0.5.15")
    value, detail, ok = row(found, "version")
    assert (value, ok) == ("0.5.15", False)
    assert "has no sampling masks; they came with 0.5.16" in detail
    assert row(found, "sampler") == ("unknown", "", None)
    assert not found.usable and found.config is None


def test_the_recorded_support_reply_is_read() -> None:
    recorded = copy.deepcopy(WIRE["generate_support_logprobs"]["response"])
    recorded["meta_info"]["prompt_tokens"] = 1
    found = examined(lambda asked: recorded if asked.get("return_sampling_mask") else reply(asked))
    assert row(found, "support logprobs") == ("of every id of the support", "", True)
    assert row(found, "full logprobs")[0] == "unknown"  # this request asked for no other ids


def test_support_logprobs_are_told_by_what_comes_not_by_the_version() -> None:
    found = examined(selected_alone, version="0.5.23")
    assert row(found, "support logprobs")[::2] == ("of the sampled id alone", False)
    assert row(found, "full logprobs")[0] == "after temperature"
    assert found.usable and found.config is not None
    assert found.config["engine"]["support_logprobs"] is False


@pytest.mark.parametrize("mode", [reply, selected_alone], ids=["support", "selected"])
def test_logprobs_before_temperature_are_found(mode: Answer) -> None:
    def before(asked: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = mode(asked)
        other = reply(asked, BEFORE)["meta_info"]
        for key in ("output_token_logprobs", "output_top_logprobs"):
            if key in other:
                answer["meta_info"][key] = other[key]
        return answer

    value, detail, ok = row(examined(before), "full logprobs")
    assert (value, ok) == ("before temperature", False)
    assert "SGLANG_RETURN_ORIGINAL_LOGPROB" in detail


@pytest.mark.parametrize(
    ("generate", "words"),
    [
        pytest.param(
            lambda asked: reply(asked, support=(0,)), "no token", id="singletons say nothing"
        ),
        pytest.param(
            lambda asked: reply(asked, {0: 0.9, 1: 1e-9, 2: 0.1}),
            "off by 2.79 nats if after temperature, by 1.51 if before",
            id="neither fits",
        ),
        pytest.param(changed(output_top_logprobs="?"), "output_top_logprobs: ", id="unreadable"),
    ],
)
def test_full_logprobs_that_tell_nothing_are_unknown(generate: Answer, words: str) -> None:
    value, detail, ok = row(examined(generate), "full logprobs")
    assert (value, ok) == ("unknown", None)
    assert detail.startswith(words)


@pytest.mark.parametrize(
    ("info", "words"),
    [
        pytest.param({}, "the reply has no sampling mask", id="nobody to blame"),
        pytest.param(
            {"frontend": "rust"}, "SGLang's rust front end returns no", id="another front end"
        ),
    ],
)
def test_a_mask_that_does_not_come_has_a_culprit(info: dict[str, Any], words: str) -> None:
    found = examined(without_mask, chat=lambda asked: chat_reply(None, [5]), **info)
    value, detail, ok = row(found, "mask on /generate")
    assert (value, ok) == ("dropped", False)
    assert detail.startswith(words)
    assert not found.usable and found.reason == f"mask on /generate dropped: {detail}"
    assert row(found, "support logprobs") == ("unknown", "no mask to tell it by", None)
    assert row(found, "full logprobs") == ("unknown", "no mask to tell it by", None)
    assert row(found, "endpoint")[2] is (not info)


SPECULATIVE = "return_sampling_mask is not supported with speculative decoding."


def test_speculative_decoding_that_loses_the_mask_is_refused_with_the_servers_words() -> None:
    def eagle(asked: dict[str, Any]) -> Any:
        return refused(SPECULATIVE)(asked) if asked.get("return_sampling_mask") else reply(asked)

    found = examined(eagle, speculative_algorithm="EAGLE")
    value, detail, ok = row(found, "speculative decoding")
    assert (value, ok) == ("EAGLE", False)
    assert "start it without" in detail
    assert row(found, "mask on /generate") == ("refused", f"HTTP 400: {SPECULATIVE}", False)
    assert found.reason == f"mask on /generate refused: HTTP 400: {SPECULATIVE}"


def test_speculative_decoding_with_masks_is_fine() -> None:
    found = examined(speculative_algorithm="DFLASH")
    assert row(found, "speculative decoding") == (
        "DFLASH",
        "with sampling masks, but not with min_p",
        True,
    )
    assert found.usable


NO_TEMPLATE = (
    "Cannot use chat template functions because tokenizer.chat_template is not set and no template "
    "argument was passed!"
)


@pytest.mark.parametrize(
    ("chat", "value", "detail", "ok"),
    [
        pytest.param(
            refused(NO_TEMPLATE), "no chat template", "render prompts yourself", True, id="template"
        ),
        pytest.param(refused("no"), "refused", "HTTP 400: no", False, id="refused"),
        pytest.param(
            lambda asked: chat_reply({}, [5]),
            "dropped",
            "the chat route has it",
            False,
            id="before 18",
        ),
        pytest.param(
            lambda asked: chat_reply({"output_token_sampling_mask": [[5]]}, None),
            "without ids",
            "no response_token_ids",
            False,
            id="without ids",
        ),
        pytest.param(
            lambda asked: web.Response(text="<html>"), "unknown", "not a chat", None, id="HTML"
        ),
        pytest.param(lambda asked: {"choices": []}, "dropped", "the chat", False, id="no choice"),
    ],
)
def test_the_chat_route_is_told_apart(
    chat: Answer, value: str, detail: str, ok: bool | None
) -> None:
    found = examined(chat=chat)
    got = row(found, "mask on /v1/chat/completions")
    assert got[::2] == (value, ok)
    assert got[1].startswith(detail)
    assert found.usable


def unseeded() -> Answer:
    drawn = iter(range(100, 200))

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        params = asked["sampling_params"]
        seed = next(drawn) if "sampling_seed" in params else 0
        return reply(asked | {"sampling_params": params | {"sampling_seed": seed}})

    return answer


def one_seed(asked: dict[str, Any]) -> dict[str, Any]:
    return reply(asked | {"sampling_params": asked["sampling_params"] | {"sampling_seed": 3}})


@pytest.mark.parametrize(
    ("generate", "deterministic", "wanted"),
    [
        pytest.param(reply, True, ("honoured", "", True), id="honoured"),
        pytest.param(
            unseeded(),
            False,
            ("ignored", "needs --enable-deterministic-inference", True),
            id="ignored",
        ),
        pytest.param(
            unseeded(),
            True,
            ("ignored", "something on the way drops sampling_seed", False),
            id="dropped",
        ),
        pytest.param(one_seed, True, ("unknown", "two seeds gave the same tokens", None), id="one"),
    ],
)
def test_seeds_are_told_by_what_they_repeat(
    generate: Answer, deterministic: bool, wanted: tuple[str, str, bool | None]
) -> None:
    found = examined(generate, enable_deterministic_inference=deterministic)
    assert row(found, "seeds") == wanted
    assert row(found, "deterministic")[0] == ("on" if deterministic else "off")


@pytest.mark.parametrize("name", ["seeds", "sampling_params"])
@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        pytest.param(refused("full", 503), "HTTP 503: full", id="busy"),
        pytest.param(lambda asked: {}, "not a /generate reply: ", id="not a reply"),
    ],
)
def test_a_question_without_an_answer_is_unknown(name: str, answer: Answer, detail: str) -> None:
    found = examined(
        lambda asked: reply(asked) if "return_sampling_mask" in asked else answer(asked)
    )
    got = row(found, name)
    assert got[::2] == ("unknown", None)
    assert got[1].startswith(detail)
    assert found.usable

"""SGLangEngine over real HTTP, against a local server that misbehaves on request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from builders import DATA, make_prompt
from loopback import served

from rollout import errors
from rollout.engines.sglang.engine import SGLangEngine
from rollout.prompts import Chat
from rollout.sampling import SamplingParams

WIRE: dict[str, Any] = json.loads((DATA / "sglang_0.5.23_cpu_pytorch" / "wire.json").read_text())
PARAMS = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, max_new_tokens=2)


def good_reply(request: dict[str, Any]) -> dict[str, Any]:
    """One greedy token for the prompt that was asked about."""
    return {
        "text": "a",
        "output_ids": [7],
        "prompt_token_ids": request["input_ids"],
        "meta_info": {
            "finish_reason": {"type": "length", "length": 1},
            "prompt_tokens": len(request["input_ids"]),
            "completion_tokens": 1,
            "output_token_logprobs": [[-0.5, 7, None]],
            "output_token_sampling_mask": [[7]],
            "output_token_sampling_logprobs": [[0.0]],
            "output_token_sampling_mask_length": 1,
        },
    }


def chat_reply(request: dict[str, Any]) -> dict[str, Any]:
    """The same as a chat: the server renders every conversation as the ids 5 and 6."""
    reply = good_reply({"input_ids": [5, 6]})
    choice = {
        "message": {"role": "assistant", "content": "a"},
        "prompt_token_ids": [5, 6],
        "response_token_ids": reply["output_ids"],
        "meta_info": reply["meta_info"],
    }
    return {"choices": [choice]}


@asynccontextmanager
async def server(
    generate: Callable[[dict[str, Any]], Any], api_key: str | None = None, **info: Any
) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """A server whose /generate and chat are `generate`; yields its URL and the requests it got."""
    asked: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        if api_key is not None and request.headers.get("Authorization") != f"Bearer {api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        asked.append(await request.json())
        reply = generate(asked[-1])
        return reply if isinstance(reply, web.Response) else web.json_response(reply)

    async def described(request: web.Request) -> web.Response:
        if "only" in info and request.path not in info["only"]:
            return web.Response(status=404)
        if api_key is not None and request.headers.get("Authorization") != f"Bearer {api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        case = "get_server_info" if "server" in request.path else "get_model_info"
        return web.json_response(WIRE[case]["response"] | info)

    app = web.Application()
    app.router.add_post("/generate", answer)
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_get("/server_info", described)
    app.router.add_get("/model_info", described)
    app.router.add_get("/get_server_info", described)
    app.router.add_get("/get_model_info", described)
    async with served(app) as url:
        yield url, asked


def ask(generate: Callable[[dict[str, Any]], Any], prompt: list[int], **info: Any) -> Any:
    """Enter an engine, generate once, return (completion, engine, requests after the probe)."""

    async def run() -> Any:
        async with server(generate, **info) as (url, asked):
            async with SGLangEngine(url, vocab_size=100) as engine:
                completion = await engine.generate(make_prompt(*prompt), PARAMS)
            return completion, engine, asked[1:]

    return asyncio.run(run())


def test_request_asks_for_everything_replay_needs() -> None:
    completion, _, (request,) = ask(good_reply, [5, 6])
    assert request == {
        "input_ids": [5, 6],
        "sampling_params": PARAMS.to_request(),
        "stream": False,
        "return_logprob": True,
        "return_sampling_mask": True,
        "sampling_logprobs_mode": "support",
        "return_prompt_token_ids": True,
    }
    assert completion.output_ids.tolist() == [7]


def test_one_logprob_per_token_can_be_asked_for() -> None:
    async def run() -> Any:
        async with (
            server(good_reply) as (url, asked),
            SGLangEngine(url, vocab_size=100, support_logprobs=False),
        ):
            return asked

    assert [request["sampling_logprobs_mode"] for request in asyncio.run(run())] == ["selected"]


@pytest.mark.parametrize(
    ("info", "params", "wanted"),
    [
        pytest.param({}, {}, ("joint", "cut", "captured"), id="pytorch sampler"),
        pytest.param(
            {"sampling_backend": "flashinfer"}, {}, ("joint", "keep", "captured"), id="flashinfer"
        ),
        pytest.param(
            {"sampling_backend": "flashinfer"},
            {"min_p": 0.1},
            ("sequential", "keep", "captured"),
            id="flashinfer with min_p",
        ),
        pytest.param(
            {"version": "0.5.19", "sampling_backend": "flashinfer"},
            {},
            ("joint", "cut", "reconstructed"),
            id="before supports were captured",
        ),
    ],
)
def test_meta_says_how_this_server_samples(
    info: dict[str, Any], params: dict[str, Any], wanted: tuple[str, ...]
) -> None:
    _, engine, _ = ask(good_reply, [5], **info)
    meta = engine.meta(SamplingParams(top_k=5, **params))
    assert (meta["filter_order"], meta["tie_policy"], meta["support_source"]) == wanted
    assert meta["version"] == engine.info.version


def test_cap_comes_from_the_server() -> None:
    _, engine, _ = ask(good_reply, [5], sampling_mask_max_tokens=64)
    engine.check(SamplingParams(top_k=64))
    with pytest.raises(errors.NotReplayable, match="at most 64"):
        engine.check(SamplingParams(top_k=65))
    with pytest.raises(errors.NotReplayable, match="disallowed_token_ids"):
        engine.check(SamplingParams(top_k=5, logit_bias={"3": float("-inf")}))


@pytest.mark.parametrize("prompt_id", [100, -1], ids=str)
def test_an_id_that_would_kill_the_server_is_not_sent(prompt_id: int) -> None:
    with pytest.raises(errors.IdOutsideVocabulary, match="would kill the server"):
        ask(good_reply, [1, prompt_id])


def test_a_server_that_drops_the_mask_fails_before_any_prompt() -> None:
    def without_mask(request: dict[str, Any]) -> dict[str, Any]:
        reply = good_reply(request)
        del reply["meta_info"]["output_token_sampling_mask"]
        return reply

    with pytest.raises(errors.SamplingMaskMissing, match=r"127.0.0.1:\d+/generate: .*router"):
        ask(without_mask, [5])


def test_the_reply_stays_with_the_error() -> None:
    answers = iter([good_reply, lambda request: web.Response(status=503, text="queue is full")])

    with pytest.raises(errors.EngineBusy, match="HTTP 503: queue is full") as caught:
        ask(lambda request: next(answers)(request), [5])
    assert caught.value.body == b"queue is full"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        pytest.param("http://127.0.0.1:9", "no answer", id="nobody listens"),
        pytest.param("localhost", "not a URL|no answer", id="not a URL"),
    ],
)
def test_nobody_there(url: str, words: str) -> None:
    async def enter() -> None:
        async with SGLangEngine(url, vocab_size=10):
            pass

    with pytest.raises(errors.EngineUnreachable, match=words):
        asyncio.run(enter())


def test_another_kind_of_server_is_told_apart() -> None:
    async def run() -> None:
        async with served(web.Application()) as url, SGLangEngine(url, vocab_size=10):
            pass

    with pytest.raises(errors.EngineRefused, match="HTTP 404.*is this an SGLang server"):
        asyncio.run(run())


def test_chat_takes_the_prompt_ids_from_the_server() -> None:
    async def run() -> Any:
        prompt = make_prompt(5, 7, chat=Chat([{"role": "user", "content": "why"}]))
        async with (
            server(chat_reply) as (url, asked),
            SGLangEngine(url, vocab_size=100, route="chat") as engine,
        ):
            return await engine.generate(prompt, PARAMS), asked, engine.meta(PARAMS)

    completion, (_, request), meta = asyncio.run(run())
    assert request["messages"] == [{"role": "user", "content": "why"}]
    assert completion.prompt_ids.tolist() == [5, 6]
    assert (completion.text, meta["route"]) == ("a", "chat")


def test_chat_before_0_5_18_is_refused_before_a_request() -> None:
    async def run() -> Any:
        async with server(chat_reply, version="0.5.17") as (url, asked):
            with pytest.raises(errors.EngineRefused, match="0.5.17 ignores"):
                async with SGLangEngine(url, vocab_size=100, route="chat"):
                    pass
            return asked

    assert asyncio.run(run()) == []


def test_a_top_k_of_the_whole_vocabulary_is_refused() -> None:
    _, engine, _ = ask(good_reply, [5], version="0.5.19")
    engine.check(SamplingParams(top_k=99))
    with pytest.raises(errors.NotReplayable, match="got 100, must be below the vocabulary of 100"):
        engine.check(SamplingParams(top_k=100))


def test_the_api_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    async def enter() -> None:
        async with (
            server(good_reply, api_key="sk-secret") as (url, _),
            SGLangEngine(url, vocab_size=100) as engine,
        ):
            assert "sk-secret" not in repr(vars(engine.info)) + repr(engine.meta(PARAMS))

    with pytest.raises(errors.EngineRefused, match="HTTP 401.*SGLANG_API_KEY") as caught:
        asyncio.run(enter())
    monkeypatch.setenv("SGLANG_API_KEY", "sk-wrong")
    with pytest.raises(errors.EngineRefused, match="HTTP 401") as caught:
        asyncio.run(enter())
    assert "sk-wrong" not in str(caught.value)
    monkeypatch.setenv("SGLANG_API_KEY", "sk-secret\n")
    asyncio.run(enter())


def versioned(*versions: str) -> Callable[[dict[str, Any]], Any]:
    """Replies as before 0.5.19: each names one version, that of its end."""
    names = iter(versions)

    def reply(request: dict[str, Any]) -> dict[str, Any]:
        good = good_reply(request)
        good["meta_info"]["weight_version"] = next(names)
        return good

    return reply


def test_before_0_5_19_a_version_counts_only_if_it_was_there_before() -> None:
    async def run() -> list[list[str]]:
        answers = versioned("v1", "v1", "v2", "v2")
        info = {"version": "0.5.18", "weight_version": "v1"}
        async with (
            server(answers, **info) as (url, _),
            SGLangEngine(url, vocab_size=100) as engine,
        ):
            got = [await engine.generate(make_prompt(5), PARAMS) for _ in range(3)]
            return [[span.version for span in one.weight_versions] for one in got]

    assert asyncio.run(run()) == [["v1"], [], ["v2"]]


OLDER = ("/get_server_info", "/get_model_info")


def test_a_router_that_passes_masks_is_used_but_not_for_what_it_drops() -> None:
    completion, engine, _ = ask(good_reply, [5], only=OLDER)
    assert completion.output_ids.tolist() == [7]
    engine.check(SamplingParams(top_k=5, stop=["."]))
    with pytest.raises(errors.EngineRefused, match="stop_regex: .* is a router, which drops it"):
        engine.check(SamplingParams(top_k=5, stop_regex=["a+"]))


def test_sglang_router_is_refused_by_its_name() -> None:
    with pytest.raises(errors.EngineRefused, match="is sglang-router, which drops"):
        ask(good_reply, [5], only=OLDER, router_manager=True)


def test_auto_stays_below_the_vocabulary() -> None:
    _, engine, _ = ask(good_reply, [5])
    resolved = engine.resolve(SamplingParams(top_k="auto"))
    assert resolved.top_k == 99
    engine.check(resolved)


def test_a_probe_that_breaks_a_rule_makes_the_engine_unusable() -> None:
    def one_row_too_many(request: dict[str, Any]) -> dict[str, Any]:
        reply = good_reply(request)
        reply["meta_info"]["output_token_sampling_mask"] *= 2
        return reply

    with pytest.raises(errors.ReplyMalformed, match="cannot be recorded"):
        ask(one_row_too_many, [5])


def test_a_password_in_a_url_is_refused_by_every_client_without_showing_it() -> None:
    with pytest.raises(errors.ConfigError, match="SGLANG_API_KEY") as caught:
        SGLangEngine("http://me:s3cret@127.0.0.1:9", vocab_size=10)
    assert "s3cret" not in str(caught.value)

"""VLLMEngine over real HTTP, on constructed replies: no live vLLM has answered these tests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from builders import make_prompt
from loopback import served
from vllm_server import (
    PARAMS,
    Answer,
    Asked,
    after_the_probe,
    ask,
    good,
    reply,
    server,
    spoiled,
    with_usage,
)

import rollout
from rollout import errors
from rollout.engines.parse_process import INLINE_BYTES
from rollout.engines.vllm.engine import VLLMEngine
from rollout.sampling import SamplingParams


def test_it_is_exported() -> None:
    assert rollout.VLLMEngine is VLLMEngine


# ------------------------------------------------------------------------- requests


def test_the_request_says_everything_in_vllms_words() -> None:
    params = PARAMS.model_copy(
        update={
            "min_p": 0.05,
            "sampling_seed": 11,
            "stop": ["END"],
            "stop_token_ids": [3],
            "min_new_tokens": 1,
            "json_schema": '{"type":"object"}',
        }
    )
    _, _, (probe, request) = ask(params=params)
    assert (probe["token_ids"], probe["sampling_params"]["max_tokens"]) == ([1], 4)
    assert request == {
        "model": "served",
        "token_ids": [5, 6],
        "stream": False,
        "sampling_params": {
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 20,
            "min_p": 0.05,
            "max_tokens": 2,
            "min_tokens": 1,
            "logprobs": 0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop": ["END"],
            "stop_token_ids": [3],
            "ignore_eos": False,
            "skip_special_tokens": True,
            "spaces_between_special_tokens": True,
            "include_stop_str_in_output": False,
            "seed": 11,
            "structured_outputs": {"json": '{"type":"object"}'},
        },
    }


def test_greedy_is_asked_for_as_temperature_1_with_top_k_1() -> None:
    """A server that returns masks refuses temperature 0."""
    _, _, (_, request) = ask(params=SamplingParams(temperature=0.0))
    sent = request["sampling_params"]
    assert (sent["temperature"], sent["top_k"]) == (1.0, 1)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        pytest.param({"top_k": None}, errors.NotReplayable, "must be finite", id="no top_k"),
        pytest.param({"top_k": 100}, errors.NotReplayable, "below the vocabulary", id="all ids"),
        pytest.param(
            {"temperature": 0.005},
            errors.NotReplayable,
            "got 0.005, wanted 0 or at least 0.01; vLLM samples at 0.01 instead",
            id="raised temperature",
        ),
        pytest.param({"temperature": 2.5}, errors.ConfigError, "at most 2; lower it", id="hot"),
        pytest.param(
            {"stop_regex": ["a+"]}, errors.ConfigError, "vLLM has no such stop", id="stop_regex"
        ),
        pytest.param(
            {"disallowed_token_ids": [4]}, errors.ConfigError, "has no ban of ids", id="ban"
        ),
        pytest.param(
            {"logit_bias": {"4": float("-inf")}}, errors.NotReplayable, "no form in JSON", id="bias"
        ),
        pytest.param({"repetition_penalty": 1.1}, errors.NotReplayable, "must be 1", id="penalty"),
    ],
)
def test_what_it_cannot_serve_is_refused(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        VLLMEngine("http://localhost", vocab_size=100).check(PARAMS.model_copy(update=change))


@pytest.mark.parametrize(("vocab_size", "top_k"), [(49152, 512), (100, 99)])
def test_auto_is_a_number_below_the_vocabulary(vocab_size: int, top_k: int) -> None:
    engine = VLLMEngine("http://localhost", vocab_size=vocab_size)
    assert engine.resolve(PARAMS.model_copy(update={"top_k": "auto"})).top_k == top_k
    assert engine.resolve(PARAMS) is PARAMS


def test_a_prompt_outside_the_vocabulary_is_not_sent() -> None:
    async def work() -> int:
        async with server() as (url, asked), VLLMEngine(url, vocab_size=100) as engine:
            with pytest.raises(errors.IdOutsideVocabulary, match="prompt id 100"):
                await engine.generate(make_prompt(5, 100), PARAMS)
            return len(asked)

    assert asyncio.run(work()) == 1, "the probe alone"


# ------------------------------------------------------------------------- replies


def test_a_reply_becomes_a_completion() -> None:
    got, engine, _ = ask()
    assert got.output_ids.tolist() == [9, 2]
    assert [got.support[t].tolist() for t in range(2)] == [[5, 9], [2]]
    np.testing.assert_array_equal(
        got.sampling_logprobs, np.log(np.array([0.25, 1], np.float32)), strict=True
    )
    assert (got.full_logprobs, got.support_logprobs, got.text) == (None, None, None)
    assert (got.finish_reason, got.stop_match, got.weight_versions) == ("length", None, ())
    assert got.engine_meta.keys() == {"engine", "version", "support_source", "endpoint"}
    assert (got.engine_meta["engine"], got.engine_meta["version"]) == ("vllm", "0.28.0")
    assert (engine.info.model, engine.info.max_top_k) == ("org/model", None)
    assert got.raw is not None and json.loads(got.raw)["request_id"] == "r"


def test_logprobs_of_whole_supports_are_kept_where_the_server_sends_them() -> None:
    logs = np.log([[0.75, 0.25]])[0].tolist()
    got, _, _ = ask(
        after_the_probe(
            lambda asked: reply(
                asked, [9, 2], [[5, 9], [2]], [logs[1], 0.0], sampling_mask_logprobs=[logs, [0.0]]
            )
        )
    )
    assert got.support_logprobs is not None
    np.testing.assert_allclose(np.exp(got.support_logprobs), [0.75, 0.25, 1], rtol=1e-6)


def test_a_large_reply_is_decoded_outside_the_event_loop() -> None:
    ids = list(range(90))
    length = INLINE_BYTES // 200

    def answer(asked: Asked) -> dict[str, Any]:
        return reply(asked, [3] * length, [ids] * length, [-4.5] * length)

    got, _, _ = ask(after_the_probe(answer))
    assert got.raw is not None and len(got.raw) > INLINE_BYTES
    assert got.support.counts.tolist() == [90] * length


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        pytest.param(
            spoiled(sampling_mask=None),
            errors.SamplingMaskMissing,
            "start the server with --return-sampling-mask --logprobs-mode processed_logprobs",
            id="mask null",
        ),
        pytest.param(
            spoiled(finish_reason="error", sampling_mask=None),
            errors.EngineFailed,
            "finish_reason is error.*lower sampling.top_k, or start the server without that flag",
            id="finish_reason error",
        ),
        pytest.param(
            spoiled(finish_reason="abort", sampling_mask=None, token_ids=[]),
            errors.GenerationAborted,
            "before it was sampled",
            id="aborted in the queue",
        ),
        pytest.param(
            spoiled(sampling_mask=[[5, 9]]),
            errors.LengthMismatch,
            "sampling_mask is 1 for 2 token_ids",
            id="mask too short",
        ),
        pytest.param(
            spoiled(sampling_mask=[[5, 9], None]),
            errors.ReplyMalformed,
            "sampling_mask: ",
            id="row null",
        ),
        pytest.param(
            spoiled(token_ids=None), errors.ReplyMalformed, "no token_ids", id="no token_ids"
        ),
        pytest.param(
            spoiled(logprobs=None), errors.ReplyMalformed, "no logprobs", id="no logprobs"
        ),
        pytest.param(
            spoiled(logprobs={"content": [{"token": "token_id:9", "logprob": -1.0}]}),
            errors.LengthMismatch,
            "1 logprobs for 2 token_ids",
            id="logprobs too short",
        ),
        pytest.param(
            spoiled(token_ids=[5, 2]),
            errors.LengthMismatch,
            "output token 0: the logprob is of 'token_id:9', wanted 'token_id:5'",
            id="logprobs of other tokens",
        ),
        pytest.param(
            spoiled(sampling_mask_logprobs=[[-0.1], [0.0]]),
            errors.LengthMismatch,
            "output token 0: 1 support logprobs for 2 ids",
            id="support logprobs too few",
        ),
        pytest.param(
            spoiled(sampling_mask_logprobs=[[-0.1, -2.0]]),
            errors.LengthMismatch,
            "1 sampling_mask_logprobs for 2 token_ids",
            id="support logprobs of one token",
        ),
        pytest.param(
            with_usage(prompt_tokens=3),
            errors.PromptTokenCount,
            "sent 2 prompt tokens, the server used 3",
            id="another prompt",
        ),
        pytest.param(
            with_usage(prompt_tokens=2, completion_tokens=3),
            errors.LengthMismatch,
            "completion_tokens is 3 for 2 token_ids",
            id="completion_tokens",
        ),
        pytest.param(
            lambda asked: good(asked) | {"choices": []},
            errors.ReplyMalformed,
            "0 choices where one",
            id="no choice",
        ),
        pytest.param(
            lambda asked: web.Response(text="<html>"),
            errors.ReplyMalformed,
            "not a reply of vLLM",
            id="a proxy's page",
        ),
        pytest.param(
            lambda asked: web.json_response(
                {"error": {"message": "top_k > 0", "type": "BadRequestError", "code": 400}},
                status=400,
            ),
            errors.EngineRefused,
            "HTTP 400: top_k > 0",
            id="400",
        ),
        pytest.param(
            lambda asked: web.Response(status=503, headers={"Retry-After": "7"}),
            errors.EngineBusy,
            "HTTP 503",
            id="503",
        ),
        pytest.param(
            lambda asked: web.Response(status=500, text="dead"),
            errors.EngineFailed,
            "HTTP 500: dead",
            id="500",
        ),
    ],
)
def test_every_bad_reply_has_its_error(
    answer: Answer, error: type[errors.RolloutError], words: str
) -> None:
    with pytest.raises(error, match=rf"127.0.0.1:\d+/inference/v1/generate: .*{words}") as caught:
        ask(after_the_probe(answer))
    assert caught.value.body is not None
    assert getattr(caught.value, "retry_after_s", 0.0) == (7.0 if words == "HTTP 503" else 0.0)


def test_an_abort_with_tokens_keeps_them() -> None:
    got, _, _ = ask(after_the_probe(spoiled(finish_reason="abort")))
    assert (got.finish_reason, len(got.output_ids)) == ("abort", 2)


# ------------------------------------------------------------------------- servers


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        pytest.param(
            spoiled(sampling_mask=None), errors.SamplingMaskMissing, "has no samp", id="no masks"
        ),
        pytest.param(
            lambda asked: reply(asked, [7] * 4, [[7]] * 4, [0.0, 0.0, -0.2, 0.0]),
            errors.EngineRefused,
            "with 1 ids to choose from has logprob -0.2, wanted -0: logprobs are not over the "
            "support; start the server with --return-sampling-mask --logprobs-mode",
            id="raw logprobs",
        ),
        pytest.param(
            lambda asked: reply(asked, [7] * 4, [[7]] * 3, [0.0] * 4),
            errors.ReplyMalformed,
            "this server's replies cannot be recorded",
            id="misaligned",
        ),
    ],
)
def test_a_server_that_cannot_be_recorded_is_refused_on_entering(
    answer: Answer, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        ask(answer)


def test_ties_at_the_top_do_not_make_the_probe_fail() -> None:
    ties = [float(np.log(0.5))] * 4
    ask(lambda asked: reply(asked, [7] * 4, [[7, 8]] * 4, ties))


@pytest.mark.parametrize(
    ("version", "is_served"),
    [("0.27.2", False), ("0.28.0", True), ("0.29.1rc2.dev3+gabc", True), ("dev", True)],
)
def test_releases_before_0_28_are_refused(version: str, is_served: bool) -> None:
    if is_served:
        assert ask(version=version)[1].info.version == version
    else:
        with pytest.raises(errors.EngineRefused, match=r"vLLM 0.27.2 has no sampling masks; they"):
            ask(version=version)


def test_a_server_of_another_kind_is_told_apart() -> None:
    async def work() -> None:
        async with served(web.Application()) as url, VLLMEngine(url, vocab_size=100):
            pass

    with pytest.raises(errors.EngineRefused, match="/version: HTTP 404.*is this a vLLM server?"):
        asyncio.run(work())


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.EngineRefused, match="HTTP 401.*variable VLLM_API_KEY"):
        ask(key="sk-1")
    monkeypatch.setenv("VLLM_API_KEY", "sk-1")
    ask(key="sk-1")

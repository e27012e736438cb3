"""The parser against every non-streamed /generate reply recorded from three real servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from builders import DATA, RECORDED

from rollout import errors
from rollout.engines.http import error_words
from rollout.engines.sglang.reply import parse_reply
from rollout.sampling import SamplingParams

REFUSED_BY_SERVER = {  # case: what the server's words must contain, where it answers 4xx
    "reject_top_p_only": "got top_k=1073741824",
    "reject_full_vocab": "got top_k=1073741824",
    "reject_top_k_over_cap": "got top_k=100000",
    "reject_top_k_zero": "at least 1, got 0",
    "reject_top_k_float": "floating point `20.0`, expected i64",
    "reject_unknown_param": "unknown field `foo`",
    "reject_top_p_zero": "top_p must be in (0, 1]",
    "reject_negative_temperature": "non-negative",
    "reject_logprobs_mode_without_mask": "return_sampling_mask=true",
    "reject_empty_input_ids": "input_ids cannot be empty",
    "reject_prompt_too_long": "longer than the model's context length",
}
FAILED_ON_SERVER = {"error_n_2", "error_max_new_tokens_0"}


def wire(name: str) -> dict[str, Any]:
    cases: dict[str, Any] = json.loads((DATA / name / "wire.json").read_text())
    return {key: case for key, case in cases.items() if case["path"] == "/generate"}


def replies() -> Iterator[Any]:
    """(request, status, body) of every case; a batch gives one per item."""
    for name in RECORDED:
        for key, case in wire(name).items():
            response = case["response"]
            items = response if isinstance(response, list) else [response]
            for index, item in enumerate(items):
                case_id = f"{name.removeprefix('sglang_')}-{key}" + (f"-{index}" if index else "")
                asked = case["request"].get("return_sampling_mask", False)
                asked = asked[index] if isinstance(asked, list) else asked
                yield pytest.param(key, case["status"], item, asked, id=case_id)


@pytest.mark.parametrize(("key", "status", "reply", "asked"), list(replies()))
def test_every_recorded_reply_is_parsed_or_refused(
    key: str, status: int, reply: Any, asked: bool
) -> None:
    body = reply.encode() if isinstance(reply, str) else json.dumps(reply).encode()
    if key in FAILED_ON_SERVER:
        with pytest.raises(errors.EngineFailed, match="HTTP 500: The sampling backend did not"):
            parse_reply(status, body)
    elif 400 <= status < 500:
        with pytest.raises(errors.EngineRefused) as caught:
            parse_reply(status, body)
        assert REFUSED_BY_SERVER[key] in str(caught.value)
    elif status != 200:
        with pytest.raises(errors.EngineFailed, match="HTTP 500: Internal Server Error"):
            parse_reply(status, body)
    elif not asked:
        with pytest.raises(errors.SamplingMaskMissing, match="router"):
            parse_reply(status, body)
    else:
        assert_equals_reply(parse_reply(status, body), reply)


def assert_equals_reply(got: Any, reply: dict[str, Any]) -> None:
    meta = reply["meta_info"]
    mask, logprobs = meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"]
    output = reply["output_ids"]
    assert got.output_ids.tolist() == output
    assert [got.support[t].tolist() for t in range(len(output))] == mask
    assert got.text == reply["text"]
    reason = meta["finish_reason"]
    assert got.finish_reason == reason["type"]
    assert got.stop_match == (str(reason["matched"]) if reason["type"] == "stop" else None)
    spans = [(s["version"], s["start"], s["end"]) for s in meta["weight_versions"]]
    assert [tuple(span) for span in got.weight_versions] == spans
    full = [np.float32(entry[0]) for entry in meta["output_token_logprobs"]]
    assert got.full_logprobs.tolist() == full
    if isinstance(logprobs[0], list):
        assert got.support_logprobs.tolist() == [np.float32(x) for row in logprobs for x in row]
        chosen = [row[ids.index(y)] for row, ids, y in zip(logprobs, mask, output, strict=True)]
    else:
        assert got.support_logprobs is None
        chosen = logprobs
    assert got.sampling_logprobs.tolist() == [np.float32(x) for x in chosen]


@pytest.mark.parametrize("name", RECORDED)
def test_the_recorded_cases_cover_what_matters(name: str) -> None:
    cases = wire(name)
    assert {"generate_greedy", "generate_min_p", "generate_aborted_while_running"} <= cases.keys()
    only_newer = set() if "0.5.23" in name else {"reject_top_k_float"}
    assert FAILED_ON_SERVER | REFUSED_BY_SERVER.keys() - only_newer <= cases.keys()


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize(
    "key",
    [
        "generate_penalty_accepted",
        "generate_logit_bias_accepted",
        "reject_top_p_only",
        "reject_top_k_over_cap",
        "error_n_2",
        "error_max_new_tokens_0",
    ],
)
def test_what_a_server_takes_or_fails_on_is_refused_before_sending(name: str, key: str) -> None:
    sent = wire(name)[key]["request"]["sampling_params"]
    with pytest.raises(errors.NotReplayable):
        SamplingParams(**sent).check_replayable(max_top_k=4096)


def reply(**meta: Any) -> dict[str, Any]:
    """Two output tokens, selected mode."""
    return {
        "text": "ab",
        "output_ids": [0, 1],
        "meta_info": {
            "finish_reason": {"type": "length", "length": 2},
            "prompt_tokens": 7,
            "completion_tokens": 2,
            "output_token_logprobs": [[-1.5, 0, None], [-0.5, 1, None]],
            "output_token_sampling_mask": [[0, 4], [1]],
            "output_token_sampling_logprobs": [-1.25, 0.0],
            "output_token_sampling_mask_length": 2,
        }
        | meta,
    }


def parse(value: Any, prompt_ids: list[int] | None = None) -> Any:
    return parse_reply(200, json.dumps(value).encode(), prompt_ids)


def test_output_ids_are_kept_as_they_came_whatever_the_text() -> None:
    assert parse(reply()).output_ids.tolist() == [0, 1]  # "ab" might encode to another id


def test_missing_weight_version_spans_become_one_span() -> None:
    assert parse(reply(weight_version="v3")).weight_versions == (("v3", 0, 2),)
    assert parse(reply()).weight_versions == ()


@pytest.mark.parametrize(
    ("meta", "error", "words"),
    [
        pytest.param(
            {"output_token_sampling_mask": None},
            errors.SamplingMaskMissing,
            "sglang-router",
            id="mask null",
        ),
        pytest.param(
            {
                "output_token_sampling_mask": None,
                "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            },
            errors.GenerationAborted,
            "Abort in waiting queue",
            id="aborted in the queue",
        ),
        pytest.param(
            {"output_token_sampling_mask": [[0, 4], None]},
            errors.SamplingMaskMissing,
            "output token 1 has no sampling mask",
            id="row null",
        ),
        pytest.param(
            {"output_token_sampling_mask": [[0, 4]]},
            errors.LengthMismatch,
            "output_token_sampling_mask is 1 for 2 output_ids",
            id="masks one short",
        ),
        pytest.param(
            {"output_token_sampling_logprobs": [-1.25]},
            errors.LengthMismatch,
            "output_token_sampling_logprobs is 1 for 2",
            id="logprobs one short",
        ),
        pytest.param(
            {"completion_tokens": 3}, errors.LengthMismatch, "completion_tokens is 3", id="count"
        ),
        pytest.param(
            {"output_token_sampling_mask_length": 4},
            errors.LengthMismatch,
            "mask_length is 4",
            id="mask length",
        ),
        pytest.param(
            {"output_token_sampling_logprobs": [[-1.25], [0.0]]},
            errors.LengthMismatch,
            "output token 0: 1 support logprobs for 2 ids",
            id="support row short",
        ),
        pytest.param(
            {"output_token_sampling_logprobs": [[-1.25, -0.3], 0.0]},
            errors.ReplyMalformed,
            r"Expected `array`, got `float` - at `\$\[1\]`",
            id="mixed rows",
        ),
        pytest.param(
            {
                "output_token_sampling_mask": [[0, 4], [2]],
                "output_token_sampling_logprobs": [[-1.25, -0.3], [0.0]],
            },
            errors.SampledOutsideSupport,
            "output token 1: sampled id 1 is not among the 1 ids",
            id="sampled id not in its row",
        ),
        pytest.param(
            {"output_token_logprobs": [[-1.5, 0, None], [-0.5, 9, None]]},
            errors.LengthMismatch,
            "for other tokens",
            id="logprobs of other tokens",
        ),
    ],
)
def test_a_reply_that_contradicts_itself_is_refused(
    meta: dict[str, Any], error: type[errors.RolloutError], words: str
) -> None:
    with pytest.raises(error, match=words):
        parse(reply(**meta))


def test_null_logprobs_stay_visible_as_nan() -> None:
    assert np.isnan(parse(reply(output_token_sampling_logprobs=[None, 0.0])).sampling_logprobs[0])


def test_another_prompt_than_the_one_sent_is_refused() -> None:
    with pytest.raises(errors.PromptTokenCount, match="sent 8 prompt tokens, the server used 7"):
        parse(reply(), list(range(8)))
    with pytest.raises(errors.PromptTokenCount, match="other prompt tokens"):
        parse(reply() | {"prompt_token_ids": [1] * 7}, [2] * 7)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"[]", id="a list"),
        pytest.param(b"<html>", id="HTML"),
        pytest.param(b'{"text": "a"', id="cut"),
        pytest.param(b"\xff", id="not text"),
        pytest.param(b'{"text": "a"}', id="no meta_info"),
    ],
)
def test_anything_else_is_malformed(body: bytes) -> None:
    with pytest.raises(errors.ReplyMalformed, match="not a reply of SGLang"):
        parse_reply(200, body)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        pytest.param(b'{"error": {"message": "a"}}', "a", id="object"),
        pytest.param(b'{"error": "b"}', "b", id="string"),
        pytest.param(b'{"object": "error", "message": "c"}', "c", id="flat"),
        pytest.param(b"Internal Server Error", "Internal Server Error", id="plain text"),
        pytest.param(b"", "(empty body)", id="nothing"),
        pytest.param(b"[1]", "[1]", id="something else"),
    ],
)
def test_error_words_of_every_envelope(body: bytes, words: str) -> None:
    assert error_words(body) == words

"""SamplingParams: what is sent, what the sampler does, what is refused before sending."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rollout.errors import NotReplayable
from rollout.sampling import Sampler, SamplingParams, canonical_json


def test_request_spells_out_what_shapes_the_distribution() -> None:
    params = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, stop=["."], sampling_seed=3)
    assert params.to_request() == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.0,
        "max_new_tokens": 128,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop": ["."],
        "sampling_seed": 3,
    }


@pytest.mark.parametrize("temperature", [0.0, 1e-7], ids=str)
def test_greedy_is_temperature_one_and_one_id(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    params.check_replayable()
    assert params.sampler == Sampler(temperature=1.0, top_p=1.0, top_k=1, min_p=0.0)
    assert params.to_request()["top_k"] == 1


def test_temperature_just_above_greedy_is_kept() -> None:
    assert SamplingParams(temperature=1e-6, top_k=4).sampler.temperature == 1e-6


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param({}, "top_k: got None, must be finite", id="no top_k"),
        pytest.param({"top_k": -1, "top_p": 0.9}, "top_p bounds probability mass", id="top_p only"),
        pytest.param({"top_k": 0}, "top_k: got 0, must be at least 1", id="top_k 0"),
        pytest.param(
            {"top_k": 5000}, "got 5000, the engine allows at most 4096", id="over the cap"
        ),
        pytest.param({"top_k": 5, "n": 2}, "rollouts_per_prompt", id="n 2"),
        pytest.param({"top_k": 5, "max_new_tokens": 0}, "max_new_tokens: got 0", id="no token"),
        pytest.param(
            {"top_k": 5, "repetition_penalty": 1.1}, "repetition_penalty: got 1.1", id="repetition"
        ),
        pytest.param(
            {"top_k": 5, "frequency_penalty": 0.5}, "frequency_penalty: got 0.5", id="frequency"
        ),
        pytest.param(
            {"top_k": 5, "presence_penalty": -1.0}, "presence_penalty: got -1.0", id="presence"
        ),
        pytest.param(
            {"top_k": 5, "logit_bias": {"5": 2.0}}, r"logit_bias: got \+2 for token 5", id="bias"
        ),
        pytest.param(
            {"top_k": 5, "watermark": {"enabled": True}}, "watermark: .*moves", id="watermark"
        ),
        pytest.param({"top_k": 5, "beam_width": 4}, "beam_width: .*does not sample", id="beams"),
        pytest.param(
            {"top_k": 5, "custom_logit_processor": "{}"},
            "custom_logit_processor: .*disallowed_token_ids",
            id="processor",
        ),
        pytest.param(
            {"top_k": 5, "custom_params": {"a": 1}}, "custom_params: .*processor", id="its params"
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(NotReplayable, match=words):
        SamplingParams(**settings).check_replayable(max_top_k=4096)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"min_p": 0.25}, id="min_p"),
        pytest.param({"logit_bias": {"5": float("-inf")}}, id="banned ids only"),
        pytest.param({"regex": "[0-9]+"}, id="grammar"),
        pytest.param({"min_new_tokens": 4}, id="min_new_tokens"),
        pytest.param({"disallowed_token_ids": [5, 6]}, id="banned ids"),
    ],
)
def test_what_only_excludes_ids_is_accepted(settings: dict[str, Any]) -> None:
    SamplingParams(top_k=4, **settings).check_replayable(max_top_k=4096)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param({"temprature": 1.0}, "did you mean 'temperature'", id="misspelt key"),
        pytest.param({"temperature": -1.0}, "greater than or equal to 0", id="temperature -1"),
        pytest.param({"top_p": 0.0}, "greater than 0", id="top_p 0"),
        pytest.param({"top_k": 20.0}, "valid integer", id="top_k is a float"),
        pytest.param({"regex": "a", "ebnf": "b"}, "only one grammar", id="two grammars"),
    ],
)
def test_settings_that_no_server_takes_are_invalid(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    ("top_p", "is_off"),
    [(1.0, False), (0.99999999, True), (0.99999997, False), (0.95, False)],
    ids=str,
)
def test_a_top_p_that_rounds_to_one_has_no_effect(top_p: float, is_off: bool) -> None:
    assert SamplingParams(top_k=3, top_p=top_p).top_p_is_off is is_off


def test_auto_waits_for_the_engine() -> None:
    SamplingParams(top_k="auto").check_replayable()
    with pytest.raises(ValidationError, match="top_k"):
        SamplingParams(top_k="automatic")


def test_canonical_json_does_not_depend_on_order() -> None:
    assert (
        canonical_json({"b": 1, "a": "é"})
        == canonical_json({"a": "é", "b": 1})
        == '{"a":"é","b":1}'
    )

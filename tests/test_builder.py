"""RolloutBuilder: turns stay aligned, and what one record cannot hold is an error with its turn."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import assert_same_rollout, make_completion

import rollout
from rollout import RolloutBuilder, errors
from rollout.engines.base import Completion
from rollout.record import WeightSpan
from rollout.sampling import SamplingParams

PARAMS = SamplingParams(temperature=0.5, top_k=2, max_new_tokens=4)


def i32(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def turn(*versions: tuple[str, int, int], **changes: Any) -> Completion:
    """Two output tokens [9, 2] with every optional column."""
    plain = make_completion(
        full_logprobs=np.log(f32(0.2, 0.9)),
        support_logprobs=np.log(f32(0.75, 0.25, 1)),
        weight_versions=tuple(WeightSpan(*v) for v in versions or [("v1", 0, 2)]),
    )
    return replace(plain, **changes)


def started(
    completion: Completion | None = None, params: SamplingParams = PARAMS
) -> RolloutBuilder:
    """One turn after the prompt [1, 3]."""
    builder = RolloutBuilder("7", [1, 3])
    builder.append_sampled(turn() if completion is None else completion, params)
    return builder


def test_it_is_exported() -> None:
    assert rollout.RolloutBuilder is RolloutBuilder


def test_two_turns_with_a_tool_between_them() -> None:
    builder = started()
    builder.append_forced([40, 41, 42])
    assert builder.prompt_ids.tolist() == [1, 3, 9, 2, 40, 41, 42]
    builder.append_sampled(turn(("v1", 0, 1), ("v2", 1, 2), finish_reason="length"), PARAMS)
    got = builder.build(reward=0.5, prompt_text="why", extra={"answer": 4})

    assert got.prompt_ids.tolist() == [1, 3]
    assert got.output_ids.tolist() == [9, 2, 40, 41, 42, 9, 2]
    assert got.loss_mask.tolist() == [1, 1, 0, 0, 0, 1, 1]
    assert got.support.counts.tolist() == [2, 1, 0, 0, 0, 2, 1]
    assert got.support.ids.tolist() == [5, 9, 2, 5, 9, 2]
    np.testing.assert_array_equal(
        got.sampling_logprobs, np.log(f32(0.25, 1, 1, 1, 1, 0.25, 1)), strict=True
    )
    np.testing.assert_array_equal(
        got.full_logprobs, np.log(f32(0.2, 0.9, 1, 1, 1, 0.2, 0.9)), strict=True
    )
    np.testing.assert_array_equal(
        got.support_logprobs, np.log(f32(0.75, 0.25, 1, 0.75, 0.25, 1)), strict=True
    )
    assert got.weight_versions == (("v1", 0, 2), ("v1", 5, 6), ("v2", 6, 7))
    assert (got.temperature, got.top_k, got.max_new_tokens) == (0.5, 2, 8)
    assert (got.rollout_id, got.finish_reason, got.reward) == ("7:0", "length", 0.5)
    assert (got.prompt_text, got.output_text) == ("why", None)
    assert json.loads(got.sampling_params) == PARAMS.to_request()
    assert json.loads(got.extra) == {
        "answer": 4,
        "turns": [
            {"start": 0, "end": 2, "finish_reason": "stop"},
            {"start": 5, "end": 7, "finish_reason": "length"},
        ],
    }


def test_one_turn_is_the_rollout_of_its_completion() -> None:
    wanted = turn().to_rollout(
        prompt_id="7",
        sample_index=0,
        prompt_ids=i32(1, 3),
        params=PARAMS,
        sampling_params=started().build().sampling_params,
        extra='{"turns":[{"end":2,"finish_reason":"stop","start":0}]}',
    )
    got = started().build()
    assert_same_rollout(replace(got, created_us=wanted.created_us), wanted)


def test_a_turn_that_is_not_trained_on_keeps_its_supports() -> None:
    builder = RolloutBuilder("7", [1, 3])
    builder.append_sampled(turn(), PARAMS, loss_mask=False)
    builder.append_sampled(turn(), PARAMS)
    got = builder.build()
    assert got.loss_mask.tolist() == [0, 0, 1, 1]
    assert got.is_forced.tolist() == [False] * 4


def test_what_was_built_does_not_move_when_the_builder_goes_on() -> None:
    builder = started()
    before = builder.build()
    builder.append_forced([40])
    assert before.output_ids.tolist() == [9, 2]
    assert builder.build().output_ids.tolist() == [9, 2, 40]


def test_a_rendered_prompt_that_continues_becomes_forced_tokens() -> None:
    builder = started()
    builder.continue_with([1, 3, 9, 2, 40, 41])
    got = builder.build()
    assert got.output_ids.tolist() == [9, 2, 40, 41]
    assert got.is_forced.tolist() == [False, False, True, True]


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        pytest.param([1, 3, 9, 8, 40], "differs at index 3: got 8, wanted 2; send", id="in a turn"),
        pytest.param([0, 3, 9, 2], "differs at index 0: got 0, wanted 1; send", id="at the start"),
        pytest.param([1, 3, 9], "differs at index 3: got 3 ids, wanted 4$", id="too short"),
    ],
)
def test_a_prompt_that_does_not_continue_names_the_first_index(ids: list[int], words: str) -> None:
    builder = started()
    with pytest.raises(errors.PrefixDiverged, match=f"the next prompt {words}"):
        builder.continue_with(ids)
    assert builder.num_output_tokens == 2


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        pytest.param([1, 3, 9, 7], "differs at index 3: got 7, wanted 2", id="another id"),
        pytest.param(
            [1, 3, 9, 2, 40],
            r"differs at index 4: got 5 ids, wanted 4; append_forced\(\) the new ones first",
            id="more",
        ),
    ],
)
def test_an_engine_that_rendered_another_prompt_is_an_error(theirs: list[int], words: str) -> None:
    with pytest.raises(errors.PrefixDiverged, match=f"turn 1: the engine's prompt {words}"):
        started().append_sampled(turn(prompt_ids=i32(*theirs)), PARAMS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"temperature": 1.0}, "temperature: got 1.0, wanted 0.5", id="temperature"),
        pytest.param({"temperature": 0.0}, "temperature: got 1.0, wanted 0.5", id="greedy"),
        pytest.param({"top_k": 3}, "top_k: got 3, wanted 2", id="top_k"),
        pytest.param({"top_p": 0.9}, "top_p: got 0.9, wanted 1.0", id="top_p"),
        pytest.param({"min_p": 0.1}, "min_p: got 0.1, wanted 0.0", id="min_p"),
    ],
)
def test_a_turn_sampled_otherwise_is_an_error_with_its_index(
    change: dict[str, Any], words: str
) -> None:
    builder = started()
    with pytest.raises(errors.TurnMismatch, match=f"^turn 1: {words} as in the turns before"):
        builder.append_sampled(turn(), PARAMS.model_copy(update=change))
    assert (builder.num_turns, builder.num_output_tokens) == (1, 2)


@pytest.mark.parametrize("name", ["full_logprobs", "support_logprobs"])
@pytest.mark.parametrize("is_in_first", [True, False], ids=["then missing", "then there"])
def test_a_column_is_there_in_all_turns_or_in_none(name: str, is_in_first: bool) -> None:
    without = replace(turn(), **{name: None})
    first, second = (turn(), without) if is_in_first else (without, turn())
    builder = started(first)
    got, wanted = ("none", "values") if is_in_first else ("values", "none")
    with pytest.raises(errors.TurnMismatch, match=f"turn 1: {name}: got {got}, wanted {wanted}"):
        builder.append_sampled(second, PARAMS)
    builder.append_forced([40])
    builder.append_sampled(first, PARAMS)
    assert (getattr(builder.build(), name) is not None) == is_in_first


def test_weight_versions_are_known_for_all_turns_or_for_none() -> None:
    builder = started()
    with pytest.raises(errors.TurnMismatch, match="turn 1: weight_versions: got none, wanted val"):
        builder.append_sampled(turn(weight_versions=()), PARAMS)


def test_weights_that_moved_between_turns_are_recorded() -> None:
    builder = started()
    builder.append_sampled(turn(("v2", 0, 2)), PARAMS)
    assert builder.build().weight_versions == (("v1", 0, 2), ("v2", 2, 4))


def test_turns_of_two_engines_are_an_error() -> None:
    first = turn(engine_meta={"engine": "sglang", "filter_order": "joint"})
    second = turn(engine_meta={"engine": "sglang", "filter_order": "sequential"})
    with pytest.raises(
        errors.TurnMismatch, match=r"turn 1: engine_meta.filter_order: got sequential, wanted joint"
    ):
        started(first).append_sampled(second, PARAMS)


def test_turns_of_two_endpoints_are_kept_with_their_turn() -> None:
    builder = started(turn(engine_meta={"engine": "sglang", "endpoint": "http://a"}))
    builder.append_sampled(turn(engine_meta={"engine": "sglang", "endpoint": "http://b"}), PARAMS)
    got = builder.build()
    assert json.loads(got.engine_meta) == {"engine": "sglang"}
    assert [t["engine_meta"] for t in json.loads(got.extra)["turns"]] == [
        {"endpoint": "http://a"},
        {"endpoint": "http://b"},
    ]


def test_seeds_stops_and_grammars_may_differ_and_are_kept_with_their_turn() -> None:
    first = PARAMS.model_copy(update={"sampling_seed": 1})
    second = PARAMS.model_copy(update={"sampling_seed": 2, "regex": "[0-9]+"})
    builder = started(params=first)
    builder.append_sampled(turn(stop_match="2"), second)
    got = builder.build()
    assert (got.seed, got.stop_match) == (None, "2")
    assert json.loads(got.sampling_params)["regex"] == "[0-9]+"
    turns = json.loads(got.extra)["turns"]
    assert [t["sampling_params"] for t in turns] == [first.to_request(), second.to_request()]
    assert [t.get("stop_match") for t in turns] == [None, "2"]


def test_one_seed_for_all_turns_is_the_rollouts() -> None:
    builder = started(params=PARAMS.model_copy(update={"sampling_seed": 5}))
    assert builder.build().seed == 5


def test_an_aborted_turn_can_be_continued() -> None:
    builder = started(turn(finish_reason="abort"))
    builder.append_sampled(turn(("v2", 0, 2)), PARAMS)
    got = builder.build()
    assert (got.rollout_id, got.finish_reason) == ("7:0", "stop")
    assert [t["finish_reason"] for t in json.loads(got.extra)["turns"]] == ["abort", "stop"]


def test_a_rollout_that_ends_in_an_abort_has_the_id_of_an_attempt() -> None:
    builder = started()
    builder.append_sampled(turn(finish_reason="abort"), PARAMS)
    assert builder.build(abort=3).rollout_id == "7:0#abort3"


@pytest.mark.parametrize(
    ("completion", "params", "error", "words"),
    [
        pytest.param(
            turn(output_ids=i32(8, 2)),
            PARAMS,
            errors.SampledOutsideSupport,
            "turn 1: 7:0: output token 0: sampled id 8 is not among",
            id="content rule",
        ),
        pytest.param(
            turn(("v1", 0, 3)),
            PARAMS,
            errors.BadValue,
            r"turn 1: 7:0: weight_versions span \[0, 3\) does not lie in \[0, 2\)",
            id="span beyond the turn",
        ),
        pytest.param(
            turn(),
            PARAMS.model_copy(update={"top_k": "auto"}),
            errors.ConfigError,
            "turn 1: sampling.top_k: got auto, wanted the number",
            id="unresolved top_k",
        ),
        pytest.param(
            turn(),
            PARAMS.model_copy(update={"frequency_penalty": 0.5}),
            errors.NotReplayable,
            "frequency_penalty",
            id="penalty",
        ),
    ],
)
def test_a_turn_that_breaks_a_rule_is_not_appended(
    completion: Completion, params: SamplingParams, error: type[Exception], words: str
) -> None:
    builder = started()
    with pytest.raises(error, match=words):
        builder.append_sampled(completion, params)
    assert builder.num_turns == 1


@pytest.mark.parametrize(
    ("ids", "error", "words"),
    [
        pytest.param([4, -1], errors.IdOutsideVocabulary, "got -1 at index 1", id="negative"),
        pytest.param([2**31], errors.IdOutsideVocabulary, "got 2147483648 at", id="64 bits"),
        pytest.param([0.5], errors.BadValue, r"got float64 \[1\], wanted a list", id="floats"),
        pytest.param([[1], [2]], errors.BadValue, r"got int64 \[2, 1\]", id="nested"),
        pytest.param("text", errors.BadValue, "wanted a list of integers", id="text"),
    ],
)
def test_forced_tokens_are_token_ids(ids: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"forced ids: .*{words}"):
        started().append_forced(ids)


def test_without_a_sampled_turn_there_is_no_rollout() -> None:
    builder = RolloutBuilder("7", [1, 3])
    builder.append_forced([4])
    with pytest.raises(errors.TurnMismatch, match="7: wanted at least one sampled turn, got none"):
        builder.build()


def test_without_a_prompt_there_is_no_turn() -> None:
    with pytest.raises(errors.EmptyPrompt, match="turn 0: "):
        RolloutBuilder("7", []).append_sampled(turn(), PARAMS)

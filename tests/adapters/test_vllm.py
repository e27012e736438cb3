"""vLLM: answers of its server and of `LLM.generate`, in both forms of the sampling mask."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import RECORDED, recorded_rollouts, write_lines

from rollout import errors
from rollout.adapters.facts import Facts
from rollout.adapters.importing import import_file
from rollout.adapters.vllm import READER, from_vllm
from rollout.reader import open_run
from rollout.record import Rollout

PARAMS = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.0,
    "max_tokens": 8,
    "seed": 5,
    "logprobs": 1,
    "stop_token_ids": [2],
    "bad_words": ["no"],
}
FACTS = Facts(temperature=0.7, top_p=0.9, top_k=20, min_p=0.0, max_new_tokens=8)
LOG_QUARTER, LOG_HALF = -1.3862943649291992, -0.6931471824645996
LOG_3_QUARTERS = -0.28768208622932434


def choice(**changes: Any) -> dict[str, Any]:
    return {
        "index": 0,
        "token_ids": [9, 2],
        "sampling_mask": [[5, 9], [2]],
        "logprobs": {"content": [{"logprob": LOG_QUARTER}, {"logprob": 0.0}]},
        "finish_reason": "stop",
        "stop_reason": 2,
    } | changes


def line(*choices: dict[str, Any], params: dict[str, Any] | None = None) -> dict[str, Any]:
    """A request to /inference/v1/generate with its response, as docs/integrations.md says."""
    return {
        "request": {"token_ids": [1, 3], "sampling_params": PARAMS if params is None else params},
        "response": {"request_id": "r", "choices": list(choices or (choice(),))},
    }


def as_a_line(rollout: Rollout, *, with_mask_logprobs: bool) -> dict[str, Any]:
    rows = [rollout.support[t].tolist() for t in range(rollout.num_output_tokens)]
    ends = rollout.support.offsets
    answered = choice(
        token_ids=rollout.output_ids.tolist(),
        sampling_mask=rows,
        logprobs={"content": [{"logprob": v} for v in rollout.sampling_logprobs.tolist()]},
        finish_reason=rollout.finish_reason,
        stop_reason=None,
    )
    if with_mask_logprobs:
        logprobs = rollout.support_logprobs.tolist()
        answered["sampling_mask_logprobs"] = [
            logprobs[a:b] for a, b in zip(ends[:-1], ends[1:], strict=True)
        ]
    params = {
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "min_p": rollout.min_p,
        "max_tokens": rollout.max_new_tokens,
    }
    made = line(answered, params=params)
    made["request"]["token_ids"] = rollout.prompt_ids.tolist()
    return made


@pytest.mark.parametrize("with_mask_logprobs", [True, False])
@pytest.mark.parametrize("name", RECORDED)
def test_recorded_sets_are_read_from_what_vllm_would_have_answered(
    name: str, with_mask_logprobs: bool, tmp_path: Path
) -> None:
    wanted = recorded_rollouts(name)
    lines = [as_a_line(r, with_mask_logprobs=with_mask_logprobs) for r in wanted]
    file = write_lines(tmp_path / "vllm.jsonl", lines)
    assert import_file(READER, file, tmp_path / "run", name="vllm").rejected == {}
    back = list(open_run(tmp_path / "run"))
    assert len(back) == 36
    for got, rollout in zip(back, wanted, strict=True):
        assert got.prompt_ids.tolist() == rollout.prompt_ids.tolist()
        assert got.output_ids.tolist() == rollout.output_ids.tolist()
        assert got.support.ids.tolist() == rollout.support.ids.tolist()
        assert got.support.offsets.tolist() == rollout.support.offsets.tolist()
        assert got.sampling_logprobs.tolist() == rollout.sampling_logprobs.tolist()
        assert (got.support_logprobs is not None) == with_mask_logprobs
        assert got.top_k == rollout.top_k


def test_a_response_becomes_a_rollout_with_the_settings_of_its_request() -> None:
    (rollout,) = from_vllm([line()])
    assert rollout.rollout_id == "answer-000000:0"
    assert rollout.prompt_ids.tolist() == [1, 3]
    assert rollout.support.counts.tolist() == [2, 1]
    assert rollout.sampling_logprobs.tolist() == [LOG_QUARTER, 0.0]
    assert (rollout.temperature, rollout.top_p, rollout.top_k) == (0.7, 0.9, 20)
    assert (rollout.max_new_tokens, rollout.seed, rollout.stop_match) == (8, 5, "2")
    assert json.loads(rollout.engine_meta) == {"engine": "vllm", "source": "import"}
    assert json.loads(rollout.sampling_params)["bad_words"] == ["no"]
    assert rollout.loss_mask.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("mask", "logprobs"),
    [
        pytest.param({"token_ids": [5, 9, 2], "offsets": [0, 2, 3]}, None, id="flat with offsets"),
        pytest.param({"token_ids": [[5, 9], [2]]}, None, id="a list per token"),
        pytest.param(
            {"token_ids": [[5, 9], [2]], "logprobs": [[LOG_3_QUARTERS, LOG_QUARTER], [0.0]]},
            [LOG_3_QUARTERS, LOG_QUARTER, 0.0],
            id="with logprobs",
        ),
    ],
)
def test_outputs_of_generate_are_read_in_every_form(
    mask: dict[str, Any], logprobs: list[float] | None
) -> None:
    completion = SimpleNamespace(
        index=0,
        text="ok",
        token_ids=(9, 2),
        sampling_mask=SimpleNamespace(**mask),
        logprobs=[
            {9: SimpleNamespace(logprob=LOG_QUARTER), 5: SimpleNamespace(logprob=-0.1)},
            {2: SimpleNamespace(logprob=0.0)},
        ],
        finish_reason="length",
        stop_reason=None,
    )
    output = SimpleNamespace(
        request_id="17", prompt="why", prompt_token_ids=[1, 3], outputs=[completion]
    )
    (rollout,) = from_vllm([output], FACTS)
    assert (rollout.rollout_id, rollout.prompt_text, rollout.output_text) == ("17:0", "why", "ok")
    assert rollout.support.ids.tolist() == [5, 9, 2]
    assert rollout.support.offsets.tolist() == [0, 2, 3]
    assert rollout.sampling_logprobs.tolist() == [LOG_QUARTER, 0.0]
    assert rollout.finish_reason == "length"
    got = rollout.support_logprobs
    assert (None if got is None else got.tolist()) == logprobs


def test_logprobs_of_the_mask_say_those_of_the_sampled_tokens() -> None:
    answered = choice(logprobs=None, sampling_mask_logprobs=[[LOG_3_QUARTERS, LOG_QUARTER], [0.0]])
    (rollout,) = from_vllm([line(answered)])
    assert rollout.sampling_logprobs.tolist() == [LOG_QUARTER, 0.0]


def test_each_choice_is_a_rollout_of_its_prompt() -> None:
    answer = line(choice(), choice(index=1), params=PARAMS | {"n": 2}) | {"id": "q"}
    assert [r.rollout_id for r in from_vllm([answer])] == ["q:0", "q:1"]


def test_what_a_request_leaves_out_must_be_said() -> None:
    params = {"temperature": 0.7, "top_k": 20, "max_tokens": 8}
    with pytest.raises(errors.BadFacts, match="^answer 0: does not say top_p, min_p, "):
        list(from_vllm([line(params=params)]))
    (rollout,) = from_vllm([line(params=params)], Facts(top_p=0.9, min_p=0.0))
    assert rollout.top_p == 0.9
    with pytest.raises(errors.BadFacts, match="top_k is 20 there, and 5 was given"):
        list(from_vllm([line()], Facts(top_k=5)))


def test_a_top_k_of_0_is_no_limit() -> None:
    (rollout,) = from_vllm([line(params=PARAMS | {"top_k": 0})])
    assert rollout.top_k == -1


BROKEN = [
    pytest.param(
        line(choice(sampling_mask=None)),
        errors.SamplingMaskMissing,
        "--return-sampling-mask",
        id="no mask",
    ),
    pytest.param(
        line(choice(sampling_mask=[[5, 9]])),
        errors.LengthMismatch,
        "a sampling mask of 1 for 2 tokens",
        id="mask short",
    ),
    pytest.param(
        line(choice(sampling_mask=[[5, 9], []])),
        errors.BadOffsets,
        "no ids for token 1",
        id="empty row",
    ),
    pytest.param(
        line(choice(sampling_mask=[5, 9])), errors.BadValue, "a list for each", id="no rows"
    ),
    pytest.param(
        line(choice(sampling_mask={"token_ids": [5, 9, 2], "offsets": [0, 2]})),
        errors.BadOffsets,
        "end at 2",
        id="offsets short",
    ),
    pytest.param(
        line(choice(sampling_mask_logprobs=[[0.0], [0.0]])),
        errors.LengthMismatch,
        "not one for each id",
        id="logprobs of the mask short",
    ),
    pytest.param(line(choice(logprobs=None)), errors.NullValue, "logprobs 1", id="no logprobs"),
    pytest.param(
        line(choice(logprobs=[{}])), errors.LengthMismatch, "1 logprobs for 2", id="logprobs short"
    ),
    pytest.param(
        line(choice(logprobs=[{}, {}])), errors.BadValue, "must be numbers", id="no sampled logprob"
    ),
    pytest.param(
        line(
            choice(
                token_ids=[8, 2],
                logprobs=None,
                sampling_mask_logprobs=[[LOG_3_QUARTERS, LOG_QUARTER], [0.0]],
            )
        ),
        errors.BadValue,
        "a sampled id is not once in its sampling mask",
        id="outside, and no logprobs",
    ),
    pytest.param(
        line(choice(token_ids=[8, 2])), errors.SampledOutsideSupport, "id 8", id="outside"
    ),
    pytest.param(
        line(choice(finish_reason="error")), errors.BadValue, "'error', not one of", id="error"
    ),
    pytest.param(line(choice(token_ids=None)), errors.NullValue, "of the output", id="no tokens"),
    pytest.param(
        {"request": {"sampling_params": PARAMS}, "response": line()["response"]},
        errors.NullValue,
        "of the prompt",
        id="no prompt",
    ),
    pytest.param(
        line(params=PARAMS | {"temperature": 0.005}),
        errors.NotReplayable,
        "no less than 0.01",
        id="a temperature that vLLM does not sample at",
    ),
    pytest.param(
        line(params=PARAMS | {"repetition_penalty": 1.2}),
        errors.NotReplayable,
        "repetition_penalty",
        id="penalty",
    ),
    pytest.param(
        line(params=PARAMS | {"top_q": 1}), errors.NotReplayable, "top_q", id="unknown setting"
    ),
    pytest.param(
        line(choice(sampling_mask=3)), errors.BadValue, "a list for each", id="mask of no form"
    ),
    pytest.param(
        line(params=PARAMS | {"temperature": "hot"}),
        errors.NotReplayable,
        "temperature",
        id="a temperature of no type",
    ),
    pytest.param(
        line(choice(index="0")), errors.BadValue, r"choices\[0\].index", id="index of no type"
    ),
    pytest.param({"response": {}}, errors.BadValue, '"request"', id="no choices"),
    pytest.param([1], errors.BadValue, '"request"', id="no object"),
]


@pytest.mark.parametrize(("answer", "error", "words"), BROKEN)
def test_a_broken_answer_says_what_is_wrong(
    answer: Any, error: type[errors.RolloutError], words: str
) -> None:
    with pytest.raises(error, match=words):
        list(from_vllm([answer]))


def test_a_broken_line_is_rejected_as_it_came(tmp_path: Path) -> None:
    good, broken = json.dumps(line()), json.dumps(line(choice(sampling_mask=None)))
    (tmp_path / "d").write_text(f"{good}\n{broken}\n\nno json\n")
    result = import_file(READER, tmp_path / "d", tmp_path / "run", name="vllm")
    assert (result.rollouts, result.rejected) == (1, {"sampling_mask_missing": 1, "bad_value": 1})
    lines = (tmp_path / "run" / "rejected.jsonl").read_text().splitlines()
    rejected = [json.loads(row) for row in lines]
    assert [(row["line"], row["body"]) for row in rejected] == [(2, broken), (4, "no json")]
    assert [r.rollout_id for r in open_run(tmp_path / "run")] == ["line-000001:0"]


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="cannot be read"):
        import_file(READER, tmp_path / "nowhere", tmp_path / "run", name="vllm")
    assert not (tmp_path / "run").exists()

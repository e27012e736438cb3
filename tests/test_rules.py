"""One broken input per rule of docs/format.md."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from builders import make_rollout

from rollout import errors
from rollout.record import WeightSpan
from rollout.record_faults import explain_record
from rollout.rules import check_content, check_format, count_tokens, find_faults
from rollout.support import Support


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_a_good_rollout_passes_every_rule() -> None:
    check_format(make_rollout())
    check_content(make_rollout(), vocab_size=10)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        pytest.param({"rollout_id": "7:1"}, errors.BadRolloutId, "must be '7:0'", id="rollout_id"),
        pytest.param(
            {"rollout_id": "7:0#abort0"}, errors.BadRolloutId, "must be '7:0'", id="not aborted"
        ),
        pytest.param(
            {"finish_reason": "abort"}, errors.BadRolloutId, "must be '7:0#abort<n>'", id="aborted"
        ),
        pytest.param(
            {"prompt_ids": np.zeros(0, np.int32)}, errors.EmptyPrompt, "at least one", id="prompt"
        ),
        pytest.param(
            {"loss_mask": np.ones(2, np.int8)},
            errors.LengthMismatch,
            "2 loss_mask for 3 output_ids",
            id="loss_mask length",
        ),
        pytest.param(
            {"sampling_logprobs": f32(0, 0)},
            errors.LengthMismatch,
            "2 sampling_logprobs for 3",
            id="sampling_logprobs length",
        ),
        pytest.param(
            {"full_logprobs": f32(0, 0, 0, 0)},
            errors.LengthMismatch,
            "4 full_logprobs for 3",
            id="full_logprobs length",
        ),
        pytest.param(
            {"support": Support.from_rows([[5, 9], [2]])},
            errors.LengthMismatch,
            "2 support_counts for 3",
            id="support rows",
        ),
        pytest.param(
            {"support_logprobs": f32(0, 0)},
            errors.LengthMismatch,
            "2 support_logprobs for 3 support_ids",
            id="support_logprobs length",
        ),
        pytest.param(
            {"loss_mask": np.array([1, 2, 1], np.int8)}, errors.BadValue, "0 and 1", id="loss_mask"
        ),
        pytest.param(
            {"loss_mask": np.array([1, 1, 1], np.int8)},
            errors.MissingSupport,
            "output token 1 has loss_mask 1 and an empty support",
            id="missing support",
        ),
        pytest.param(
            {"finish_reason": "done"}, errors.BadValue, "'done', not one of", id="finish_reason"
        ),
        pytest.param({"temperature": 0.0}, errors.BadValue, "must be positive", id="temperature"),
        pytest.param({"top_k": 0}, errors.BadValue, "-1 or at least 1", id="top_k"),
        pytest.param(
            {"weight_versions": (WeightSpan("v1", 0, 4),)},
            errors.BadValue,
            r"span \[0, 4\) does not lie in \[0, 3\)",
            id="weight span",
        ),
    ],
)
def test_broken_format_rule_raises(
    changes: dict[str, Any], error: type[errors.FormatError], words: str
) -> None:
    with pytest.raises(error, match=words):
        check_format(make_rollout(**changes))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        pytest.param(
            {"output_ids": np.array([3, 8, 2], np.int32)},
            errors.SampledOutsideSupport,
            "output token 0: sampled id 3 is not among the 2 ids",
            id="sampled outside its support",
        ),
        pytest.param(
            {"support": Support.from_rows([[9, 9], [], [2]])},
            errors.DuplicateIds,
            "output token 0: its support holds an id twice",
            id="id twice in a support",
        ),
        pytest.param(
            {"prompt_ids": np.array([1, 10], np.int32)},
            errors.IdOutsideVocabulary,
            r"prompt_ids: id 10 is outside the vocabulary, must be in \[0, 10\)",
            id="prompt id beyond the vocabulary",
        ),
        pytest.param(
            {"support": Support.from_rows([[5, 9], [], [-2]])},
            errors.IdOutsideVocabulary,
            "support_ids: id -2",
            id="negative support id",
        ),
        pytest.param(
            {"sampling_logprobs": f32(np.nan, 0, 0)},
            errors.NonfiniteLogprob,
            "output token 0: sampling_logprobs holds nan",
            id="NaN",
        ),
        pytest.param(
            {"full_logprobs": f32(0, 0, -np.inf)},
            errors.NonfiniteLogprob,
            "output token 2: full_logprobs holds -inf",
            id="-inf",
        ),
        pytest.param(
            {"sampling_logprobs": f32(0.3, 0, 0)},
            errors.PositiveLogprob,
            r"output token 0: sampling_logprobs holds \+0.3",
            id="positive",
        ),
        pytest.param(
            {"sampling_logprobs": f32(np.log(0.25), 0, -0.5)},
            errors.SingletonLogprob,
            "output token 2: only one id to choose from, but its sampling logprob is -0.5",
            id="singleton",
        ),
        pytest.param(
            {"support_logprobs": f32(np.log(0.7), np.log(0.25), 0)},
            errors.SupportTruncated,
            "output token 0: the probabilities of its support sum to 0.950000",
            id="support does not sum to 1",
        ),
        pytest.param(
            {"sampling_logprobs": f32(np.log(0.75), 0, 0)},
            errors.LogprobsDisagree,
            "output token 0: sampling_logprobs and support_logprobs",
            id="two logprobs for the sampled id",
        ),
    ],
)
def test_broken_content_rule_raises(
    changes: dict[str, Any], error: type[errors.ContentError], words: str
) -> None:
    rollout = make_rollout(**changes)
    check_format(rollout)
    with pytest.raises(error, match=words):
        check_content(rollout, vocab_size=10)
    assert error.code in {fault.code for fault in find_faults(rollout, vocab_size=10)}


@pytest.mark.parametrize("value", [-0.0, 0.0, 1e-6, -1e-9], ids=str)
def test_rounding_above_zero_is_accepted(value: float) -> None:
    check_content(make_rollout(sampling_logprobs=f32(np.log(0.25), 0, value)))


def test_without_a_vocabulary_only_negative_ids_are_outside() -> None:
    rollout = make_rollout(prompt_ids=np.array([1, 2_000_000_000], np.int32))
    assert find_faults(rollout) == []
    assert find_faults(rollout, 10)[0].positions.tolist() == [-1]


def test_a_token_that_breaks_a_rule_twice_is_counted_once() -> None:
    """-9 is sampled first and in its support, -1 is in the prompt."""
    rollout = make_rollout(
        prompt_ids=np.array([1, -1], np.int32),
        output_ids=np.array([-9, 8, 2], np.int32),
        support=Support.from_rows([[5, -9], [], [2]]),
    )
    faults = find_faults(rollout)
    assert [f.positions.tolist() for f in faults] == [[-1], [0], [0]]
    assert count_tokens(faults) == 2
    (told,) = explain_record([rollout])
    assert (told.code, told.evidence) == ("id_outside_vocabulary", {"tokens": 2})


def test_an_aborted_rollout_has_an_id_of_its_own() -> None:
    check_format(make_rollout(rollout_id="7:0#abort2", finish_reason="abort"))


def test_support_larger_than_top_k_is_no_fault() -> None:
    thirds = f32(np.log(1 / 3), np.log(1 / 3), np.log(1 / 3), 0)
    rollout = make_rollout(
        top_k=2,
        support=Support.from_rows([[5, 9, 4], [], [2]]),
        support_logprobs=thirds,
        sampling_logprobs=f32(np.log(1 / 3), 0, 0),
    )
    assert find_faults(rollout) == []


def test_every_fault_of_a_token_is_found() -> None:
    rollout = make_rollout(
        output_ids=np.array([3, 8, 2], np.int32), sampling_logprobs=f32(np.nan, 0, 0.5)
    )
    found = {fault.code: fault.positions.tolist() for fault in find_faults(rollout)}
    assert found == {
        "sampled_outside_support": [0],
        "nonfinite_logprob": [0],
        "positive_logprob": [2],
        "singleton_logprob": [2],
        "logprobs_disagree": [2],
    }

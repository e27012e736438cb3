"""miles: samples and its debug dump, to and fro; forced tokens are singletons there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from builders import RECORDED, assert_same_rollout, make_rollout, make_two_turns, recorded_rollouts
from hypothesis import given

from rollout import errors
from rollout.adapters.facts import Facts
from rollout.adapters.miles import LAYOUT, from_miles, to_miles
from rollout.record import WeightSpan
from rollout.support import Support

FACTS = Facts(temperature=0.5, top_p=0.875, top_k=3, min_p=0.0, max_new_tokens=8)


def written_by_miles(**changes: Any) -> dict[str, Any]:
    """What `Sample.to_dict()` gives of two turns, without anything of ours."""
    (sample,) = to_miles([make_two_turns()])
    del sample["rollout_sampling_mask_log_probs"]
    return sample | {"metadata": {}, "weight_versions": []} | changes


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_sets_come_back_as_they_were(name: str, tmp_path: Path) -> None:
    for temperature in (1.0, 0.7, 1.3):
        rollouts = [r for r in recorded_rollouts(name) if r.temperature == temperature]
        LAYOUT.write(rollouts, tmp_path / "0.pt")
        items = LAYOUT.reader().items(tmp_path / "0.pt")
        back = [LAYOUT.parse(item, n, Facts()) for n, item in items]
        assert len(back) == 12
        for got, wanted in zip(back, rollouts, strict=True):
            assert_same_rollout(got, wanted)


def test_two_turns_with_forced_tokens_come_back_as_they_were() -> None:
    (back,) = from_miles(to_miles([make_two_turns()]))
    assert_same_rollout(back, make_two_turns())


@given(st.lists(st.integers(0, 4), max_size=8), st.booleans())
def test_any_pattern_of_forced_tokens_comes_back(counts: list[int], with_logprobs: bool) -> None:
    rollout = make_rollout(
        output_ids=np.arange(len(counts), dtype=np.int32),
        loss_mask=np.zeros(len(counts), np.int8),
        sampling_logprobs=-np.log(np.maximum(np.array(counts), 1)).astype(np.float32),
        support=Support.from_rows([[t + 10 * i for i in range(c)] for t, c in enumerate(counts)]),
        full_logprobs=None,
        support_logprobs=-np.log(np.repeat(counts, counts)).astype(np.float32)
        if with_logprobs
        else None,
        weight_versions=(),
    )
    (back,) = from_miles(to_miles([rollout]))
    assert_same_rollout(back, rollout)


def test_a_sample_has_the_fields_of_the_source_and_a_singleton_where_forced() -> None:
    (sample,) = to_miles([make_two_turns()])
    assert sample["rollout_sampling_mask_ids"] == [5, 9, 5, 6, 2, 40, 41, 8, 7, 1, 2]
    assert sample["rollout_sampling_mask_offsets"] == [0, 2, 4, 5, 6, 7, 10, 11]
    logprobs = sample["rollout_sampling_mask_log_probs"]
    assert logprobs.dtype == torch.float32
    probabilities = [0.75, 0.25, 0.5, 0.5, 1, 1, 1, 0.5, 0.125, 0.375, 1]
    np.testing.assert_allclose(logprobs.exp().numpy(), probabilities, rtol=1e-6)
    assert sample["rollout_log_probs"][3:5] == [0.0, 0.0]
    assert sample["loss_mask"] == [1, 1, 0, 0, 0, 1, 1]
    assert sample["tokens"] == [1, 3, 9, 5, 2, 40, 41, 7, 2]
    assert sample["response_length"] == 7
    assert sample["metadata"]["rollout"]["forced"] == [3, 4]


def test_the_dump_is_what_miles_loads(tmp_path: Path) -> None:
    (start, *_) = LAYOUT.write([make_rollout()], tmp_path / "0.pt")
    dump = torch.load(tmp_path / "0.pt", weights_only=True)
    assert list(dump) == ["rollout_id", "metadata", "samples"]
    assert start == (
        "start miles with --rollout-temperature 0.5 --rollout-top-p 0.875 --rollout-top-k 2, "
        "as they were sampled"
    )


def test_an_untrained_singleton_of_miles_own_is_taken_for_a_forced_token() -> None:
    (rollout,) = from_miles([written_by_miles()], FACTS)
    # the third was sampled without an alternative: certain as well, and not trained on
    assert rollout.support.counts.tolist() == [2, 2, 0, 0, 0, 3, 1]


def test_an_untrained_singleton_with_a_logprob_is_no_forced_token() -> None:
    logprobs = [-1.3862944, -0.6931472, 0.0, -3.0, 0.0, -2.0794415, 0.0]
    with pytest.raises(errors.SingletonLogprob, match="output token 3"):
        list(from_miles([written_by_miles(rollout_log_probs=logprobs)], FACTS))


def test_spans_of_weight_versions_are_counted_from_the_first_output_token() -> None:
    calls = [
        [{"version": "8", "abs_start": 2, "abs_end": 5}],
        [],
        [{"version": "9", "abs_start": 7, "abs_end": 9}],
    ]
    (rollout,) = from_miles([written_by_miles(weight_versions=calls)], FACTS)
    assert rollout.weight_versions == (WeightSpan("8", 0, 3), WeightSpan("9", 5, 7))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        pytest.param(
            {"rollout_sampling_mask_ids": None},
            errors.MissingSupport,
            "--rollout-top-k",
            id="no supports",
        ),
        pytest.param(
            {"rollout_sampling_mask_ids": None, "rollout_sampling_mask": object()},
            errors.MissingSupport,
            r"_as_tensors\(\)",
            id="supports as an object of miles",
        ),
        pytest.param(
            {"rollout_sampling_mask_offsets": [0, 2, 4, 5, 6, 6, 10, 11]},
            errors.BadOffsets,
            "no ids for token 4; miles allows no empty row",
            id="empty row",
        ),
        pytest.param(
            {"rollout_sampling_mask_offsets": [0, 11]},
            errors.LengthMismatch,
            "rollout_sampling_mask_offsets are of 1 tokens, the response has 7",
            id="offsets short",
        ),
        pytest.param(
            {"loss_mask": [1]}, errors.LengthMismatch, "loss_mask are of 1", id="mask short"
        ),
        pytest.param(
            {"rollout_sampling_mask_log_probs": [0.0]},
            errors.LengthMismatch,
            "1 rollout_sampling_mask_log_probs for 11 ids",
            id="logprobs short",
        ),
        pytest.param(
            {"weight_versions": [[{"version": "8", "abs_start": 0, "abs_end": 5}]]},
            errors.BadValue,
            r"span \[-2, 3\)",
            id="a span over the prompt",
        ),
    ],
)
def test_a_broken_sample_says_what_is_wrong(
    change: dict[str, Any], error: type[errors.RolloutError], words: str
) -> None:
    with pytest.raises(error, match=words):
        list(from_miles([written_by_miles(**change)], FACTS))


def test_a_forced_token_that_is_no_singleton_any_more_is_refused() -> None:
    (sample,) = to_miles([make_rollout()])
    sample["metadata"]["rollout"]["forced"] = [0]
    with pytest.raises(errors.BadValue, match="token 0 was exported as forced"):
        list(from_miles([sample]))

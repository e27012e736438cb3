"""The parts of verl's DataProto, field by field, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters.layouts import REFUSED, assert_holds, empty, longer, multi_turn, recorded, scored
from builders import RECORDED

from rollout import errors
from rollout.adapters.verl import load_verl, to_verl, write_verl
from rollout.record import Rollout

PAD = 11


def test_every_tensor_of_two_rollouts() -> None:
    tensors = to_verl([scored(), longer()], pad_id=PAD)["tensors"]
    quarter = float(np.log(np.float32(0.25)))
    wanted = {
        "prompts": torch.tensor([[PAD, 1, 3], [1, 3, 5]]),
        "responses": torch.tensor([[9, 8, 2, PAD], [4, 8, 2, 8]]),
        "response_mask": torch.tensor([[1, 0, 1, 0], [1, 0, 0, 1]]),
        "input_ids": torch.tensor([[PAD, 1, 3, 9, 8, 2, PAD], [1, 3, 5, 4, 8, 2, 8]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]]),
        "position_ids": torch.tensor([[0, 0, 1, 2, 3, 4, 4], [0, 1, 2, 3, 4, 5, 6]]),
        "rollout_log_probs": torch.tensor([[quarter, 0.0, 0.0, 0.0], [-1.5, 0.0, 0.0, -0.5]]),
        "rm_scores": torch.tensor([[0.0, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, -1.0]]),
    }
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0, msg=name)


def test_what_is_no_tensor() -> None:
    data = to_verl([scored(), longer()], pad_id=PAD)
    assert data.keys() == {"tensors", "non_tensors", "meta_info"}
    assert data["meta_info"] == {"temperature": 0.5}
    columns = data["non_tensors"]
    assert {(c.dtype, c.shape) for c in columns.values()} == {(np.dtype(object), (2,))}
    ids = columns.pop("rollout_sampling_mask_ids")
    offsets = columns.pop("rollout_sampling_mask_offsets")
    assert {name: column.tolist() for name, column in columns.items()} == {
        "uid": ["7", "7"],
        "rollout_id": ["7:0", "7:1"],
        "finish_reason": ["stop", "length"],
    }
    np.testing.assert_array_equal(ids[1], np.array([5, 9, 4, 2, 8, 6], np.int32), strict=True)
    np.testing.assert_array_equal(offsets[1], np.array([0, 3, 3, 4, 6]), strict=True)


def test_supports_of_the_same_size_stay_one_object_each() -> None:
    columns = to_verl([scored(), scored(sample_index=1)], pad_id=PAD)["non_tensors"]
    assert columns["rollout_sampling_mask_ids"].shape == (2,)


def test_given_lengths_are_those_of_the_tensors() -> None:
    tensors = to_verl([scored()], pad_id=PAD, prompt_length=4, response_length=5)["tensors"]
    assert tensors["prompts"].tolist() == [[PAD, PAD, 1, 3]]
    assert tensors["responses"].tolist() == [[9, 8, 2, PAD, PAD]]
    assert tensors["attention_mask"].tolist() == [[0, 0, 1, 1, 1, 1, 1, 0, 0]]


def test_without_any_reward_verl_scores_itself() -> None:
    rollouts = [scored(reward=None), longer(reward=None)]
    assert "rm_scores" not in to_verl(rollouts, pad_id=PAD)["tensors"]


def assert_survives(data: dict[str, Any], rollouts: list[Rollout]) -> None:
    for i, wanted in enumerate(rollouts):
        row = {name: tensor[i].numpy() for name, tensor in data["tensors"].items()}
        beside = {name: column[i] for name, column in data["non_tensors"].items()}
        is_prompt = np.arange(len(row["input_ids"])) < len(row["prompts"])
        is_token = row["attention_mask"] == 1
        length = (is_token & ~is_prompt).sum()
        assert row["rm_scores"].nonzero()[0].tolist() == [length - 1] * (wanted.reward != 0)
        assert row["rm_scores"].sum() == np.float32(wanted.reward)
        assert not row["response_mask"][length:].any()
        assert not row["rollout_log_probs"][length:].any()
        assert_holds(
            wanted,
            rollout_id=beside["rollout_id"],
            prompt_id=beside["uid"],
            prompt_ids=row["input_ids"][is_token & is_prompt].astype(np.int32),
            output_ids=row["input_ids"][is_token & ~is_prompt].astype(np.int32),
            loss_mask=row["response_mask"][:length].astype(np.int8),
            sampling_logprobs=row["rollout_log_probs"][:length],
            support_ids=beside["rollout_sampling_mask_ids"],
            support_offsets=beside["rollout_sampling_mask_offsets"],
            finish_reason=beside["finish_reason"],
            temperature=data["meta_info"]["temperature"],
        )


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_set_survives(name: str) -> None:
    for rollouts in recorded(name):
        assert_survives(to_verl(rollouts, pad_id=2), rollouts)  # 2 is an id of theirs too


def test_turns_survive() -> None:
    assert_survives(to_verl([multi_turn()], pad_id=PAD), [multi_turn()])


def test_a_file_holds_tensors_and_plain_containers(tmp_path: Path) -> None:
    other = scored(prompt_id="other")
    assert write_verl([scored(), other, longer()], tmp_path / "out.pt", PAD) == ()
    plain = torch.load(tmp_path / "out.pt", weights_only=True)
    assert plain["non_tensors"]["uid"] == ["7", "7", "other"]
    assert_survives(load_verl(tmp_path / "out.pt"), [scored(), longer(), other])


def test_a_file_without_rewards_comes_with_a_note(tmp_path: Path) -> None:
    (note,) = write_verl([scored(reward=None)], tmp_path / "out.pt", PAD)
    assert note == "no rollout has a reward, so there are no rm_scores: verl must score them"


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    torch.save({"tensors": {}}, tmp_path / "out.pt")
    with pytest.raises(errors.FormatError, match="got no 'non_tensors'"):
        load_verl(tmp_path / "out.pt")


@pytest.mark.parametrize(
    ("rollouts", "error", "words"),
    [
        *REFUSED,
        pytest.param([empty()], errors.NotExpressible, "must have an output token", id="no output"),
        pytest.param(
            [scored(), longer(reward=None)], errors.NotExpressible, "7:1: must have a", id="reward"
        ),
    ],
)
def test_what_verl_cannot_be_told_is_refused(
    rollouts: list[Rollout], error: type[errors.RolloutError], words: str
) -> None:
    with pytest.raises(error, match=words):
        to_verl(rollouts, pad_id=PAD)


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        pytest.param(
            {"prompt_length": 2}, "7:1: has 3 tokens, but prompt_length is 2", id="prompt"
        ),
        pytest.param({"response_length": 3}, "7:1: has 4 tokens, but response_length", id="output"),
    ],
)
def test_a_rollout_longer_than_was_given_is_refused(lengths: dict[str, int], words: str) -> None:
    with pytest.raises(errors.NotExpressible, match=words):
        to_verl([scored(), longer()], pad_id=PAD, **lengths)

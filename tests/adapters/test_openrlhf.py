"""The arguments of OpenRLHF's Experience, field by field, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters.layouts import REFUSED, assert_holds, empty, longer, multi_turn, recorded, scored
from builders import RECORDED

from rollout import errors
from rollout.adapters.openrlhf import to_openrlhf, write_openrlhf
from rollout.record import Rollout


def assert_equal(got: Any, wanted: Any, name: str) -> None:
    if isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, msg=name)
    else:
        assert got == wanted, name


def test_every_field_of_a_rollout() -> None:
    (row,) = to_openrlhf([longer()])
    experience = row.pop("experience")
    info = experience.pop("info")
    assert info == {"reward": torch.tensor([-1.0])}
    # 3 tokens of prompt and 4 of output: an action for all but the first
    wanted = {
        "sequences": torch.tensor([[1, 3, 5, 4, 8, 2, 8]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1]]),
        "action_mask": torch.tensor([[False, False, True, False, False, True]]),
        "rollout_log_probs": torch.tensor([[0.0, 0.0, -1.5, 0.0, 0.0, -0.5]]),
        "rewards": torch.tensor([-1.0]),
        "response_length": torch.tensor([4]),
        "truncated": torch.tensor([True]),
        "total_length": torch.tensor([7.0]),
        "prompts": ["why"],
        "labels": [""],
    }
    assert experience.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_equal(experience[name], value, name)
    beside = {
        "support_ids": torch.tensor([5, 9, 4, 2, 8, 6], dtype=torch.int32),
        "support_offsets": torch.tensor([0, 0, 0, 3, 3, 4, 6]),
        "rollout_id": "7:1",
    }
    assert row.keys() == beside.keys()
    for name, value in beside.items():
        assert_equal(row[name], value, name)


def test_without_any_reward_a_reward_model_scores() -> None:
    for row in to_openrlhf([scored(reward=None), longer(reward=None)]):
        assert not {"rewards", "info"} & row["experience"].keys()


def test_prompts_are_there_for_all_rows_or_for_none() -> None:
    rows = to_openrlhf([scored(prompt_text=None), longer()])
    assert not any("prompts" in row["experience"] for row in rows)


def test_a_rollout_without_output_has_no_action() -> None:
    (row,) = to_openrlhf([empty()])
    experience = row["experience"]
    assert experience["sequences"].tolist() == [[1, 3]]
    assert experience["action_mask"].tolist() == [[False]]
    assert experience["response_length"].tolist() == [0]


def test_a_rollout_that_is_not_trained_on_has_no_length() -> None:
    (row,) = to_openrlhf([scored(loss_mask=np.zeros(3, np.int8))])
    assert row["experience"]["response_length"].tolist() == [0]


def assert_survives(rows: list[dict[str, Any]], rollouts: list[Rollout]) -> None:
    for row, wanted in zip(rows, rollouts, strict=True):
        experience = {
            name: value[0].numpy() if isinstance(value, torch.Tensor) else value
            for name, value in row["experience"].items()
        }
        split = len(wanted.prompt_ids)
        assert not experience["action_mask"][: split - 1].any()
        assert not experience["rollout_log_probs"][: split - 1].any()
        assert experience["attention_mask"].all()
        assert experience["rewards"] == np.float32(wanted.reward)
        assert not row["support_offsets"][: split - 1].any()
        assert_holds(
            wanted,
            rollout_id=row["rollout_id"],
            prompt_ids=experience["sequences"][:split].astype(np.int32),
            output_ids=experience["sequences"][split:].astype(np.int32),
            loss_mask=experience["action_mask"][split - 1 :].astype(np.int8),
            sampling_logprobs=experience["rollout_log_probs"][split - 1 :],
            support_ids=row["support_ids"].numpy(),
            support_offsets=row["support_offsets"].numpy()[split - 1 :],
            finish_reason="length" if experience["truncated"] else "stop",
        )


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_set_survives(name: str) -> None:
    for rollouts in recorded(name):
        assert_survives(to_openrlhf(rollouts), rollouts)


def test_turns_survive() -> None:
    assert_survives(to_openrlhf([multi_turn()]), [multi_turn()])


def test_a_file_holds_tensors_and_plain_containers(tmp_path: Path) -> None:
    other = scored(prompt_id="other")
    assert write_openrlhf([scored(), other, longer()], tmp_path / "out.pt") == ()
    samples = torch.load(tmp_path / "out.pt", weights_only=True)["samples"]
    assert_survives(samples, [scored(), longer(), other])


def test_a_file_without_rewards_comes_with_a_note(tmp_path: Path) -> None:
    (note,) = write_openrlhf([scored(reward=None)], tmp_path / "out.pt")
    assert note == "no rollout has a reward: OpenRLHF must score them with a reward model"


@pytest.mark.parametrize(
    ("rollouts", "error", "words"),
    [
        *REFUSED,
        pytest.param(
            [scored(rollout_id="7:0#abort0", finish_reason="abort")],
            errors.NotExpressible,
            "was aborted",
            id="aborted",
        ),
        pytest.param(
            [scored(), longer(reward=None)], errors.NotExpressible, "7:1: must have a", id="reward"
        ),
    ],
)
def test_what_openrlhf_cannot_be_told_is_refused(
    rollouts: list[Rollout], error: type[errors.RolloutError], words: str
) -> None:
    with pytest.raises(error, match=words):
        to_openrlhf(rollouts)

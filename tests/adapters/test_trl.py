"""The dict that TRL's rollout_func returns, field by field, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters.layouts import REFUSED, assert_holds, empty, longer, multi_turn, recorded, scored
from builders import RECORDED

from rollout import errors
from rollout.adapters.trl import to_trl, write_trl
from rollout.record import Rollout
from rollout.support import Support


def test_every_field_of_two_rollouts() -> None:
    assert to_trl([scored(), longer(reward=None)]) == {
        "prompt_ids": [[1, 3], [1, 3, 5]],
        "completion_ids": [[9, 8, 2], [4, 8, 2, 8]],
        "logprobs": [[float(np.log(np.float32(0.25))), 0.0, 0.0], [-1.5, 0.0, 0.0, -0.5]],
        "env_mask": [[1, 0, 1], [1, 0, 0, 1]],
        "sampling_mask_ids": [[5, 9, 2], [5, 9, 4, 2, 8, 6]],
        "sampling_mask_counts": [[2, 0, 1], [3, 0, 1, 2]],
        "reward": [0.5, None],
        "finish_reason": ["stop", "length"],
        "rollout_id": ["7:0", "7:1"],
    }


def assert_survives(content: dict[str, list[Any]], rollouts: list[Rollout]) -> None:
    for i, wanted in enumerate(rollouts):
        row = {name: column[i] for name, column in content.items()}
        support = Support.from_counts(
            np.array(row["sampling_mask_ids"], np.int32), np.array(row["sampling_mask_counts"])
        )
        assert_holds(
            wanted,
            rollout_id=row["rollout_id"],
            prompt_ids=np.array(row["prompt_ids"], np.int32),
            output_ids=np.array(row["completion_ids"], np.int32),
            loss_mask=np.array(row["env_mask"], np.int8),
            sampling_logprobs=np.array(row["logprobs"], np.float32),
            support_ids=support.ids,
            support_offsets=support.offsets,
            reward=row["reward"],
            finish_reason=row["finish_reason"],
        )


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_set_survives(name: str) -> None:
    for rollouts in recorded(name):
        assert_survives(to_trl(rollouts), rollouts)


def test_turns_survive() -> None:
    assert_survives(to_trl([multi_turn()]), [multi_turn()])


def test_a_file_is_json_with_the_rollouts_of_a_prompt_together(tmp_path: Path) -> None:
    other = scored(prompt_id="other", reward=None)
    notes = write_trl([scored(), other, longer()], tmp_path / "out.json")
    assert notes == ("1 rollouts have no reward",)
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["rollout_id"] == ["7:0", "7:1", "other:0"]
    assert_survives(content, [scored(), longer(), other])


@pytest.mark.parametrize(
    ("rollouts", "error", "words"),
    [
        *REFUSED,
        pytest.param([empty()], errors.NotExpressible, "must have an output token", id="no output"),
    ],
)
def test_what_trl_cannot_be_told_is_refused(
    rollouts: list[Rollout], error: type[errors.RolloutError], words: str
) -> None:
    with pytest.raises(error, match=words):
        to_trl(rollouts)

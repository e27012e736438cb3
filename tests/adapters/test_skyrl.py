"""SkyRL's GeneratorOutput, field by field, and back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters.layouts import REFUSED, empty, longer, multi_turn, recorded, scored
from builders import RECORDED, assert_same_rollout

from rollout import errors
from rollout.adapters.facts import Facts
from rollout.adapters.skyrl import from_skyrl, load_skyrl, to_skyrl, write_skyrl
from rollout.record import Rollout


def test_every_field_of_two_rollouts() -> None:
    output = to_skyrl([scored(), longer()])
    supports = output.pop("rollout_sample_support")
    assert [row["rollout_id"] for row in output.pop("rollout")] == ["7:0", "7:1"]
    assert output == {
        "prompt_token_ids": [[1, 3], [1, 3, 5]],
        "response_ids": [[9, 8, 2], [4, 8, 2, 8]],
        "rewards": [0.5, -1.0],
        "loss_masks": [[1, 0, 1], [1, 0, 0, 1]],
        "stop_reasons": ["stop", "length"],
        "rollout_metrics": None,
        "rollout_logprobs": [[float(np.log(np.float32(0.25))), 0.0, 0.0], [-1.5, 0.0, 0.0, -0.5]],
        "trajectory_ids": None,
        "trajectory_generation_times": None,
        "trajectory_time_splits": None,
        "rollout_expert_indices": None,
        "is_last_step": None,
        "env_metrics": None,
        "pixel_values": None,
        "image_grid_thw": None,
        "uids": ["7", "7"],
    }
    first = np.array([[5, 9, -1], [-1, -1, -1], [2, -1, -1]], np.int32)
    second = np.array([[5, 9, 4], [-1, -1, -1], [2, -1, -1], [8, 6, -1]], np.int32)
    np.testing.assert_array_equal(supports[0], first, strict=True)
    np.testing.assert_array_equal(supports[1], second, strict=True)


def test_a_width_is_kept_so_that_outputs_can_be_joined() -> None:
    supports = to_skyrl([scored()], width=5)["rollout_sample_support"]
    np.testing.assert_array_equal(supports[0][0], [5, 9, -1, -1, -1])


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_set_survives(name: str) -> None:
    for rollouts in recorded(name):
        back = from_skyrl(to_skyrl(rollouts))
        for got, wanted in zip(back, rollouts, strict=True):
            assert_same_rollout(got, wanted)


def test_turns_survive() -> None:
    (back,) = from_skyrl(to_skyrl([multi_turn()]))
    assert_same_rollout(back, multi_turn())


def test_a_file_holds_tensors_and_plain_containers(tmp_path: Path) -> None:
    other = scored(prompt_id="other")
    notes = write_skyrl([scored(), other, longer()], tmp_path / "out.pt")
    assert notes == ("supports are padded to 3 ids, the size of the largest",)
    plain = torch.load(tmp_path / "out.pt", weights_only=True)
    assert plain["uids"] == ["7", "7", "other"]
    assert plain["rollout_sample_support"][0].dtype == torch.int32
    back = list(from_skyrl(load_skyrl(tmp_path / "out.pt")))
    for got, wanted in zip(back, [scored(), longer(), other], strict=True):
        assert_same_rollout(got, wanted)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    torch.save({"rewards": []}, tmp_path / "out.pt")
    with pytest.raises(errors.FormatError, match="got no 'prompt_token_ids'"):
        load_skyrl(tmp_path / "out.pt")


def test_a_file_whose_supports_are_no_tensors_is_refused(tmp_path: Path) -> None:
    output = to_skyrl([scored()])
    torch.save(output | {"rollout_sample_support": [[5, 9]]}, tmp_path / "out.pt")
    with pytest.raises(errors.FormatError, match="must be a list of tensors"):
        load_skyrl(tmp_path / "out.pt")


@pytest.mark.parametrize(
    ("rollouts", "error", "words"),
    [
        *REFUSED,
        pytest.param([scored(reward=None)], errors.NotExpressible, "have a reward", id="reward"),
        pytest.param(
            [scored(reward=float("nan"))], errors.NotExpressible, "must be finite", id="nan"
        ),
        pytest.param([empty()], errors.NotExpressible, "must have an output token", id="no output"),
    ],
)
def test_what_skyrl_cannot_be_told_is_refused(
    rollouts: list[Rollout], error: type[errors.RolloutError], words: str
) -> None:
    with pytest.raises(error, match=words):
        to_skyrl(rollouts)


def test_a_support_larger_than_the_width_is_refused() -> None:
    with pytest.raises(errors.NotExpressible, match=r"token 0 has a support of 2 ids.*width is 1"):
        to_skyrl([scored()], width=1)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        pytest.param({"rollout_logprobs": None}, errors.NullValue, "rollout_logprobs", id="null"),
        pytest.param({"rewards": (0.5,)}, errors.BadValue, "must be a list", id="no list"),
        pytest.param({"rewards": []}, errors.LengthMismatch, "has 0 entries", id="length"),
        pytest.param({"rewards": [[0.0, 0.0, 1.0]]}, errors.BadValue, "per token", id="rewards"),
        pytest.param({"loss_masks": [[1, 0, 2]]}, errors.BadValue, "only 0 and 1", id="loss mask"),
        pytest.param({"stop_reasons": ["eos"]}, errors.BadValue, "finish_reason", id="stop reason"),
        pytest.param(
            {"rollout_sample_support": [[[5, 9]]]}, errors.BadValue, "int32 array", id="no array"
        ),
        pytest.param(
            {"rollout_sample_support": [np.array([[5, 9], [-1, 8], [2, -1]], np.int32)]},
            errors.BadValue,
            "only be at the end",
            id="padding first",
        ),
        pytest.param(
            {"rollout_sample_support": [np.array([[5, 9], [-1, -1], [-1, -1]], np.int32)]},
            errors.MissingSupport,
            "output token 2",
            id="no support of a trained token",
        ),
    ],
)
def test_an_output_in_another_form_is_refused(
    changes: dict[str, Any], error: type[errors.RolloutError], words: str
) -> None:
    output = to_skyrl([scored(full_logprobs=None, support_logprobs=None)]) | changes
    with pytest.raises(error, match=words):
        list(from_skyrl(output))


@dataclass
class TrajectoryID:
    """As SkyRL's."""

    instance_id: str
    repetition_id: int


FACTS = Facts(temperature=0.5, top_p=0.875, top_k=2, min_p=0.0, max_new_tokens=3)


@pytest.mark.parametrize(
    ("trajectory_ids", "rollout_id"),
    [
        pytest.param(None, "row-000000:0", id="no names"),
        pytest.param([TrajectoryID("a", 3)], "a:3", id="trajectory"),
    ],
)
def test_an_output_of_skyrls_own_needs_facts(trajectory_ids: Any, rollout_id: str) -> None:
    output = to_skyrl([scored()]) | {"rollout": None, "trajectory_ids": trajectory_ids}
    with pytest.raises(errors.BadFacts, match="does not say temperature"):
        list(from_skyrl(output))
    (back,) = from_skyrl(output, FACTS)
    assert back.rollout_id == rollout_id
    assert (back.temperature, back.top_k, back.reward) == (0.5, 2, 0.5)
    np.testing.assert_array_equal(back.support.counts, [2, 0, 1])
    np.testing.assert_array_equal(back.loss_mask, [1, 0, 1])


@pytest.mark.parametrize(
    ("trajectory", "words"),
    [
        pytest.param("7_0", "Expected `object`, got `str`", id="a string"),
        pytest.param({"instance_id": "7"}, "missing required field `repetition_id`", id="half"),
        pytest.param(
            {"instance_id": "7", "repetition_id": "first"}, "Expected `int`", id="no number"
        ),
    ],
)
def test_a_trajectory_id_in_another_form_is_a_reason(trajectory: Any, words: str) -> None:
    output = to_skyrl([scored()]) | {"trajectory_ids": [trajectory], "rollout": None}
    with pytest.raises(errors.BadValue, match=rf"^row 0: trajectory_ids must have .*{words}"):
        list(from_skyrl(output, FACTS))

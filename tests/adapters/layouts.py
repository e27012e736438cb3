"""What the tests of every trainer's layout share: rollouts with known values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import make_rollout, recorded_rollouts

from rollout import errors
from rollout.record import Rollout, WeightSpan
from rollout.support import Support


def scored(**changes: Any) -> Rollout:
    """The rollout of `make_rollout`, with a reward."""
    return make_rollout(**({"reward": 0.5} | changes))


def longer(**changes: Any) -> Rollout:
    """The next rollout of the same prompt id: a prompt token and a support more."""
    support = Support.from_rows([[5, 9, 4], [], [2], [8, 6]])
    fields: dict[str, Any] = {
        "prompt_ids": np.array([1, 3, 5], np.int32),
        "output_ids": np.array([4, 8, 2, 8], np.int32),
        "loss_mask": np.array([1, 0, 0, 1], np.int8),
        "sampling_logprobs": np.array([-1.5, 0, 0, -0.5], np.float32),
        "support": support,
        "full_logprobs": None,
        "support_logprobs": None,
        "finish_reason": "length",
        "reward": -1.0,
    }
    return make_rollout(sample_index=1, **(fields | changes))


def multi_turn() -> Rollout:
    """Two sampled turns around forced tokens; the first turn is not trained on; two weights."""
    return scored(
        prompt_id="chat",
        output_ids=np.array([9, 2, 30, 31, 32, 6, 2], np.int32),
        loss_mask=np.array([0, 0, 0, 0, 0, 1, 1], np.int8),
        sampling_logprobs=np.array([-0.5, 0, 0, 0, 0, -1.25, 0], np.float32),
        support=Support.from_rows([[9, 5], [2], [], [], [], [7, 8, 6], [2]]),
        full_logprobs=None,
        support_logprobs=None,
        weight_versions=(WeightSpan("v1", 0, 2), WeightSpan("v2", 5, 7)),
        reward=0.1,  # no float32
    )


def empty(**changes: Any) -> Rollout:
    """A rollout that ended before its first output token."""
    return scored(
        output_ids=np.zeros(0, np.int32),
        loss_mask=np.zeros(0, np.int8),
        sampling_logprobs=np.zeros(0, np.float32),
        support=Support.from_rows([]),
        full_logprobs=None,
        support_logprobs=None,
        weight_versions=(),
        **changes,
    )


REFUSED = (
    pytest.param([], errors.ConfigError, "at least one rollout", id="none"),
    pytest.param(
        [scored(), longer(temperature=1.0)], errors.NotExpressible, "temperature", id="temperature"
    ),
    pytest.param(
        [scored(loss_mask=np.array([1, 1, 1], np.int8))],
        errors.MissingSupport,
        "output token 1",
        id="trained and forced",
    ),
    pytest.param(
        [scored(output_ids=np.array([7, 8, 2], np.int32))],
        errors.SampledOutsideSupport,
        "sampled id 7",
        id="outside",
    ),
)
"""Rollouts that no batch layout takes: with the error and its words, for `parametrize`."""


def recorded(name: str) -> list[list[Rollout]]:
    """A recorded set as a batch for each of its temperatures; rewards are what float32 holds."""
    batches: dict[float, list[Rollout]] = {}
    for i, rollout in enumerate(recorded_rollouts(name)):
        batches.setdefault(rollout.temperature, []).append(replace(rollout, reward=i / 4))
    return list(batches.values())


def assert_holds(wanted: Rollout, **got: Any) -> None:
    """Columns of `wanted`, with values and, where they are arrays, dtypes."""
    columns = vars(wanted) | {
        "support_ids": wanted.support.ids,
        "support_offsets": wanted.support.offsets,
    }
    for name, value in got.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(value, columns[name], err_msg=name, strict=True)
        else:
            assert value == columns[name], name

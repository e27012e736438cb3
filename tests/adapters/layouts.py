"""What the tests of every trainer's layout share: rollouts with known values."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
from builders import make_rollout, recorded_lines

from rollout.adapters.sglang_jsonl import parse_line
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


def recorded(name: str) -> list[Rollout]:
    """A recorded set, each rollout with a reward that float32 holds."""
    lines = [json.dumps(line).encode() for line in recorded_lines(name)]
    parsed = [parse_line(line, f"line-{i:06d}") for i, line in enumerate(lines)]
    return [replace(rollout, reward=i / 4) for i, rollout in enumerate(parsed)]


def assert_same_tokens(got: dict[str, Any], wanted: Rollout) -> None:
    """What every layout holds: `got` has fields of `Rollout`, `support_rows` for the support."""
    np.testing.assert_array_equal(got["prompt_ids"], wanted.prompt_ids)
    np.testing.assert_array_equal(got["output_ids"], wanted.output_ids)
    np.testing.assert_array_equal(got["loss_mask"], wanted.loss_mask)
    logprobs = np.asarray(got["sampling_logprobs"])
    np.testing.assert_array_equal(logprobs.astype(np.float32), wanted.sampling_logprobs)
    np.testing.assert_array_equal(logprobs, wanted.sampling_logprobs)
    np.testing.assert_array_equal(got["support_ids"], wanted.support.ids)
    np.testing.assert_array_equal(got["support_offsets"], wanted.support.offsets)

"""TRL: rollouts as the dict that the `rollout_func` of a `GRPOTrainer` returns.

    def rollout_func(prompts, trainer):
        return to_trl(sample(prompts))     # one rollout for each prompt, in their order

As of TRL 1.16.0, `trl/trainer/grpo_trainer.py`. Keys that TRL does not know go to the reward
functions, row by row; supports are among them, for nothing in TRL reads them yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from rollout.adapters.batching import need_output_tokens, rows_of_a_batch
from rollout.adapters.groups import grouped
from rollout.record import Rollout


def to_trl(rollouts: Iterable[Rollout]) -> dict[str, list[Any]]:
    """Lists with one entry per rollout, in the order of `rollouts`; plain numbers and strings.

    `env_mask` is the loss mask. `sampling_mask_counts` [R] cut `sampling_mask_ids` [E] into the
    supports, 0 for a forced token. `reward` is None where there is none, which TRL takes from a
    reward function as "cannot be scored".

    Raises `NotExpressible` for a rollout without output tokens and if temperatures differ,
    `ConfigError` without a rollout, and the `DataError` of the first rule of docs/format.md that is
    broken.
    """
    rows = rows_of_a_batch(rollouts, "TRL")
    need_output_tokens(rows, "TRL")
    return {
        "prompt_ids": [r.prompt_ids.tolist() for r in rows],
        "completion_ids": [r.output_ids.tolist() for r in rows],
        "logprobs": [r.sampling_logprobs.tolist() for r in rows],
        "env_mask": [r.loss_mask.tolist() for r in rows],
        "sampling_mask_ids": [r.support.ids.tolist() for r in rows],
        "sampling_mask_counts": [r.support.counts.tolist() for r in rows],
        "reward": [r.reward for r in rows],
        "finish_reason": [r.finish_reason for r in rows],
        "rollout_id": [r.rollout_id for r in rows],
    }


def write_trl(rollouts: Iterable[Rollout], path: Path) -> tuple[str, ...]:
    """`to_trl` as one JSON object, prompt by prompt."""
    content = to_trl(grouped(rollouts))
    path.write_bytes(msgspec.json.encode(content))
    without = content["reward"].count(None)
    return (f"{without} rollouts have no reward",) if without else ()

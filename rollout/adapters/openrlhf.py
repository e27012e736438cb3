"""OpenRLHF: rollouts as the arguments of its `Experience`, one of a single row for each.

    samples = [Experience(**row["experience"]) for row in to_openrlhf(rollouts)]

As of OpenRLHF 0.11.0, `openrlhf/trainer/ppo_utils/experience.py` and `samples_generator.py`. With T
tokens of prompt and output, everything about actions has length T - 1: entry t is about token
t + 1. OpenRLHF pads on the right when it joins experiences. An `Experience` has no place for
supports (a list in its `info` becomes one number), so they stand beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.adapters import torch_file
from rollout.adapters.batching import all_or_no_rewards, rows_of_a_batch
from rollout.adapters.groups import grouped
from rollout.errors import NotExpressible
from rollout.record import Rollout


def to_openrlhf(rollouts: Iterable[Rollout]) -> list[dict[str, Any]]:
    """One dict per rollout, in their order; rollouts of a prompt must stand together.

    `experience`: `sequences`, `attention_mask` int64 [1, T]; `action_mask` (the loss mask) bool and
    `rollout_log_probs` float32 [1, T - 1], 0 before the output and where a token was forced;
    `response_length` int64, `truncated` bool, `total_length` and, unless no rollout has one,
    `rewards` and ``info["reward"]`` float32 [1]; `prompts`, if all texts are known, and `labels`,
    which are empty strings: OpenRLHF's own word for no label. Beside it `support_ids` int32 [E] and
    `support_offsets` int64 [T]: action t was sampled from ``ids[offsets[t]:offsets[t + 1]]``,
    nothing if it is of the prompt or was forced; and `rollout_id`.

    Raises `NotExpressible` for an aborted rollout, where only some have a reward, and if
    temperatures differ; `ConfigError` without a rollout; and the `DataError` of the first rule of
    docs/format.md that is broken.
    """
    rows = rows_of_a_batch(rollouts, "OpenRLHF")
    rewards = all_or_no_rewards(rows, "OpenRLHF")
    texts_known = all(r.prompt_text is not None for r in rows)
    return [
        {
            "experience": _experience(r, None if rewards is None else rewards[i], texts_known),
            **_beside(r),
        }
        for i, r in enumerate(rows)
    ]


def write_openrlhf(rollouts: Iterable[Rollout], path: Path) -> tuple[str, ...]:
    """`to_openrlhf` under "samples" in a file of `torch.save`, prompt by prompt."""
    samples = to_openrlhf(grouped(rollouts))
    torch_file.write(path, {"samples": samples})
    if "rewards" in samples[0]["experience"]:
        return ()
    return ("no rollout has a reward: OpenRLHF must score them with a reward model",)


def _experience(rollout: Rollout, reward: float | None, texts_known: bool) -> dict[str, Any]:
    import torch

    if rollout.finish_reason == "abort":
        raise NotExpressible(
            f"{rollout.rollout_id}: was aborted; OpenRLHF knows only whether a rollout was "
            "truncated by its length; leave it out (rollout export --without-aborted)"
        )
    tokens = np.concatenate([rollout.prompt_ids, rollout.output_ids]).astype(np.int64)
    trained = np.flatnonzero(rollout.loss_mask)
    scored = torch.tensor([reward], dtype=torch.float32) if reward is not None else None
    return {
        "sequences": torch.from_numpy(tokens)[None],
        "attention_mask": torch.ones(1, len(tokens), dtype=torch.int64),
        "action_mask": _actions(rollout, rollout.loss_mask.astype(bool)),
        "rollout_log_probs": _actions(rollout, rollout.sampling_logprobs),
        "response_length": torch.tensor([trained[-1] - trained[0] + 1 if len(trained) else 0]),
        "truncated": torch.tensor([rollout.finish_reason == "length"]),
        "total_length": torch.tensor([len(tokens)], dtype=torch.float32),
        "labels": [""],
        **({"prompts": [rollout.prompt_text]} if texts_known else {}),
        **({} if scored is None else {"rewards": scored, "info": {"reward": scored.clone()}}),
    }


def _actions(rollout: Rollout, values: NDArray[Any]) -> Any:
    """[1, T - 1] `values` of the output tokens, behind zeros for the prompt."""
    import torch

    before = np.zeros(len(rollout.prompt_ids) - 1, values.dtype)
    return torch.from_numpy(np.concatenate([before, values]))[None]


def _beside(rollout: Rollout) -> dict[str, Any]:
    import torch

    before = np.zeros(len(rollout.prompt_ids) - 1, np.int64)
    return {
        "support_ids": torch.from_numpy(np.array(rollout.support.ids)),
        "support_offsets": torch.from_numpy(np.concatenate([before, rollout.support.offsets])),
        "rollout_id": rollout.rollout_id,
    }

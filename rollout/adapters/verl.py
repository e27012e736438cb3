"""verl: rollouts as the parts of a `DataProto`, as its agent loop makes them.

    data = DataProto.from_dict(**to_verl(rollouts, pad_id=tokenizer.pad_token_id))

As of verl 0.9.1, `verl/experimental/agent_loop/agent_loop.py` and `verl/protocol.py`. No key of
verl's holds supports; they stand in two arrays of `non_tensor_batch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.adapters import torch_file
from rollout.adapters.batching import (
    all_or_no_rewards,
    need_output_tokens,
    padded,
    rows_of_a_batch,
)
from rollout.adapters.groups import grouped
from rollout.errors import NotExpressible
from rollout.record import Rollout

IDS = "rollout_sampling_mask_ids"
OFFSETS = "rollout_sampling_mask_offsets"


def to_verl(
    rollouts: Iterable[Rollout],
    *,
    pad_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
) -> dict[str, Any]:
    """The arguments of `DataProto.from_dict`, one row per rollout, in the order of `rollouts`.

    `tensors`: `prompts` [B, P] padded on the left, `responses` and `response_mask` (the loss mask)
    [B, R] padded on the right, `input_ids`, `attention_mask`, `position_ids` [B, P + R], all int64;
    `rollout_log_probs` [B, R] float32; and `rm_scores` [B, R] float32, the reward on the last
    token, unless no rollout has one. P and R are the longest here, or as given: verl joins only
    batches of the same lengths. `non_tensors`: object arrays [B]; token t of row i was sampled from
    ``ids[i][offsets[i][t]:offsets[i][t + 1]]``, nothing where it was forced, with the int32 ids and
    int64 offsets under `IDS` and `OFFSETS`; `uid` is the prompt id. `meta_info`: the temperature.

    Raises `NotExpressible` for a rollout without output tokens or longer than was given, where only
    some have a reward, and if temperatures differ; `ConfigError` without a rollout; and the
    `DataError` of the first rule of docs/format.md that is broken.
    """
    rows = rows_of_a_batch(rollouts, "verl")
    need_output_tokens(rows, "verl")
    rewards = all_or_no_rewards(rows, "verl")
    prompt_width = _width(rows, [len(r.prompt_ids) for r in rows], "prompt_length", prompt_length)
    lengths = [r.num_output_tokens for r in rows]
    width = _width(rows, lengths, "response_length", response_length)

    def right(arrays: Sequence[NDArray[Any]], fill: int, dtype: type) -> NDArray[Any]:
        return padded(arrays, fill, dtype, width=width)

    prompts = padded([r.prompt_ids for r in rows], pad_id, np.int64, width=prompt_width, left=True)
    responses = right([r.output_ids for r in rows], pad_id, np.int64)
    is_token = np.concatenate(
        [
            np.arange(-prompt_width, 0) >= np.array([[-len(r.prompt_ids)] for r in rows]),
            np.arange(width) < np.array(lengths)[:, None],
        ],
        axis=1,
    )
    arrays = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": right([r.loss_mask for r in rows], 0, np.int64),
        "input_ids": np.concatenate([prompts, responses], axis=1),
        "attention_mask": is_token.astype(np.int64),
        "position_ids": np.maximum(np.cumsum(is_token, axis=1) - 1, 0),
        "rollout_log_probs": right([r.sampling_logprobs for r in rows], 0, np.float32),
    }
    if rewards is not None:
        arrays["rm_scores"] = np.zeros((len(rows), width), np.float32)
        arrays["rm_scores"][np.arange(len(rows)), np.array(lengths) - 1] = rewards
    return {"tensors": _tensors(arrays), **_beside(rows)}


def write_verl(rollouts: Iterable[Rollout], path: Path, pad_id: int) -> tuple[str, ...]:
    """`to_verl` as a file of `torch.save`, prompt by prompt; arrays are lists of tensors in it."""
    import torch

    content = to_verl(grouped(rollouts), pad_id=pad_id)
    plain = {
        name: [torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in column]
        for name, column in content["non_tensors"].items()
    }
    torch_file.write(path, content | {"non_tensors": plain})
    if "rm_scores" in content["tensors"]:
        return ()
    return ("no rollout has a reward, so there are no rm_scores: verl must score them",)


def load_verl(path: Path) -> dict[str, Any]:
    """The arguments of `DataProto.from_dict` in a file of `write_verl`. No code of it runs.

    Raises `ConfigError` if it cannot be opened, `FormatError` if it is no such file.
    """
    content = torch_file.load(path, needs=("tensors", "non_tensors", "meta_info"))
    columns = {
        name: _objects([x.numpy() if hasattr(x, "numpy") else x for x in column])
        for name, column in content["non_tensors"].items()
    }
    return content | {"non_tensors": columns}


def _width(rows: Sequence[Rollout], lengths: Sequence[int], name: str, given: int | None) -> int:
    longest = int(np.argmax(lengths))
    if given is not None and lengths[longest] > given:
        raise NotExpressible(
            f"{rows[longest].rollout_id}: has {lengths[longest]} tokens, but {name} is {given}; "
            "nothing is cut, so give a larger one or leave it out"
        )
    return lengths[longest] if given is None else given


def _tensors(arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _beside(rows: Sequence[Rollout]) -> dict[str, Any]:
    """What is no tensor."""
    return {
        "non_tensors": {
            "uid": _objects([r.prompt_id for r in rows]),
            "rollout_id": _objects([r.rollout_id for r in rows]),
            "finish_reason": _objects([r.finish_reason for r in rows]),
            IDS: _objects([np.array(r.support.ids) for r in rows]),
            OFFSETS: _objects([np.array(r.support.offsets) for r in rows]),
        },
        "meta_info": {"temperature": rows[0].temperature},
    }


def _objects(values: Sequence[Any]) -> NDArray[np.object_]:
    """[B] One object each: numpy would make a table of arrays that happen to be as long."""
    column = np.empty(len(values), object)
    column[:] = values
    return column

"""SkyRL: rollouts as the `GeneratorOutput` that a generator returns to the trainer.

    generator_output = to_skyrl(rollouts)              # one row for each, in their order

As of SkyRL 0.4.0: `skyrl/train/generators/base.py` and
`skyrl/backends/skyrl_train/utils/sample_support.py`. A row of `rollout_sample_support` is int32 ids
with -1 behind them; a row of -1 alone is a token without a support, which SkyRL must not train on.
That is a forced token here. Supports with their logprobs are not part of that release.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollout.adapters import torch_file
from rollout.adapters.arrays import flags, float32, int32, plain
from rollout.adapters.batching import need_output_tokens, rewards_of, rows_of_a_batch
from rollout.adapters.carried import KEY, Int32, carry, read_carried, restore
from rollout.adapters.facts import SAMPLER, Facts, complete
from rollout.adapters.groups import checked, grouped
from rollout.adapters.importing import Reader
from rollout.adapters.sglang_jsonl import recorded_params
from rollout.engines.base import Completion
from rollout.errors import BadValue, FormatError, LengthMismatch, NotExpressible, NullValue
from rollout.record import Rollout
from rollout.sampling import canonical_json
from rollout.support import Support

SUPPORT = "rollout_sample_support"
NO_ID = -1
TRAJECTORY = "trajectory_ids"
NEEDED = (
    "prompt_token_ids",
    "response_ids",
    "rewards",
    "loss_masks",
    "stop_reasons",
    "rollout_logprobs",
    SUPPORT,
)


class _Trajectory(msgspec.Struct):
    """SkyRL's `TrajectoryID`, or the same as a dict."""

    instance_id: str | int
    repetition_id: Int32


def to_skyrl(rollouts: Iterable[Rollout], *, width: int | None = None) -> dict[str, Any]:
    """A `GeneratorOutput`: lists with one entry per rollout, in the order of `rollouts`.

    `rollout_sample_support` holds int32 [R, width] arrays. All outputs that SkyRL joins must have
    one `width`: by default that of the largest support here. `uids` are the prompt ids. What has no
    field stands under "rollout", from where `from_skyrl` takes it.

    Raises `NotExpressible` for a rollout without reward or output tokens, for a support larger than
    `width`, and if temperatures differ; `ConfigError` without a rollout; and the `DataError` of a
    broken rule.
    """
    rows = rows_of_a_batch(rollouts, "SkyRL")
    need_output_tokens(rows, "SkyRL")
    largest = max(int(r.support.counts.max()) for r in rows)
    width = max(largest, 1) if width is None else width
    return {
        "prompt_token_ids": [r.prompt_ids.tolist() for r in rows],
        "response_ids": [r.output_ids.tolist() for r in rows],
        "rewards": rewards_of(rows, "SkyRL"),
        "loss_masks": [r.loss_mask.tolist() for r in rows],
        "stop_reasons": [r.finish_reason for r in rows],
        "rollout_metrics": None,
        "rollout_logprobs": [r.sampling_logprobs.tolist() for r in rows],
        "trajectory_ids": None,
        "trajectory_generation_times": None,
        "trajectory_time_splits": None,
        "rollout_expert_indices": None,
        SUPPORT: [_table(r, width) for r in rows],
        "is_last_step": None,
        "env_metrics": None,
        "pixel_values": None,
        "image_grid_thw": None,
        "uids": [r.prompt_id for r in rows],
        KEY: [carry(r) for r in rows],
    }


def from_skyrl(output: Mapping[str, Any], facts: Facts | None = None) -> Iterator[Rollout]:
    """The rollouts of a `GeneratorOutput`, each checked against every rule of docs/format.md.

    For one that SkyRL made itself `facts` say how it was sampled, and `trajectory_ids`, where it
    has them, name the rollouts. Raises `BadFacts`, `NullValue` for a field that is not there,
    `BadValue` for one in another form, and the `DataError` of the first rule that a row breaks.
    """
    known = facts or Facts()
    return checked(_rollout(row, index, known) for index, row in _rows(output))


def write_skyrl(rollouts: Iterable[Rollout], path: Path) -> tuple[str, ...]:
    """`to_skyrl` as a file of `torch.save`, prompt by prompt; supports are int32 tensors in it."""
    import torch

    output = to_skyrl(grouped(rollouts))
    torch_file.write(path, output | {SUPPORT: [torch.from_numpy(t) for t in output[SUPPORT]]})
    width = output[SUPPORT][0].shape[1]
    return (f"supports are padded to {width} ids, the size of the largest",)


def load_skyrl(path: Path) -> dict[str, Any]:
    """The `GeneratorOutput` in a file of `write_skyrl`. No code of the file runs.

    Raises `ConfigError` if it cannot be opened, `FormatError` if it is no such file.
    """
    import torch

    output = torch_file.load(path, needs=NEEDED)
    tables = output[SUPPORT]
    if not isinstance(tables, list) or not all(isinstance(t, torch.Tensor) for t in tables):
        raise FormatError(f"{path}: {SUPPORT} must be a list of tensors")
    return output | {SUPPORT: [table.numpy() for table in tables]}


def _table(rollout: Rollout, width: int) -> NDArray[np.int32]:
    """[R, width] The supports as rows, NO_ID behind each."""
    support = rollout.support
    if len(large := np.flatnonzero(support.counts > width)):
        raise NotExpressible(
            f"{rollout.rollout_id}: output token {large[0]} has a support of "
            f"{support.counts[large[0]]} ids, but width is {width}; give a larger width"
        )
    table = np.full((len(support), width), NO_ID, np.int32)
    table[np.arange(width) < support.counts[:, None]] = support.ids
    return table


def _rows(output: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """What the output says of each rollout."""
    columns = {name: _column(output, name) for name in NEEDED}
    columns |= {name: output[name] for name in (KEY, TRAJECTORY) if output.get(name) is not None}
    length = len(columns["response_ids"])
    for name, column in columns.items():
        if len(column) != length:
            raise LengthMismatch(f"{name}: has {len(column)} entries, response_ids have {length}")
    for index in range(length):
        yield index, {name: column[index] for name, column in columns.items()}


def _column(output: Mapping[str, Any], name: str) -> list[Any]:
    column = output.get(name)
    if column is None:
        raise NullValue(f"{name}: must be a list with an entry for each row, got none")
    if not isinstance(column, list):
        raise BadValue(f"{name}: must be a list, got {type(column).__name__}")
    return column


def _rollout(row: Mapping[str, Any], index: int, facts: Facts) -> Rollout:
    where = f"row {index}"
    said: dict[str, Any] = {
        "prompt_ids": int32(row["prompt_token_ids"], f"{where}: prompt_token_ids"),
        "output_ids": int32(row["response_ids"], f"{where}: response_ids"),
        "sampling_logprobs": float32(row["rollout_logprobs"], f"{where}: rollout_logprobs"),
        "support": _support(row[SUPPORT], where),
        "finish_reason": row["stop_reasons"],
    }
    scored: dict[str, Any] = {
        "loss_mask": flags(row["loss_masks"], f"{where}: loss_masks"),
        "reward": _reward(row, where),
    }
    carried = read_carried(row, where)
    if carried is not None:
        complete({name: getattr(carried, name) for name in SAMPLER}, facts, where)
        return restore(carried, **said, **scored)
    settings = complete({}, facts, where)
    prompt_id, sample_index = f"row-{index:06d}", 0
    if TRAJECTORY in row:
        prompt_id, sample_index = _identity(row[TRAJECTORY], where)
    prompt_ids = said.pop("prompt_ids")
    completion = Completion(
        **said, full_logprobs=None, support_logprobs=None, engine_meta={"source": "import"}
    )
    rollout = completion.to_rollout(
        prompt_id=prompt_id,
        sample_index=sample_index,
        prompt_ids=prompt_ids,
        params=recorded_params(settings),
        sampling_params=canonical_json(settings),
    )
    return replace(rollout, **scored)


def _identity(trajectory: Any, where: str) -> tuple[str, int]:
    try:
        read = msgspec.convert(trajectory, _Trajectory, from_attributes=True)
    except msgspec.ValidationError as error:
        raise BadValue(
            f"{where}: {TRAJECTORY} must have instance_id and repetition_id: {error}"
        ) from error
    return str(read.instance_id), read.repetition_id


def _reward(row: Mapping[str, Any], where: str) -> float:
    reward = row["rewards"]
    if not isinstance(reward, (int, float)):
        raise BadValue(
            f"{where}: rewards must hold one number for the rollout, got {type(reward).__name__}; "
            "rewards per token have no place in a rollout"
        )
    return float(reward)


def _support(table: Any, where: str) -> Support:
    if not isinstance(table, np.ndarray) or table.ndim != 2 or table.dtype != np.int32:
        raise BadValue(f"{where}: {SUPPORT} must be an int32 array [R, width]")
    is_id = table != NO_ID
    if (is_id[:, 1:] > is_id[:, :-1]).any():
        raise BadValue(f"{where}: {SUPPORT} has an id behind {NO_ID}, which may only be at the end")
    return Support.from_counts(table[is_id], is_id.sum(axis=1))


READER = Reader(
    items=lambda path: list(_rows(load_skyrl(path))),
    parse=_rollout,
    body=lambda row: json.dumps(plain(row)).encode(),
    numbers="row",
)

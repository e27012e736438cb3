"""Launches of the statistics kernels; the functions of `replay.statistics`."""

from __future__ import annotations

import torch
from torch import Tensor

from replay.kernels import statistics
from replay.kernels.launch import OPTIONS, ROUND, cdiv, power_of_2
from replay.statistics import Outside, RowGrads, Running, Tile

BLOCK_V = 4096
LANES = 1024  # columns that one program has open at a time


def update(running: Running, tile: Tile) -> None:
    num_tokens, num_columns = tile.z.shape
    if not num_tokens:
        return
    statistics.update_kernel[(num_tokens,)](
        tile.z, tile.bias, tile.targets, tile.shape.temperature, *running,
        num_columns, tile.start, tile.z.stride(0), *_shape(tile), **_flags(tile),
        BLOCK_V=min(LANES, power_of_2(num_columns)), num_warps=4, **OPTIONS,
    )  # fmt: skip


def take_out(z: Tensor, start: int, ids: Tensor, offsets: Tensor, members: Tensor) -> None:
    num_tokens, num_columns = z.shape
    if num_tokens:
        statistics.take_out_kernel[(num_tokens,)](
            z, ids, offsets, members, num_columns, start, z.stride(0),
            BLOCK_E=128, num_warps=1, **OPTIONS,
        )  # fmt: skip


def outside(running: Outside, tile: Tile) -> None:
    num_tokens, num_columns = tile.z.shape
    if not num_tokens:
        return
    statistics.outside_kernel[(num_tokens,)](
        tile.z, tile.bias, tile.shape.temperature, *running,
        num_columns, tile.start, tile.z.stride(0), *_shape(tile), **_flags(tile),
        BLOCK_V=min(BLOCK_V, power_of_2(num_columns)), num_warps=8, **OPTIONS,
    )  # fmt: skip


def gradient(tile: Tile, grads: RowGrads, dtype: torch.dtype) -> Tensor:
    num_tokens, num_columns = tile.z.shape
    out = torch.empty_like(tile.z, dtype=dtype)
    if not num_tokens:
        return out
    block = min(BLOCK_V, power_of_2(num_columns))
    by_score = (grads.by_logprob, grads.by_entropy, grads.by_logsumexp)
    statistics.gradient_kernel[(num_tokens, cdiv(num_columns, block))](
        tile.z, tile.bias, tile.targets, tile.shape.temperature, grads.entropy, grads.logsumexp,
        *(None if grad is None else grad.contiguous() for grad in by_score), out,
        num_columns, tile.start, tile.z.stride(0), out.stride(0), *_shape(tile), **_flags(tile),
        HAS_LOGPROB=by_score[0] is not None, HAS_ENTROPY=by_score[1] is not None,
        HAS_LOGSUMEXP=by_score[2] is not None, BLOCK_V=block, num_warps=8, **OPTIONS,
    )  # fmt: skip
    return out


def _shape(tile: Tile) -> tuple[float, float]:
    scale, softcap = tile.shape.logit_scale, tile.shape.softcap
    return (1.0 if scale is None else scale, 1.0 if softcap is None else softcap)


def _flags(tile: Tile) -> dict[str, object]:
    rounded = tile.z.dtype == tile.shape.head_dtype
    return {
        "HAS_BIAS": tile.bias is not None,
        "PER_TOKEN": isinstance(tile.shape.temperature, Tensor),
        "ROUND": None if rounded else ROUND[tile.shape.head_dtype],
        "CAPPED": tile.shape.softcap is not None,
    }

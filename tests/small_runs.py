"""Small runs on disk, and what batches of them hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from builders import make_rollout

from replay import PackedBatch, PaddedBatch
from rollout import RunWriter
from rollout.config import ShardsConfig
from rollout.record import Rollout
from rollout.support import Support

Batch = PackedBatch | PaddedBatch


def rollout_of(name: str, prompt: int, row_sizes: Sequence[int], **changes: Any) -> Rollout:
    """`prompt` tokens, then one output token per size of its support; 0 is a forced one."""
    rows = [list(range(t, t + size)) for t, size in enumerate(row_sizes)]
    support = Support.from_rows(rows)
    return make_rollout(
        name,
        prompt_ids=np.arange(100, 100 + prompt, dtype=np.int32),
        output_ids=np.array([t + max(size, 1) - 1 for t, size in enumerate(row_sizes)], np.int32),
        loss_mask=(support.counts > 0).astype(np.int8),
        sampling_logprobs=-np.log(np.maximum(support.counts, 1)).astype(np.float32),
        support=support,
        full_logprobs=None,
        support_logprobs=None,
        weight_versions=(),
        **changes,
    )


def write(path: Path, rollouts: Sequence[Rollout], **shards: Any) -> Path:
    config = ShardsConfig(**{"batch_rows": 3, "shard_bytes": 1} | shards)
    with RunWriter(path, {}, shards=config) as writer:
        for rollout in rollouts:
            writer.write(rollout)
    return path


ELEVEN = [rollout_of(str(i), 1 + i % 4, [2, 0, 1, 3][: 1 + i % 4]) for i in range(11)]


def contents(batch: Batch) -> dict[str, Any]:
    return {k: v.tolist() if torch.is_tensor(v) else v for k, v in vars(batch).items()}


def ids(made: Any) -> list[tuple[str, ...]]:
    return [batch.rollout_ids for batch in made]

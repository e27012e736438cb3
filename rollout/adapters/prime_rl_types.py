"""The structs of prime-rl's transport, as far as rollouts need them, and unpacking.

msgpack arrays, one element per field in this order (`prime_rl/transports/rollouts/types.py`):
prime-rl only appends fields, and older files end earlier. What a rollout cannot hold is passed over
unread; `Any` is such a field.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollout.errors import BadOffsets, BadValue, LengthMismatch


class SamplingMask(msgspec.Struct, array_like=True, omit_defaults=True):
    """Supports of T tokens: int32 ids [E], an int32 count for each token, float32 logprobs [E]."""

    ids: bytes
    counts: bytes
    logprobs: bytes | None = None


class TrainingSample(msgspec.Struct, array_like=True, omit_defaults=True):
    """One sequence of T tokens, every list [T]."""

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    env_name: str
    ref_logprobs: list[float] | None = None
    mm_refs: Any = None  # images; `mm_kwargs` in earlier releases
    routed_experts: Any = None
    mm_token_type_ids: Any = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None
    advantages: list[float] | None = None
    sampling_mask: SamplingMask | None = None
    trace_id: str | None = None
    branch_index: int | None = None


class Filler(msgspec.Struct):
    """A sequence that nothing is trained on: a copy that evens out the batches of all ranks."""

    sample: TrainingSample


class MicroBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """Sequences packed one after another, every list [T]; `sequence_lengths` cuts them."""

    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    inference_logprobs: list[float]
    position_ids: list[int]
    sequence_lengths: list[int]
    temperatures: list[float]
    env_names: list[str]
    seq_lens: list[int]
    ref_logprobs: list[float] | None = None
    routed_experts: Any = None
    mm_refs: Any = None
    mm_token_type_ids: Any = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None
    sampling_mask: SamplingMask | None = None
    trace_ids: list[str] | None = None
    branch_indices: list[int] | None = None


def unpack(batch: MicroBatch, where: str) -> Iterator[TrainingSample | Filler]:
    """The sequences of `batch`, without the padding behind the last one.

    Padding lengthens the last sequence, and its positions start at 0 again. Raises `FormatError`s
    where lengths do not add up.
    """
    total = len(batch.input_ids)
    positions = np.array(batch.position_ids)
    counts = _counts(batch, where)
    ends = list(accumulate(batch.sequence_lengths, initial=0))
    per_token = ("loss_mask", "inference_logprobs", "position_ids", "temperatures", "env_names")
    sizes = {name: len(getattr(batch, name)) for name in per_token} | {"sequence_lengths": ends[-1]}
    if counts is not None:
        sizes["sampling_mask.counts"] = len(counts)
    for name, size in sizes.items():
        if size != total:
            raise LengthMismatch(f"{where}: {name} are of {size} tokens, input_ids of {total}")
    for name, values in (("trace_ids", batch.trace_ids), ("branch_indices", batch.branch_indices)):
        if values and len(values) != len(batch.sequence_lengths):
            raise LengthMismatch(
                f"{where}: {len(values)} {name} for {len(batch.sequence_lengths)} sequences"
            )
    if min(batch.sequence_lengths, default=0) < 0:
        raise BadValue(f"{where}: sequence_lengths must not be negative")
    offsets = None if counts is None else 4 * np.concatenate([[0], np.cumsum(counts)])
    for index, (start, end) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
        restarts = np.flatnonzero(positions[start + 1 : end] == 0)
        tokens = slice(start, start + 1 + restarts[0] if len(restarts) else end)
        sample = TrainingSample(
            token_ids=batch.input_ids[tokens],
            mask=batch.loss_mask[tokens],
            logprobs=batch.inference_logprobs[tokens],
            temperatures=batch.temperatures[tokens],
            env_name=batch.env_names[start] if start < end else "",
            mm_refs=batch.mm_refs,
            advantages=batch.advantages[tokens],
            sampling_mask=_cut(batch.sampling_mask, offsets, tokens),
            trace_id=batch.trace_ids[index] if batch.trace_ids else None,
            branch_index=batch.branch_indices[index] if batch.branch_indices else None,
        )
        yield sample if any(sample.mask) else Filler(sample)


def _counts(batch: MicroBatch, where: str) -> NDArray[np.int64] | None:
    mask = batch.sampling_mask
    if mask is None:
        return None
    if len(mask.counts) % 4:
        raise BadOffsets(f"{where}: {len(mask.counts)} bytes of counts, must be four for each")
    counts = np.frombuffer(mask.counts, "<i4").astype(np.int64)
    if (counts < 0).any() or 4 * counts.sum() != len(mask.ids):
        raise BadOffsets(
            f"{where}: counts add up to {counts.sum()}, but there are {len(mask.ids) / 4:g} ids"
        )
    return counts


def _cut(
    mask: SamplingMask | None, offsets: NDArray[np.int64] | None, tokens: slice
) -> SamplingMask | None:
    if mask is None or offsets is None:
        return None
    ids = slice(int(offsets[tokens.start]), int(offsets[tokens.stop]))
    return SamplingMask(
        ids=mask.ids[ids],
        counts=mask.counts[4 * tokens.start : 4 * tokens.stop],
        logprobs=None if mask.logprobs is None else mask.logprobs[ids],
    )

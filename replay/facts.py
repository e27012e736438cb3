"""What the trainer's logits say about recorded supports: the members, and all that is outside.

The [T, V] logits exist a tile at a time. In each tile the members of the supports are read and
taken out, so that one pass over the rest gives the largest logit outside and the sum outside,
exactly and without a difference of two nearly equal masses.

Axes: `T` audited tokens, `E` support entries, `V` vocabulary, `D` hidden. A logit here is z/T,
after scale, softcap and temperature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replay import statistics
from replay.dense import product
from replay.reference import per_row, shape_logits
from replay.score import triton_fits
from replay.statistics import Outside, Shape, Tile

TILE_ELEMENTS = 2**25  # logits of a tile; 134 MB in fp32
TOKEN_CHUNK = 4096


class Head(NamedTuple):
    """What makes logits of hidden states."""

    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]
    logit_scale: float | None = None
    softcap: float | None = None
    head_dtype: torch.dtype = torch.float32


@dataclass(frozen=True, eq=False)
class Supports:
    """T supports as compressed sparse rows, ids unique in each, with the T that divides logits."""

    ids: Tensor  # [E] int64
    offsets: Tensor  # [T + 1] int64
    temperature: Tensor  # [T] float32
    at_most: int | None = None  # ids in each, where known without asking the device

    @property
    def width(self) -> int:
        """A bound of the ids in each."""
        return int(self.counts.max()) if self.at_most is None else self.at_most

    def to(self, device: torch.device) -> Supports:
        """The same on `device`, with the width worked out before."""
        ids, offsets = self.ids.to(device), self.offsets.to(device)
        return Supports(ids, offsets, self.temperature.to(device), self.width)

    def __len__(self) -> int:
        return len(self.temperature)

    @property
    def counts(self) -> Tensor:
        """[T]"""
        return self.offsets.diff()

    @property
    def rows(self) -> Tensor:
        """[E] The token of each entry."""
        return torch.repeat_interleave(self.counts, output_size=len(self.ids))

    def take(self, index: Tensor) -> Supports:
        """The tokens of `index`, in that order."""
        counts = self.counts[index]
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        entries = torch.arange(int(offsets[-1]), device=counts.device)
        start = torch.repeat_interleave(self.offsets[index] - offsets[:-1], counts)
        return Supports(self.ids[entries + start], offsets, self.temperature[index], self.at_most)

    def without(self, drawn: Tensor) -> Supports:
        """The same without one id of each token, `drawn` [T]."""
        rows = self.rows
        keep = self.ids != drawn[rows]
        counts = torch.zeros_like(self.counts).index_add_(0, rows, keep.long())
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return Supports(self.ids[keep], offsets, self.temperature, self.at_most)


class Facts(NamedTuple):
    """What decides whether a support could have come from these logits."""

    members: Tensor  # [E] logits of the supports, in their order
    top_outside: Tensor  # [T] the largest logit outside; -inf where nothing is
    argmax_outside: Tensor  # [T] its id
    logsumexp_outside: Tensor  # [T]; -inf where nothing is outside


@torch.no_grad()
def gather_facts(hidden: Tensor, head: Head, supports: Supports) -> Facts:
    """One pass over the logits of `hidden` [T, D]; memory O(T + E) and one tile."""
    weight, num_tokens = head.weight, len(hidden)
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    members = torch.empty(len(supports.ids), dtype=dtype, device=hidden.device)
    outside = Outside.start(num_tokens, dtype, hidden.device)
    backend = _backend(hidden, head)
    width = max(1, TILE_ELEMENTS // max(1, min(num_tokens, TOKEN_CHUNK)))
    with torch.autocast(hidden.device.type, enabled=False), torch.cuda.device_of(hidden):
        for start in range(0, num_tokens, TOKEN_CHUNK):
            tokens = slice(start, start + TOKEN_CHUNK)
            offsets = supports.offsets[start : start + TOKEN_CHUNK + 1]
            shape = Shape(
                supports.temperature[tokens], head.logit_scale, head.softcap, head.head_dtype
            )
            for first in range(0, len(weight), width):
                columns = slice(first, first + width)
                z = product(hidden[tokens], weight[columns].T, dtype)
                backend.take_out(z, first, supports.ids, offsets, members)
                bias = None if head.bias is None else head.bias[columns]
                tile = Tile(z, first, bias, supports.offsets[:0], shape)  # no targets
                backend.outside(outside.rows(tokens), tile)
        members = _shaped(members, head, supports)
    return Facts(
        members,
        # nothing outside: the log of 0; a logit that is no number: no number
        torch.where(outside.mass > 0, outside.top, outside.mass.log()),
        outside.argmax,
        outside.top + outside.mass.log(),
    )


@torch.no_grad()
def dense_logits(hidden: Tensor, head: Head, temperature: Tensor) -> Tensor:
    """[T, V] logits, for a few rows."""
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, head.weight.dtype), torch.float32)
    z = torch.empty(len(hidden), len(head.weight), dtype=dtype, device=hidden.device)
    width = max(1, TILE_ELEMENTS // max(1, hidden.shape[1]))  # of the head's rows in `dtype`
    with torch.autocast(hidden.device.type, enabled=False), torch.cuda.device_of(hidden):
        for first in range(0, len(head.weight), width):
            columns = slice(first, first + width)
            z[:, columns] = product(hidden, head.weight[columns].T, dtype)
        if head.bias is not None:
            z += head.bias.to(dtype)
        z = shape_logits(z, head.logit_scale, head.softcap, head.head_dtype)
    return z / temperature[:, None]


def _shaped(members: Tensor, head: Head, supports: Supports) -> Tensor:
    if head.bias is not None:
        members = members + head.bias[supports.ids].to(members.dtype)
    z = shape_logits(members, head.logit_scale, head.softcap, head.head_dtype)
    return z / per_row(supports.temperature, supports.rows)


def _backend(hidden: Tensor, head: Head) -> Any:
    if not triton_fits(hidden, head.weight, head.head_dtype):
        return statistics
    from replay.kernels import launch_statistics  # triton takes a second to import

    return launch_statistics

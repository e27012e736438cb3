"""One pass over a tile of logits: statistics of its rows, or the gradient of them. Plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from replay.reference import shape_logits


class Shape(NamedTuple):
    """What happens to a logit after the matmul, in this order reversed."""

    temperature: float | Tensor
    logit_scale: float | None
    softcap: float | None
    head_dtype: torch.dtype

    def rows(self, rows: slice) -> Shape:
        if isinstance(self.temperature, Tensor):
            return self._replace(temperature=self.temperature[rows])
        return self


class Tile(NamedTuple):
    z: Tensor  # [t, v] raw logits
    start: int  # id of the first column
    bias: Tensor | None  # [v]
    targets: Tensor  # [t]
    shape: Shape


class Running(NamedTuple):
    """Statistics [T] of the columns so far."""

    top: Tensor
    mass: Tensor  # sum of exp(z - top)
    weighted: Tensor  # sum of exp(z - top) * (z - top)
    target: Tensor
    argmax: Tensor

    @classmethod
    def start(cls, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Running:
        zeros = torch.zeros(num_tokens, dtype=dtype, device=device)
        lowest = torch.full_like(zeros, torch.finfo(torch.float32).min)  # -inf would make 0 * inf
        argmax = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        return cls(lowest, zeros, zeros.clone(), torch.full_like(zeros, -torch.inf), argmax)

    def rows(self, rows: slice) -> Running:
        return Running(*(tensor[rows] for tensor in self))


class Outside(NamedTuple):
    """Statistics [T] of the columns so far, without those that are -inf."""

    top: Tensor
    mass: Tensor  # sum of exp(z - top)
    argmax: Tensor

    @classmethod
    def start(cls, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Outside:
        running = Running.start(num_tokens, dtype, device)
        return cls(running.top, running.mass, running.argmax)

    def rows(self, rows: slice) -> Outside:
        return Outside(*(tensor[rows] for tensor in self))


class RowGrads(NamedTuple):
    """d loss / d (score) [T] where there is one, and the scores that its way back needs."""

    by_logprob: Tensor | None
    by_entropy: Tensor | None
    by_logsumexp: Tensor | None
    entropy: Tensor
    logsumexp: Tensor

    def rows(self, rows: slice) -> RowGrads:
        def part(grad: Tensor | None) -> Tensor | None:
            return None if grad is None else grad[rows]

        return RowGrads(
            part(self.by_logprob),
            part(self.by_entropy),
            part(self.by_logsumexp),
            self.entropy[rows],
            self.logsumexp[rows],
        )


def update(running: Running, tile: Tile) -> None:
    """Fold the tile's columns into the statistics of its rows, in place."""
    z = _logits(tile) / _divisor(tile.shape)
    largest, index = z.max(dim=1)
    running.argmax.copy_(torch.where(largest > running.top, index + tile.start, running.argmax))
    top = torch.maximum(running.top, largest)
    moved = running.top - top
    shifted = z - top[:, None]
    p = shifted.exp()
    shrink = moved.exp()
    running.weighted.add_(moved * running.mass).mul_(shrink).add_((p * shifted).sum(1))
    running.mass.mul_(shrink).add_(p.sum(1))
    running.top.copy_(top)
    inside, column = _column(tile)
    found = z.gather(1, column[:, None]).squeeze(1)
    running.target.copy_(torch.where(inside, found, running.target))


def take_out(z: Tensor, start: int, ids: Tensor, offsets: Tensor, members: Tensor) -> None:
    """Move logits of supports out of the tile z [t, v], which begins at id `start`.

    Entry e of `ids` [E] is in the row r with offsets[r] <= e < offsets[r + 1]; its logit goes to
    members[e], and -inf takes its place. Entries of other rows or tiles are left alone.
    """
    entries = torch.arange(int(offsets[0]), int(offsets[-1]), device=z.device)
    column = ids[entries] - start
    inside = (column >= 0) & (column < z.shape[1])
    row = torch.repeat_interleave(offsets.diff())[inside]
    entries, column = entries[inside], column[inside]
    members[entries] = z[row, column]
    z[row, column] = -torch.inf


def outside(running: Outside, tile: Tile) -> None:
    """Fold in the columns that are not -inf, in place; softcap does not bring those back."""
    z = _logits(tile) / _divisor(tile.shape)
    z.masked_fill_(tile.z == -torch.inf, -torch.inf)
    largest, index = z.max(dim=1)
    running.argmax.copy_(torch.where(largest > running.top, index + tile.start, running.argmax))
    top = torch.maximum(running.top, largest)
    shrink = (running.top - top).exp()
    running.mass.mul_(shrink).add_((z - top[:, None]).exp_().sum(1))
    running.top.copy_(top)


def gradient(tile: Tile, grads: RowGrads, dtype: torch.dtype) -> Tensor:
    """[t, v] d loss / d (raw logit)."""
    capped, divisor = _logits(tile), _divisor(tile.shape)
    log_p = capped / divisor - grads.logsumexp[:, None]
    p = log_p.exp()
    d = torch.zeros_like(p)
    if grads.by_logprob is not None:
        inside, column = _column(tile)
        own = torch.where(inside, grads.by_logprob, 0)
        d -= p * grads.by_logprob[:, None]
        d.scatter_add_(1, column[:, None], own[:, None])
    if grads.by_entropy is not None:
        d -= p * (log_p + grads.entropy[:, None]) * grads.by_entropy[:, None]
    if grads.by_logsumexp is not None:
        d += p * grads.by_logsumexp[:, None]
    if tile.shape.softcap is not None:
        d *= 1 - (capped / tile.shape.softcap) ** 2
    if tile.shape.logit_scale is not None:
        d *= tile.shape.logit_scale
    return (d / divisor).to(dtype)


def _logits(tile: Tile) -> Tensor:
    z = tile.z.to(torch.promote_types(tile.z.dtype, torch.float32))
    if tile.bias is not None:
        z = z + tile.bias.to(z.dtype)
    return shape_logits(z, tile.shape.logit_scale, tile.shape.softcap, tile.shape.head_dtype)


def _divisor(shape: Shape) -> float | Tensor:
    temperature = shape.temperature
    return temperature[:, None] if isinstance(temperature, Tensor) else temperature


def _column(tile: Tile) -> tuple[Tensor, Tensor]:
    """Whether the target is in the tile, and its column, or 0."""
    column = tile.targets - tile.start
    inside = (column >= 0) & (column < tile.z.shape[1])
    return inside, torch.where(inside, column, 0)

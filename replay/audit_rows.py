"""A second look at the audited tokens that fit worst: odd ids, and sets that were repaired."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replay.facts import Head, Supports, dense_logits
from replay.margins import CONDITIONS, Filters, expected_ids, margins

LISTED = 8  # odd ids of one token


class OddId(NamedTuple):
    """An id on the wrong side of the trainer's own cut."""

    id: int
    rank: int  # ids with a larger logit
    logit: float  # z, before temperature
    margin: float  # how far its logit would have to move, alone, to change sides


@dataclass(frozen=True)
class WorstRow:
    """A token whose support fits the trainer's logits worst, with the ids that make it so."""

    at: int  # among the audited tokens
    token_id: int
    support_size: int
    condition: str  # the one that is furthest from true
    eps: float | None  # the smallest change of z/T that could make it true; None: no change can
    eps_logits: float | None  # the same in logits
    top_k: int
    top_p: float
    min_p: float
    expected_size: int | None  # of what the trainer's sampler keeps; None where ids were excluded
    extra: tuple[OddId, ...]  # intruders: in the support, and the trainer's sampler drops them
    missing: tuple[OddId, ...]  # absentees: the trainer's sampler keeps them
    repair_fingerprint: bool  # explained once the drawn token is left out: it was added afterwards

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, without `at`."""
        odd = {name: [o._asdict() for o in getattr(self, name)] for name in ("extra", "missing")}
        return {k: v for k, v in asdict(self).items() if k != "at"} | odd


@dataclass(frozen=True, eq=False)
class Kept:
    """M audited tokens with everything that a second look needs."""

    at: Tensor  # [M] among the audited tokens, on the CPU
    margins: Tensor  # [M, 4]
    hidden: Tensor  # [M, D]
    drawn: Tensor  # [M]
    supports: Supports
    filters: Filters

    @property
    def eps_logits(self) -> Tensor:
        """[M]"""
        least = self.margins.amin(1) * self.supports.temperature.to(self.margins)
        return (-least).clamp(min=0)

    def take(self, index: Tensor) -> Kept:
        return Kept(
            self.at[index.cpu()],
            self.margins[index],
            self.hidden[index],
            self.drawn[index],
            self.supports.take(index),
            self.filters.take(index),
        )

    def worst(self, number: int) -> Kept:
        """The `number` rows furthest from true, of those that are not true; worst first."""
        order = self.eps_logits.argsort(descending=True, stable=True)[:number]
        return self.take(order[self.eps_logits[order] > 0])

    @classmethod
    def concatenate(cls, parts: Sequence[Kept]) -> Kept:
        ids = torch.cat([p.supports.ids for p in parts])
        counts = torch.cat([p.supports.counts for p in parts])
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        temperature = torch.cat([p.supports.temperature for p in parts])
        filters = {
            name: torch.cat([vars(p.filters)[name] for p in parts])
            for name in vars(parts[0].filters)
        }
        return cls(
            torch.cat([p.at for p in parts]),
            torch.cat([p.margins for p in parts]),
            torch.cat([p.hidden for p in parts]),
            torch.cat([p.drawn for p in parts]),
            Supports(ids, offsets, temperature),
            Filters(**filters),
        )


def repaired(kept: Kept, head: Head, tolerance: float) -> Tensor:
    """[M] bool: the support is explained without the drawn token, and not with it.

    Such a set was rebuilt beside the sampler and patched with the token that was drawn.
    """
    result = (kept.supports.counts > 1) & (kept.eps_logits > tolerance)
    suspects = result.nonzero().squeeze(1)
    part = kept.take(suspects)
    supports = part.supports.without(part.drawn)
    found = margins(part.hidden, head, supports, part.filters).amin(1)
    result[suspects] = found * supports.temperature.to(found) >= -tolerance
    return result


def worst_rows(kept: Kept, head: Head, is_repaired: Tensor) -> tuple[WorstRow, ...]:
    """Each row of `kept` with its odd ids; [M, V] logits are held at once."""
    if not len(kept.at):
        return ()
    z = dense_logits(kept.hidden, head, kept.supports.temperature)
    return tuple(_look(kept, z[i], i, bool(is_repaired[i])) for i in range(len(kept.at)))


def _look(kept: Kept, z: Tensor, i: int, is_repaired: bool) -> WorstRow:
    """Row i, with its logits z [V] after temperature."""
    temperature = float(kept.supports.temperature[i])
    members = kept.supports.ids[kept.supports.offsets[i] : kept.supports.offsets[i + 1]]
    filters = kept.filters
    inside = torch.zeros(len(z), dtype=torch.bool, device=z.device)
    extra = missing = members[:0]
    expected_size = None
    if not filters.is_partial[i]:
        expected = expected_ids(z, filters, i)
        expected_size = len(expected)
        inside[expected] = True
        extra = members[~inside[members]]
        is_member = torch.zeros_like(inside)
        is_member[members] = True
        missing = expected[~is_member[expected]]
    cut_in = z[inside].min() if expected_size else z.max()
    cut_out = z[~inside].max() if bool((~inside).any()) else z.min()

    def odd(ids: Tensor, cut: Tensor) -> tuple[OddId, ...]:
        gaps = (z[ids] - cut).abs()
        listed = gaps.argsort(descending=True)[:LISTED]
        return tuple(
            OddId(
                id=int(ids[j]),
                rank=int((z > z[ids[j]]).sum()),
                logit=float(z[ids[j]]) * temperature,
                margin=float(gaps[j]) * temperature,
            )
            for j in listed.tolist()
        )

    condition = int(kept.margins[i].argmin())
    eps = -float(kept.margins[i, condition])
    top_k = int(filters.top_k[i])
    return WorstRow(
        at=int(kept.at[i]),
        token_id=int(kept.drawn[i]),
        support_size=len(members),
        condition=CONDITIONS[condition],
        eps=None if eps == torch.inf else eps,
        eps_logits=None if eps == torch.inf else eps * temperature,
        top_k=-1 if top_k == torch.iinfo(torch.int64).max else top_k,
        top_p=float(filters.top_p[i]),
        min_p=float(filters.min_p[i]),
        expected_size=expected_size,
        extra=odd(extra, cut_in),
        missing=odd(missing, cut_out),
        repair_fingerprint=is_repaired,
    )

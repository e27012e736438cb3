"""plan(): what the sparse path needs to know of the supports, worked out once for many passes.

A support of K ids is cut into tiles of at most `TILE`, one program each; the entries that name one
head row, brought together by a sort, into pieces of at most `PIECE`. Both lists begin with the
longest, so that none is left alone at the end. Runs of several pieces leave partial rows behind;
they are launched in waves that share one buffer of `WAVE` rows. Nothing here depends on scores or
targets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 64
PIECE = 128
WAVE = 8192


class Wave(NamedTuple):
    """What is launched together. Its slots follow each other; the last wave has the short runs."""

    items: slice
    splits: slice
    first_slot: int
    num_slots: int


class Pieces(NamedTuple):
    """Runs cut into pieces. A run of one piece has slot -1; the others meet again by slot."""

    items: Tensor  # [N, 4] int64: label, first element, elements, slot
    splits: Tensor  # [M, 3] int64: label, first slot, slots: runs of more than one piece
    num_slots: int
    waves: tuple[Wave, ...]

    @property
    def most_slots(self) -> int:
        """Of one wave."""
        return max(wave.num_slots for wave in self.waves)

    @property
    def at_once(self) -> Wave:
        return Wave(slice(None), slice(None), 0, self.num_slots)


class Work(NamedTuple):
    """The tokens that need logits, and their tiles, labelled by token."""

    tiles: Pieces
    rank: Tensor  # [T] int32: place among the tokens with work, -1 for the others
    num_tokens: int


class Edges(NamedTuple):
    """The entries of the tokens with work, sorted by id; those of one id ascend by token."""

    entry: Tensor  # [E'] int64 place in support_ids
    token: Tensor  # [E'] int32
    rows: Tensor  # [U] int64: the ids that occur, ascending
    counts: Tensor  # [U] int64
    pieces: Pieces  # labelled by place in `rows`


@dataclass(frozen=True, eq=False)
class SupportPlan:
    """Supports, checked, with the work lists over them; made by `plan`."""

    ids: Tensor  # [E] int32
    offsets: Tensor  # [T + 1] int64
    max_id: int  # -1 without ids
    needed: Tensor | None = None  # [T] bool: who needs logits, instead of all but the singletons
    whole: bool = True  # not one rank's part of supports that others hold the rest of
    _absent: dict[int, Tensor] = field(default_factory=dict)
    _parts: dict[tuple[int, int], SupportPlan] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_entries(self) -> int:
        return len(self.ids)

    @cached_property
    def counts(self) -> Tensor:
        """[T] int64"""
        return self.offsets.diff()

    @cached_property
    def tokens(self) -> Tensor:
        """[E] int64 The token of each entry."""
        return torch.repeat_interleave(self.counts, output_size=self.num_entries)

    @cached_property
    def work(self) -> Work:
        """Without the singletons: their scores are known."""
        return self._work(self.counts > 1 if self.needed is None else self.needed)

    @cached_property
    def all_work(self) -> Work:
        """With the singletons, whose logsumexp costs a row."""
        return self._work(self.counts > 0)

    def _work(self, needed: Tensor) -> Work:
        tokens = needed.nonzero().squeeze(1)
        rank = torch.where(needed, needed.cumsum(0) - 1, -1).int()
        tiles = _cut(tokens, self.offsets[tokens], self.counts[tokens], TILE)
        return Work(tiles, rank, len(tokens))

    @cached_property
    def edges(self) -> Edges:
        entry = (self.work.rank[self.tokens] >= 0).nonzero().squeeze(1)
        ids, order = self.ids[entry].sort(stable=True)
        entry = entry[order]
        rows, counts = torch.unique_consecutive(ids, return_counts=True)
        label = torch.arange(len(rows), device=rows.device)
        pieces = _cut(label, counts.cumsum(0) - counts, counts, PIECE)
        token = self.tokens[entry]
        return Edges(entry, token.int(), rows.long(), counts, _together(pieces, token))

    def absent(self, vocab_size: int) -> Tensor:
        """[V - U] int64 The ids of a vocabulary that no edge has."""
        if vocab_size not in self._absent:
            missing = torch.ones(vocab_size, dtype=torch.bool, device=self.ids.device)
            missing[self.edges.rows] = False
            self._absent[vocab_size] = missing.nonzero().squeeze(1)
        return self._absent[vocab_size]

    def part(self, start: int, num_rows: int) -> SupportPlan:
        """The entries in [start, start + num_rows), renumbered: what a rank with those rows owns.

        A singleton is known to all ranks without work.
        """
        if (start, num_rows) not in self._parts:
            own = (self.ids >= start) & (self.ids < start + num_rows)
            before = torch.cat([own.new_zeros(1, dtype=torch.int64), own.cumsum(0)])
            offsets = before[self.offsets]
            self._parts[start, num_rows] = SupportPlan(
                self.ids[own] - start,
                offsets,
                num_rows - 1,
                needed=(offsets.diff() > 0) & (self.counts > 1),
                whole=False,
            )
        return self._parts[start, num_rows]


def plan(
    support_ids: Tensor,
    support_offsets: Tensor,
    vocab_size: int | None = None,
    *,
    check: bool = True,
) -> SupportPlan:
    """Check supports and prepare them for any number of `score_support` calls.

    support_ids [E] integers, support_offsets [T + 1] integers, both on the device of the scores.
    `check=False` leaves out the search for ids that occur twice in one support.

    Raises `ValueError` for offsets that do not run from 0 to E upwards, for ids outside the
    vocabulary, and for duplicates, with the place and both numbers.
    """
    if len(support_offsets) < 1:
        raise ValueError("0 support_offsets; must be one more than the tokens")
    offsets = support_offsets.to(support_ids.device, torch.int64)
    _check_offsets(offsets, len(support_ids))
    lowest, highest = _range(support_ids)
    if lowest < 0 or (vocab_size is not None and highest >= vocab_size):
        limit = "at least 0" if vocab_size is None else f"in [0, {vocab_size})"
        bad = lowest if lowest < 0 else highest
        at = int((support_ids == bad).nonzero()[0])
        token = int(torch.searchsorted(offsets, at, right=True)) - 1
        raise ValueError(f"support_ids: token {token} has id {bad}, must be {limit}")
    made = SupportPlan(support_ids.int().contiguous(), offsets.contiguous(), highest)
    if check:
        _check_duplicates(made)
    return made


def _range(ids: Tensor) -> tuple[int, int]:
    if not len(ids):
        return 0, -1
    lowest, highest = torch.stack(ids.aminmax()).tolist()
    return lowest, highest


def plan_for(
    given: SupportPlan | None,
    num_tokens: int,
    support_ids: Tensor,
    support_offsets: Tensor,
    vocab_size: int | None,
    *,
    check: bool,
) -> SupportPlan:
    """`given`, if it is for these supports, or a plan of them; `ValueError` with both numbers."""
    if given is None:
        if len(support_offsets) != num_tokens + 1:
            raise ValueError(
                f"{len(support_offsets)} support_offsets for {num_tokens} targets; must be one more"
            )
        return plan(support_ids, support_offsets, vocab_size, check=check)
    for name, planned, got in [
        ("tokens", given.num_tokens, num_tokens),
        ("support_ids", given.num_entries, len(support_ids)),
    ]:
        if planned != got:
            raise ValueError(f"the plan is for {planned} {name}, but there are {got}")
    if vocab_size is not None and given.max_id >= vocab_size:
        raise ValueError(f"support_ids: id {given.max_id}, must be in [0, {vocab_size})")
    return given


def _check_offsets(offsets: Tensor, num_entries: int) -> None:
    falls = (offsets.diff() < 0).any()
    first, last, falling = torch.stack([offsets[0], offsets[-1], falls.long()]).tolist()
    if first != 0 or last != num_entries:
        raise ValueError(
            f"support_offsets run from {first} to {last}, but there are {num_entries} support_ids"
        )
    if falling:
        at = int((offsets.diff() < 0).nonzero()[0])
        before, after = offsets[at : at + 2].tolist()
        raise ValueError(f"support_offsets fall from {before} to {after} at token {at}")


def _check_duplicates(made: SupportPlan) -> None:
    edges = made.edges
    ids = made.ids[edges.entry]
    twice = (ids[1:] == ids[:-1]) & (edges.token[1:] == edges.token[:-1])
    if bool(twice.any()):
        at = int(twice.nonzero()[0])
        raise ValueError(
            f"support_ids: token {int(edges.token[at])} has id {int(ids[at])} twice; "
            "a support names an id once"
        )


def _cut(label: Tensor, start: Tensor, count: Tensor, size: int) -> Pieces:
    """Cut runs into pieces of at most `size`, the longest runs first."""
    count, order = count.sort(descending=True, stable=True)
    label, start = label[order], start[order]
    pieces = (count + (size - 1)) // size  # of each run
    first = pieces.cumsum(0) - pieces
    run = torch.repeat_interleave(pieces)
    place = torch.arange(len(run), device=run.device)
    done = (place - first[run]) * size
    # runs of several pieces come first, so that a piece's place can be its slot
    slot = torch.where(pieces[run] > 1, place, -1)
    length = (count[run] - done).clamp(max=size)
    items = torch.stack([label[run], start[run] + done, length, slot], 1)
    split = (pieces > 1).nonzero().squeeze(1)
    splits = torch.stack([label[split], first[split], pieces[split]], 1)
    num_slots = int(pieces[split].sum())
    return Pieces(items, splits, num_slots, _waves(splits, num_slots, len(items)))


def _waves(splits: Tensor, num_slots: int, num_items: int) -> tuple[Wave, ...]:
    """As many whole runs at a time as have `WAVE` slots; a longer run is a wave of its own."""
    waves, run, slot = [], 0, 0
    if num_slots > WAVE:
        ends = (splits[:, 1] + splits[:, 2]).cpu()
        while num_slots - slot > WAVE:
            stop = max(run + 1, int(torch.searchsorted(ends, slot + WAVE, right=True)))
            end = int(ends[stop - 1])
            waves.append(Wave(slice(slot, end), slice(run, stop), slot, end - slot))
            run, slot = stop, end
    rest = Wave(slice(slot, num_items), slice(run, len(splits)), slot, num_slots - slot)
    return (*waves, rest)


def _together(pieces: Pieces, token: Tensor) -> Pieces:
    """Pieces of about one length in the order of their tokens, whose rows the cache then holds."""
    _, start, length, _ = pieces.items.unbind(1)
    if not len(start):
        return pieces
    size = length.float().log2().ceil().long()
    key = token[start] - size * (token.max() + 1)
    order = torch.cat([wave.items.start + key[wave.items].argsort() for wave in pieces.waves])
    return pieces._replace(items=pieces.items[order])

"""How far logits are from yielding a support, and how far from no longer yielding it.

A support S of n ids is what a sampler keeps of logits a = z/T:

    prefix  S is the n largest
    top_k   no member's rank is above k, and k ids, or another filter, stopped S
    top_p   the mass before the weakest member is below p; the mass of S is at least p, unless
            another filter stopped S
    min_p   every member is within ln(min_p) of the largest; the next id is not, unless another
            filter stopped S

A *margin* is signed, in units of a, and sup-norm: changes of every logit by less than a positive
margin leave the condition true, and no change by less than minus a negative one makes it true.
Where equality decides, it counts as true: engines differ in strictness, distances do not. Sources,
each for |change| <= e:

* two logits, or a logit and a threshold below the largest, come closer by at most 2e: the halves of
  gaps below;
* the odds of any set against any other, its mass over the other's, change by at most a factor
  exp(2e): (logit(mass) - logit(p)) / 2;
* so do the odds of S against the k - n largest outside it, whichever those are (their sum is
  monotone in each logit): the same for filters in sequence, where masses are within the top k;
* ids that tie are kept or left out together where an engine keeps ties, and ids whose logits differ
  by at most 2e can be made to tie: then the smallest e over every number of ids at the cut-off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from replay.facts import Head, Supports, dense_logits, gather_facts

CONDITIONS = ("prefix", "top_k", "top_p", "min_p")
JOINT, SEQUENTIAL, EITHER = 0, 1, 2
ROWS = 1024  # of [rows, V] logits held at once
CUBE = 2**24  # of [rows, K, M] numbers held at once
MORE_TIES = 64  # ids beyond the top k that are looked at for ties, one by one


@dataclass(frozen=True, eq=False)
class Filters:
    """What cut the supports of T tokens, [T] each."""

    top_k: Tensor  # int64, the largest int64 where there is no limit
    top_p: Tensor  # float64, 1 = off
    min_p: Tensor  # float64, 0 = off
    order: Tensor  # int8: joint, sequential, or either of them
    keeps_ties: Tensor  # bool
    is_partial: Tensor  # bool: ids were excluded, so only sizes and ratios inside S say something

    def take(self, index: Tensor) -> Filters:
        return Filters(**{name: values[index] for name, values in vars(self).items()})

    def to(self, device: torch.device) -> Filters:
        return Filters(**{name: values.to(device) for name, values in vars(self).items()})


class Rest(NamedTuple):
    """The ids outside S that share its softmax: log of their sum, and what tying costs. [T, M]

    Column 0 is without ties at the cut-off of top_k, the next are with more and more of them.
    """

    logsumexp: Tensor
    tie: Tensor  # half the gap to the cut-off


@torch.no_grad()
def margins(hidden: Tensor, head: Head, supports: Supports, filters: Filters) -> Tensor:
    """[T, 4] margins by condition, float64; +inf where a condition cannot be broken."""
    if not len(supports):
        return torch.empty(0, len(CONDITIONS), dtype=torch.float64, device=hidden.device)
    # waits for the device, so it comes first: what follows is launched while the product runs
    width = int(supports.counts.max())
    facts = gather_facts(hidden, head, supports)
    members = _Members.sort(facts.members, supports, width)
    outside = facts.logsumexp_outside.double()
    joint = Rest(outside[:, None], torch.zeros_like(outside)[:, None])
    result = judge(members, facts.top_outside, joint, filters)
    is_sequential = (
        (filters.order != JOINT)
        & (filters.top_p < 1)
        & ~filters.is_partial
        & (filters.top_k < len(head.weight))
    )
    # either order: the joint one explains most rows, so the other is worked out for the rest only
    is_sequential &= (filters.order == SEQUENTIAL) | (result.amin(1) < 0)
    rows = is_sequential.nonzero().squeeze(1)
    for index in rows.split(ROWS) if len(rows) else ():
        part, part_filters = supports.take(index), filters.take(index)
        z = dense_logits(hidden[index], head, part.temperature)
        rest = _rest(z, facts.logsumexp_outside[index], part, part_filters)
        found = judge(members.take(index), facts.top_outside[index], rest, part_filters)
        better = (part_filters.order == SEQUENTIAL) | (found.amin(1) > result[index].amin(1))
        result[index] = torch.where(better[:, None], found, result[index])
    return result


@dataclass(frozen=True, eq=False)
class _Members:
    """Logits of the supports, largest first, padded with -inf."""

    z: Tensor  # [T, K] float64
    counts: Tensor  # [T], at least 1

    @classmethod
    def sort(cls, z: Tensor, supports: Supports, width: int) -> _Members:
        """`width` is the size of the largest support."""
        counts, rows = supports.counts, supports.rows
        place = torch.arange(len(z), device=z.device) - supports.offsets[rows]
        padded = z.new_full((len(counts), width), -torch.inf, dtype=torch.float64)
        padded[rows, place] = z.double()
        return cls(padded.sort(dim=1, descending=True).values, counts)

    def at(self, index: Tensor) -> Tensor:
        """[T]"""
        return self.z.gather(1, index[:, None]).squeeze(1)

    def take(self, index: Tensor) -> _Members:
        return _Members(self.z[index], self.counts[index])


def judge(members: _Members, top_outside: Tensor, rest: Rest, filters: Filters) -> Tensor:
    """[T, 4] margins; masses are relative to the members and `rest`."""
    n, k = members.counts, filters.top_k
    infinite = torch.full_like(members.z[:, 0], torch.inf)
    weakest, largest = members.at(n - 1), members.z[:, 0]
    outside = top_outside.double()
    is_whole = filters.is_partial | (outside == -torch.inf)  # nothing known to be left out
    outside = outside.where(~filters.is_partial, -torch.inf)
    prefix = (weakest - outside) / 2
    top = torch.maximum(largest, outside)
    # top_k: ids beyond the k-th are ties of it
    tied = (weakest - members.at((k - 1).clamp(max=n - 1))) / 2
    top_k = torch.where(n <= k, infinite, tied.where(filters.keeps_ties, -torch.inf))
    # top_p and min_p: the weakest member passes
    log_p = filters.top_p.log()
    odds = log_p - torch.log1p(-filters.top_p)  # inf where off
    uses_top_p = (filters.top_p < 1) & ~filters.is_partial
    top_p = torch.where(uses_top_p, _before(members, rest, odds, filters.keeps_ties), infinite)
    floor = filters.min_p.log()  # -inf where off
    min_p = (weakest - top - floor) / 2
    # what stopped S before k ids
    is_open = (n < k) & ~is_whole
    by_top_p = torch.where(uses_top_p, _stopped(members, rest, odds, filters.keeps_ties), -infinite)
    by_min_p = (top + floor - outside) / 2
    stop = torch.where(is_open, torch.maximum(by_top_p, by_min_p), infinite)
    first = by_top_p >= by_min_p
    nothing = stop == -torch.inf
    top_k = torch.where(nothing, -infinite, top_k)
    top_p = torch.where(first & ~nothing, torch.minimum(top_p, stop), top_p)
    min_p = torch.where(first, min_p, torch.minimum(min_p, stop))
    found = torch.stack([prefix, top_k, top_p, min_p], 1)
    # what was not tested is not robust
    return torch.where(filters.is_partial[:, None], found.clamp(max=0), found)


def _before(members: _Members, rest: Rest, odds: Tensor, keeps_ties: Tensor) -> Tensor:
    """[T] Margin of: the mass before the weakest member, over all, is at most p.

    Column i of what follows: the members before i against those from i on and the rest; the latter
    can be made to tie by half the gap between i and the weakest.
    """
    z, n = members.z, members.counts
    before = torch.cat([z.new_full((len(z), 1), -torch.inf), z.logcumsumexp(1)[:, :-1]], 1)
    since = z.flip(1).logcumsumexp(1).flip(1)
    slack = (odds[:, None] - before + torch.logaddexp(since, rest.logsumexp[:, :1])) / 2
    alone = slack.gather(1, (n - 1)[:, None]).squeeze(1)
    spread = (z - members.at(n - 1)[:, None]) / 2
    spread = spread.where(spread >= 0, torch.inf)  # padding
    best = torch.maximum(spread, -slack).amin(1)
    fails = (alone < 0) & keeps_ties
    if rest.tie.shape[1] > 1:
        rows = fails.nonzero().squeeze(1)
        for part in rows.split(max(1, CUBE // (z.shape[1] * rest.tie.shape[1]))):
            tie, outside = rest.tie[part, None], rest.logsumexp[part, None]
            with_ties = torch.logaddexp(since[part, :, None], outside)  # [rows, K, M]
            slack = ((odds[part, None] - before[part])[:, :, None] + with_ties) / 2
            cost = torch.maximum(torch.maximum(spread[part, :, None], -slack), tie)
            best[part] = torch.minimum(best[part], cost.amin((1, 2)))
    return torch.where(fails, -best, alone)


def _stopped(members: _Members, rest: Rest, odds: Tensor, keeps_ties: Tensor) -> Tensor:
    """[T] Margin of: the mass of S, over all, is at least p."""
    inside = members.z.logsumexp(1)
    slack = (inside[:, None] - rest.logsumexp - odds[:, None]) / 2  # [T, M]
    alone = slack[:, 0]
    ties_break_it = torch.maximum(slack, rest.tie).amin(1)
    return torch.where((alone >= 0) & keeps_ties, ties_break_it, alone)


def _rest(z: Tensor, outside: Tensor, supports: Supports, filters: Filters) -> Rest:
    """What the top k hold beside S, from whole rows of logits z [T, V], which are overwritten.

    `outside` [T] is the log of the sum over all ids outside S.
    """
    z[supports.rows, supports.ids] = -torch.inf
    counts = supports.counts
    places = (filters.top_k - counts).clamp(min=0)
    fetched = min(int(places.max()) + MORE_TIES, z.shape[1])
    largest = z.topk(fetched, dim=1).values.double()
    sums = torch.cat([largest.new_full((len(z), 1), -torch.inf), largest.logcumsumexp(1)], 1)
    # columns: without ties, with one, two, ... and, as a bound, with all there are
    at = places[:, None] + torch.arange(MORE_TIES + 1, device=z.device)
    at = at.clamp(max=fetched)
    cut = largest.gather(1, (places - 1).clamp(min=0)[:, None])
    tie = (cut - largest.gather(1, (at - 1).clamp(min=0))) / 2
    tie[:, 0] = 0
    # S holds all k: what ties with it would be in it
    tie[places == 0, 1:] = torch.inf
    return Rest(
        torch.cat([sums.gather(1, at), outside[:, None].double()], 1),
        torch.cat([tie, tie[:, -1:]], 1).nan_to_num(nan=torch.inf),
    )


def expected_ids(z: Tensor, filters: Filters, row: int) -> Tensor:
    """The ids that the sampler keeps of logits z [V], largest first; either order: the joint one.

    As `rollout.engines.truncation` defines it, with ties kept or cut by rank.
    """
    p, order = z.double().softmax(0).sort(descending=True, stable=True)
    rank = torch.arange(len(p), device=p.device)
    keeps_ties = bool(filters.keeps_ties[row])
    if keeps_ties:
        is_tied = torch.zeros_like(p, dtype=torch.bool)
        is_tied[1:] = p[1:] == p[:-1]
        rank = rank.masked_fill(is_tied, 0).cummax(0).values
    inside = rank < filters.top_k[row]
    total = p[inside].sum() if int(filters.order[row]) == SEQUENTIAL else 1.0
    if filters.top_p[row] < 1:
        before = torch.cat([p.new_zeros(1), p.cumsum(0)[:-1]])[rank]
        inside &= before < filters.top_p[row] * total
    inside &= p >= filters.min_p[row] * p[0]
    return order[inside]

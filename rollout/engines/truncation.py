"""The sampler's mathematics: from logits to supports, with SGLang's FlashInfer semantics.

p is the fp32 softmax of logits/T. Without min_p the filters are joint, both on p itself:

    keep i  iff  #{j: p_j > p_i} < top_k  and  sum{p_j: p_j > p_i} < top_p

so ids that tie at a cut-off stay together and a support may hold more than top_k ids. With min_p
the filters are sequential: top-k, renormalise, top-p on the renormalised, p_i >= min_p * p_max. The
support is what has a weight above 0, in descending probability, ties by ascending id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.sampling import SamplingParams
from rollout.support import Support

HEADROOM = 32
"""Ids fetched beyond the largest top_k, so that ties at the cut-off rarely need a second look."""


class Samplers(NamedTuple):
    """The settings of B rows as tensors [B, 1], made once and used at every step."""

    temperature: Tensor  # fp32
    top_k: Tensor  # int64, the largest int64 where there is no limit
    top_p: Tensor  # float64, inf where there is no limit
    min_p: Tensor  # float64, 0 where off
    is_greedy: Tensor  # bool
    num_fetched: int  # ids to look at first

    @classmethod
    def stack(cls, params: Sequence[SamplingParams], device: torch.device | str) -> Samplers:
        """One row per element of `params`; a top_k of None or -1 is no limit."""
        samplers = [p.sampler for p in params]

        def column(values: Sequence[float | int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        no_limit = torch.iinfo(torch.int64).max
        top_k = [no_limit if s.top_k == -1 else s.top_k for s in samplers]
        # rounding may push the sum of all p past 1, and then a top_p of 1 would drop the tail
        top_p = [s.top_p if s.top_p < 1 else math.inf for s in samplers]
        return cls(
            temperature=column([s.temperature for s in samplers], torch.float32),
            top_k=column(top_k, torch.int64),
            # in fp32, as the record stores them and as FlashInfer applies them
            top_p=column(top_p, torch.float32).double(),
            min_p=column([s.min_p for s in samplers], torch.float32).double(),
            is_greedy=column([p.is_greedy for p in params], torch.bool),
            num_fetched=max([k for k in top_k if k != no_limit], default=0) + HEADROOM,
        )

    def take(self, rows: Tensor) -> Samplers:
        """The rows of `rows`, an int64 index, in that order."""
        temperature, top_k, top_p, min_p, is_greedy = (column[rows] for column in self[:5])
        return Samplers(temperature, top_k, top_p, min_p, is_greedy, self.num_fetched)


class Truncated(NamedTuple):
    """The supports of B rows, padded to the largest, K ids."""

    ids: Tensor  # [B, K] int64; row b's support is ids[b, :counts[b]]
    counts: Tensor  # [B] int64; 0 only where the logits have no softmax (NaN, +inf)
    support_logprobs: Tensor  # [B, K] fp32 over the support, after temperature; -inf past the count
    full_logprobs: Tensor  # [B, K] fp32 over the vocabulary, after temperature


def truncate(logits: Tensor, samplers: Samplers) -> Truncated:
    """Apply each row's temperature and filters to `logits` [B, V], of any floating dtype.

    `support_logprobs` is the log-softmax over the surviving logits/T, not a quotient of
    probabilities, so that replaying the support in fp32 gives the same number; a singleton is
    exactly 0. A greedy row is the singleton of the largest logit, the lowest id if there are more.
    """
    scaled = logits.float() / samplers.temperature
    probs = scaled.softmax(dim=1)
    vocab_size, num_fetched = probs.shape[1], samplers.num_fetched
    while True:
        top_probs, top_ids = _largest(probs, min(num_fetched, vocab_size))
        inside, is_open = _inside(top_probs, samplers)
        if num_fetched >= vocab_size or not is_open.any():
            break
        num_fetched *= 2
    top_scaled = scaled.gather(1, top_ids)
    logsumexp = top_scaled[:, :1] - top_probs[:, :1].log()
    if samplers.is_greedy.any():
        _keep_argmax(top_ids, top_scaled, inside, samplers.is_greedy)
    counts = inside.sum(dim=1)
    width = int(counts.max())
    top_scaled = top_scaled[:, :width]
    surviving = top_scaled.masked_fill(~inside[:, :width], -math.inf)
    return Truncated(
        ids=top_ids[:, :width],
        counts=counts,
        support_logprobs=surviving.log_softmax(dim=1),
        full_logprobs=top_scaled - logsumexp,
    )


def draw_uniforms(seeds: Sequence[int | None], num_steps: int) -> Tensor:
    """Random numbers in [0, 1), float64 [B, num_steps], each row from its seed alone.

    A row's first n numbers do not depend on `num_steps`; None is a fresh seed.
    """
    uniforms = np.empty((len(seeds), num_steps))
    for row, seed in zip(uniforms, seeds, strict=True):
        # Philox takes no negative seeds; SGLang's are int64
        bits = np.random.Philox(None if seed is None else seed % 2**64)
        np.random.Generator(bits).random(out=row)
    return torch.from_numpy(uniforms)


def draw(truncated: Truncated, uniforms: Tensor) -> Tensor:
    """Positions [B] int64 in the supports, by inverse CDF of `uniforms`, float64 [B] in [0, 1)."""
    cumulative = truncated.support_logprobs.double().exp().cumsum(dim=1)
    level = (uniforms * cumulative[:, -1])[:, None]
    positions = torch.searchsorted(cumulative, level, right=True)[:, 0]
    # u * total can round up to the total
    return positions.minimum(truncated.counts - 1)


class Recorded(NamedTuple):
    """What the sampler did for one row, R output tokens."""

    support: Support
    support_logprobs: NDArray[np.float32]  # aligned with support.ids
    sampling_logprobs: NDArray[np.float32]  # [R] over the support, after temperature
    full_logprobs: NDArray[np.float32]  # [R] over the vocabulary, after temperature


class Recorder:
    """Gathers a batch's steps as tensors, and splits them into rows once, at the end."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._per_token: list[tuple[Tensor, ...]] = []
        self._per_id: list[tuple[Tensor, ...]] = []

    def add(self, rows: Sequence[int], truncated: Truncated, positions: Tensor) -> None:
        """One step: row ``rows[b]`` of the batch took the id at ``positions[b]`` of its support."""
        ids, counts, support_logprobs, full_logprobs = truncated
        is_id = torch.arange(ids.shape[1], device=ids.device) < counts[:, None]
        sampling, full = (
            x.gather(1, positions[:, None])[:, 0] for x in (support_logprobs, full_logprobs)
        )
        self._rows.extend(rows)
        self._per_token.append((counts, sampling, full))
        self._per_id.append((ids[is_id].int(), support_logprobs[is_id]))

    def split(self, num_rows: int) -> list[Recorded]:
        """Each row's steps, in order; the arrays are its own."""
        rows = np.array(self._rows)
        counts, sampling, full = _concatenate(self._per_token)
        ids, support = _concatenate(self._per_id)
        by_token = rows.argsort(kind="stable")
        by_id = rows.repeat(counts).argsort(kind="stable")
        # where each row starts, in tokens and in ids
        tokens = np.searchsorted(rows[by_token], np.arange(num_rows + 1))
        entries = np.concatenate([[0], counts[by_token].cumsum()])[tokens]
        return [
            Recorded(
                Support.from_counts(ids[by_id[i:j]], counts[by_token[t:u]]),
                support[by_id[i:j]],
                sampling[by_token[t:u]],
                full[by_token[t:u]],
            )
            for (t, u), (i, j) in zip(pairwise(tokens), pairwise(entries), strict=True)
        ]


def _largest(probs: Tensor, num_fetched: int) -> tuple[Tensor, Tensor]:
    """The largest probabilities and their ids, [B, F], descending, ties by ascending id."""
    values, ids = probs.topk(num_fetched, dim=1, sorted=False)
    # the bits of non-negative floats order like the floats, so one key holds value and id
    bits = values.view(torch.int32).long() << 32
    order = (bits - ids).argsort(dim=1, descending=True)
    return values.gather(1, order), ids.gather(1, order)


def _inside(probs: Tensor, samplers: Samplers) -> tuple[Tensor, Tensor]:
    """Which of the largest probabilities, descending [B, F], pass the filters; always a prefix.

    Also whether each row is still open, bool [B]: what was not fetched is at most as probable as
    the last id that was, so a row is decided once that id is outside. Where the filters are
    sequential it must be outside top-k, whose mass the later ones need.
    """
    position = torch.arange(probs.shape[1], device=probs.device).expand_as(probs)
    is_tied = torch.zeros_like(probs, dtype=torch.bool)
    is_tied[:, 1:] = probs[:, 1:] == probs[:, :-1]
    # the number of ids that are strictly more probable
    rank = position.masked_fill(is_tied, 0).cummax(dim=1).values
    exact = probs.double()
    mass_before = torch.zeros_like(exact)
    mass_before[:, 1:] = exact[:, :-1].cumsum(dim=1)
    mass_before = mass_before.gather(1, rank)
    in_top_k = (rank < samplers.top_k) & (probs > 0)
    is_sequential = samplers.min_p > 0
    top_k_mass = exact.masked_fill(~in_top_k, 0).sum(dim=1, keepdim=True)
    limit = torch.where(is_sequential, samplers.top_p * top_k_mass, samplers.top_p)
    inside = in_top_k & (mass_before < limit) & (exact >= samplers.min_p * exact[:, :1])
    return inside, torch.where(is_sequential, in_top_k, inside)[:, -1]


def _keep_argmax(ids: Tensor, scaled: Tensor, inside: Tensor, is_greedy: Tensor) -> None:
    """Make the largest logit the only id of the greedy rows, in place.

    Two different logits can have one probability, so the first id by probability may be another.
    """
    best = scaled.argmax(dim=1, keepdim=True)
    for tensor in (ids, scaled):
        tensor[:, :1] = torch.where(is_greedy, tensor.gather(1, best), tensor[:, :1])
    inside[:, 1:] &= ~is_greedy


def _concatenate(steps: Sequence[tuple[Tensor, ...]]) -> list[NDArray[Any]]:
    """The tensors of all steps, one after another, as one array per place in the tuple."""
    return [torch.cat(tensors).cpu().numpy() for tensors in zip(*steps, strict=True)]

"""What is right, in float64, for a sample of the tokens and of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from support_inputs import Batch, Supports
from torch import Tensor

SAMPLED_TOKENS = 64
SAMPLED_IDS = 16
MOST_TOKENS_OF_AN_ID = 64  # a frequent id would need the scores of all tokens
CHUNK_ELEMENTS = 2**25
VOCAB_CHUNK = 8192


@dataclass(frozen=True)
class Exact:
    """Logprobs and gradients of the sampled tokens and ids."""

    tokens: Tensor  # [n]
    logprob: Tensor  # [n] float64
    dh: Tensor  # [n, D] float64
    ids: Tensor  # [m], none where the whole vocabulary was asked for
    dw: Tensor  # [m, D] float64

    def logprob_error(self, pieces: Sequence[Tensor]) -> float:
        """The largest difference, in nats."""
        got = torch.cat([piece.detach() for piece in pieces])[self.tokens].double()
        return float((got - self.logprob).abs().max())

    def dh_error(self, pieces: Sequence[Tensor]) -> float:
        step = len(pieces[0])
        rows = [pieces[token // step][token % step] for token in self.tokens.tolist()]
        return relative(torch.stack(rows), self.dh)

    def dw_error(self, dw: Tensor) -> float | None:
        return relative(dw[self.ids], self.dw) if len(self.ids) else None


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def exact_over_supports(batch: Batch, generator: torch.Generator) -> Exact:
    supports = batch.supports
    several = torch.nonzero(supports.sizes > 1).squeeze(1)
    tokens = sample(several, SAMPLED_TOKENS, generator)
    few = supports.of(tokens)
    logprobs = edge_logprobs(batch, tokens, few)
    hit = few.ids == few.targets[few.rows]
    slope = batch.gradient[tokens].double()[few.rows] * (hit.double() - logprobs.exp())
    dh = torch.zeros(len(tokens), batch.hidden.shape[1], dtype=torch.float64, device=slope.device)
    dh.index_add_(0, few.rows, slope[:, None] * batch.weight[few.ids].double())
    return Exact(tokens, logprobs[hit], dh, *exact_dw(batch, generator))


def exact_dw(batch: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    supports = batch.supports
    entries = torch.bincount(supports.ids, minlength=len(batch.weight))
    usable = torch.nonzero((entries > 0) & (entries <= MOST_TOKENS_OF_AN_ID)).squeeze(1)
    ids = sample(usable, SAMPLED_IDS, generator)
    if not len(ids):
        return ids, batch.hidden[:0].double()
    tokens = supports.rows[torch.isin(supports.ids, ids)].unique()
    those = supports.of(tokens)
    logprobs = edge_logprobs(batch, tokens, those)
    dw = torch.zeros(len(ids), batch.hidden.shape[1], dtype=torch.float64, device=ids.device)
    for place, wanted in enumerate(ids.tolist()):
        edges = torch.nonzero(those.ids == wanted).squeeze(1)
        of = tokens[those.rows[edges]]
        hit = (supports.targets[of] == wanted).double()
        slope = batch.gradient[of].double() * (hit - logprobs[edges].exp())
        dw[place] = slope @ batch.hidden[of].double()
    return ids, dw


def edge_logprobs(batch: Batch, tokens: Tensor, supports: Supports) -> Tensor:
    """[E] float64 logprob of each id of these tokens' supports."""
    rows, step = supports.rows, max(1, CHUNK_ELEMENTS // batch.hidden.shape[1])
    z = torch.cat(
        [
            (
                batch.hidden[tokens[rows[i : i + step]]].double()
                * batch.weight[supports.ids[i : i + step]].double()
            ).sum(1)
            for i in range(0, len(rows), step)
        ]
    )
    peak = z.new_full((len(tokens),), -torch.inf).scatter_reduce_(0, rows, z, "amax")
    mass = torch.zeros_like(peak).index_add_(0, rows, (z - peak[rows]).exp())
    return z - (peak + mass.log())[rows]


def exact_over_vocabulary(batch: Batch, generator: torch.Generator) -> Exact:
    everything = torch.arange(len(batch.hidden), device=batch.hidden.device)
    tokens = sample(everything, SAMPLED_TOKENS, generator)
    hidden = batch.hidden[tokens].double()
    parts = [w.double() @ hidden.T for w in batch.weight.split(VOCAB_CHUNK)]
    logprobs = torch.cat(parts).T.log_softmax(1)  # [n, V]
    targets = batch.supports.targets[tokens]
    mean = sum(
        p @ w.double()
        for p, w in zip(
            logprobs.exp().split(VOCAB_CHUNK, 1), batch.weight.split(VOCAB_CHUNK), strict=True
        )
    )
    dh = batch.gradient[tokens].double()[:, None] * (batch.weight[targets].double() - mean)
    logprob = logprobs.gather(1, targets[:, None]).squeeze(1)
    return Exact(tokens, logprob, dh, targets[:0], dh[:0])


def sample(values: Tensor, count: int, generator: torch.Generator) -> Tensor:
    order = torch.randperm(len(values), generator=generator, device=values.device)
    return values[order[:count]].sort().values

"""Ways to score tokens against their supports, each called as its authors would call it.

The algorithms of prime-rl and SkyRL are written anew from what they do. Liger, Cut Cross-Entropy
and TRL answer another question, the logprob over the whole vocabulary: they are here as the best
that dense kernels reach. A rival makes its own layout of the supports in `prepare`, which is not
timed, as it would be part of the batch.
"""

from __future__ import annotations

import functools
import importlib
import sys
import time
import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from support_inputs import Batch
from torch import Tensor

import replay

TOKEN_CHUNK = 4096
VOCAB_CHUNK = 8192
PAIR_CHUNKS = (2**12, 2**14, 2**16, 2**18)
SUPPORT, VOCABULARY, PRODUCT = "support", "vocabulary", "product only"


@dataclass(frozen=True)
class Rival:
    name: str
    logprobs: Callable[[Tensor, Tensor, Batch, Any], Tensor]  # hidden, weight, piece, prepared
    prepare: Callable[[Batch], Any] = lambda batch: None
    question: str = SUPPORT
    token_chunk: int | None = None
    backward: bool = True
    note: str = ""


@dataclass(frozen=True)
class Prepared:
    """A batch in the layout of a rival, cut into its chunks of tokens."""

    rival: Rival
    pieces: Sequence[tuple[Batch, Any]]

    @classmethod
    def make(cls, rival: Rival, batch: Batch) -> Prepared:
        count = len(batch.hidden)
        step = rival.token_chunk or count
        cut = [batch.piece(i, min(i + step, count)) for i in range(0, count, step)]
        return cls(rival, [(piece, rival.prepare(piece)) for piece in cut])

    def forward(self) -> list[Tensor]:
        """The logprobs of each chunk."""
        with torch.no_grad():
            return [self.rival.logprobs(b.hidden, b.weight, b, p) for b, p in self.pieces]

    def forward_backward(self) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Logprobs and dh of each chunk, and dense dW.

        Each chunk goes backward before the next goes forward. A trainer whose loss needs all
        logprobs first would have to keep the logits or compute them twice.
        """
        weight = self.pieces[0][0].weight.detach().requires_grad_()
        logprobs, dh = [], []
        for batch, prepared in self.pieces:
            hidden = batch.hidden.detach().requires_grad_()
            out = self.rival.logprobs(hidden, weight, batch, prepared)
            out.backward(batch.gradient.to(out.dtype))
            logprobs.append(out.detach())
            dh.append(hidden.grad)
        return logprobs, dh, weight.grad


# ours


def make_plan(batch: Batch) -> Any:
    supports = batch.supports
    return replay.plan(supports.ids, supports.offsets, vocab_size=len(batch.weight))


def ours(impl: str) -> Callable[[Tensor, Tensor, Batch, Any], Tensor]:
    def logprobs(hidden: Tensor, weight: Tensor, batch: Batch, plan: Any) -> Tensor:
        s = batch.supports
        return replay.score_support(
            hidden, weight, s.targets, s.ids, s.offsets, plan=plan, impl=impl, check=False
        ).logprob

    return logprobs


def ours_over_vocabulary(hidden: Tensor, weight: Tensor, batch: Batch, _: Any) -> Tensor:
    return replay.score_full(hidden, weight, batch.supports.targets).logprob


def product(hidden: Tensor, weight: Tensor, batch: Batch, _: Any) -> Tensor:
    return (hidden @ weight.T)[:, 0].clone()


# masked logits: what a trainer writes first


def flat_members(batch: Batch) -> Tensor:
    return batch.supports.rows * len(batch.weight) + batch.supports.ids


def outside_support(batch: Batch, members: Tensor) -> Tensor:
    """[T, V] True outside the supports."""
    size = (len(batch.hidden), len(batch.weight))
    outside = torch.ones(size, dtype=torch.bool, device=batch.hidden.device)
    outside.view(-1)[members] = False
    return outside


def masked_log_softmax(hidden: Tensor, weight: Tensor, outside: Tensor, targets: Tensor) -> Tensor:
    logits = (hidden @ weight.T).float().masked_fill_(outside, -torch.inf)
    return logits.log_softmax(1).gather(1, targets[:, None]).squeeze(1)


@functools.cache
def compiled_masked_log_softmax() -> Callable[..., Tensor]:
    return torch.compile(masked_log_softmax, dynamic=False)


def masked_eager(hidden: Tensor, weight: Tensor, batch: Batch, members: Tensor) -> Tensor:
    outside = outside_support(batch, members)
    return masked_log_softmax(hidden, weight, outside, batch.supports.targets)


def masked_compiled(hidden: Tensor, weight: Tensor, batch: Batch, members: Tensor) -> Tensor:
    outside = outside_support(batch, members)
    return compiled_masked_log_softmax()(hidden, weight, outside, batch.supports.targets)


# prime-rl: chunks of the vocabulary, ids padded to the largest support


class VocabularyChunks(torch.autograd.Function):
    """Logits of one chunk of the vocabulary at a time; the backward computes them again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        kept = torch.full(ids.shape, -torch.inf, device=ids.device)
        target = torch.zeros(len(ids), device=ids.device)
        peak, mass, weighted = torch.full_like(target, -torch.inf), target, target
        for start in range(0, len(weight), VOCAB_CHUNK):
            z = (hidden @ weight[start : start + VOCAB_CHUNK].T).float()
            top = torch.maximum(peak, z.amax(1))
            shrink, p = (peak - top).exp(), (z - top[:, None]).exp()
            mass = mass * shrink + p.sum(1)
            weighted = weighted * shrink + (p * z).sum(1)
            peak = top
            kept = torch.where(*looked_up(z, ids, start), kept)
            target = torch.where(*(x[:, 0] for x in looked_up(z, targets[:, None], start)), target)
        logsumexp = kept.logsumexp(1)
        ctx.save_for_backward(hidden, weight, targets, ids, logsumexp)
        ctx.set_materialize_grads(False)
        entropy = peak + mass.log() - weighted / mass  # over the whole vocabulary
        return target - logsumexp, entropy

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, targets, ids, logsumexp = ctx.saved_tensors
        dh, dw = torch.zeros_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(weight), VOCAB_CHUNK):
            chunk = weight[start : start + VOCAB_CHUNK]
            z = (hidden @ chunk.T).float()
            inside, column = in_chunk(ids, start, len(chunk))
            member = torch.zeros(z.shape, dtype=torch.int8, device=z.device)
            member.scatter_add_(1, column, inside.to(torch.int8))
            p = z.masked_fill_(member == 0, -torch.inf).sub_(logsumexp[:, None]).exp_()
            slope = p.mul_(-gradient[:, None])
            inside, column = in_chunk(targets[:, None], start, len(chunk))
            slope.scatter_add_(1, column, gradient[:, None] * inside)
            slope = slope.to(hidden.dtype)
            dh += slope @ chunk
            torch.mm(slope.T, hidden, out=dw[start : start + VOCAB_CHUNK])
        return dh, dw, None, None


def in_chunk(ids: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    return (ids >= start) & (ids < start + size), (ids - start).clamp(0, size - 1)


def looked_up(z: Tensor, ids: Tensor, start: int) -> tuple[Tensor, Tensor]:
    inside, column = in_chunk(ids, start, z.shape[1])
    return inside, z.gather(1, column)


def vocabulary_chunks(hidden: Tensor, weight: Tensor, batch: Batch, ids: Tensor) -> Tensor:
    return VocabularyChunks.apply(hidden, weight, batch.supports.targets, ids)[0]


# SkyRL: (token, id) pairs, padded to the largest support, products and gradients in bf16


class Pairs(torch.autograd.Function):
    """The logit of each pair; the backward gathers the rows again and adds in place."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        ctx.step = pair_chunk(hidden, weight)
        ctx.save_for_backward(hidden, weight, rows, ids)
        return pair_logits(hidden, weight, rows, ids, ctx.step)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, rows, ids = ctx.saved_tensors
        dh, dw = torch.zeros_like(hidden), torch.zeros_like(weight)
        for i in range(0, len(ids), ctx.step):
            token, word = rows[i : i + ctx.step], ids[i : i + ctx.step]
            slope = gradient[i : i + ctx.step, None].to(weight.dtype)
            dh.index_add_(0, token, slope * weight.index_select(0, word))
            dw.index_add_(0, word, slope * hidden.index_select(0, token))
        return dh, dw, None, None


def pair_logits(hidden: Tensor, weight: Tensor, rows: Tensor, ids: Tensor, step: int) -> Tensor:
    z = torch.empty(len(ids), device=ids.device)
    for i in range(0, len(ids), step):
        left = hidden.index_select(0, rows[i : i + step])
        z[i : i + step] = (left * weight.index_select(0, ids[i : i + step])).sum(1)
    return z


def padded_pairs(hidden: Tensor, weight: Tensor, batch: Batch, table: Tensor) -> Tensor:
    count, width = table.shape
    tokens = torch.arange(count, device=table.device)
    rows = tokens[:, None].expand(-1, width).reshape(-1)
    z = Pairs.apply(hidden, weight, rows, table.long().clamp(min=0).view(-1)).view(count, width)
    logsumexp = torch.where(table >= 0, z, -torch.inf).logsumexp(1)
    return Pairs.apply(hidden, weight, tokens, batch.supports.targets) - logsumexp


@functools.cache
def fastest_pair_chunk(
    hidden_size: int, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Timed, so that the rival runs with the chunk that suits it here."""
    if device.type != "cuda":
        return PAIR_CHUNKS[0]
    hidden = torch.randn(PAIR_CHUNKS[-1] // 16, hidden_size, dtype=dtype, device=device)
    weight = torch.randn(vocab_size, hidden_size, dtype=dtype, device=device)
    rows = torch.arange(len(hidden), device=device).repeat_interleave(16)
    ids = torch.randint(vocab_size, rows.shape, device=device)
    seconds = {}
    for step in PAIR_CHUNKS * 2:  # the second time counts
        torch.cuda.synchronize()
        began = time.perf_counter()
        pair_logits(hidden, weight, rows, ids, step)
        torch.cuda.synchronize()
        seconds[step] = time.perf_counter() - began
    return min(seconds, key=lambda step: seconds[step])


def pair_chunk(hidden: Tensor, weight: Tensor) -> int:
    return fastest_pair_chunk(hidden.shape[1], len(weight), weight.dtype, weight.device)


# wheels


def skyrl(hidden: Tensor, weight: Tensor, batch: Batch, table: Tensor) -> Tensor:
    scores = skyrl_module().sample_support_scores(
        hidden,
        batch.supports.targets,
        table,
        vocab_start_index=0,
        vocab_end_index=len(weight),
        tp_group=None,
        lm_head_weight=weight,
        chunk_size=pair_chunk(hidden, weight),
    )
    return scores.logprobs


@functools.cache
def skyrl_module() -> types.ModuleType:
    """The one module, without what its packages import (a server, storage clients)."""
    root = importlib.import_module("skyrl").__path__[0]
    for name in ("backends", "backends/skyrl_train/utils"):
        package = types.ModuleType("skyrl." + name.replace("/", "."))
        package.__path__ = [f"{root}/{name}"]
        sys.modules[package.__name__] = package
    return importlib.import_module("skyrl.backends.skyrl_train.utils.sample_support_replay")


def liger(hidden: Tensor, weight: Tensor, batch: Batch, _: Any) -> Tensor:
    module = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    loss = module.LigerFusedLinearCrossEntropyFunction.apply
    before_reduction = (None, None, -100, 0.0, 0.0)
    before_chunk = (None, False, None, False, False, False, None, None)
    targets, reduction, chunk_mem_const = batch.supports.targets, "none", 4  # about 4k tokens
    return -loss(
        hidden, weight, targets, *before_reduction, reduction, *before_chunk, chunk_mem_const
    )[0]


def cut_cross_entropy(hidden: Tensor, weight: Tensor, batch: Batch, _: Any) -> Tensor:
    module = importlib.import_module("cut_cross_entropy")
    targets = batch.supports.targets
    return -module.linear_cross_entropy(hidden, weight, targets, reduction="none")


def trl(hidden: Tensor, weight: Tensor, batch: Batch, _: Any) -> Tensor:
    score = trl_function().apply
    return score(hidden, weight, None, batch.supports.targets, 1.0, 32768, None, 1.0, ())[0]


@functools.cache
def trl_function() -> Any:
    module = importlib.import_module("trl.kernels.chunked_logprob")
    # its backward asks the trainer for ZeRO-3 (and so `datasets` in); without ZeRO this is the same
    trainer, utils = types.ModuleType("trl.trainer"), types.ModuleType("trl.trainer.utils")
    utils.maybe_gather_lm_head_ctx = lambda *parameters: nullcontext()
    sys.modules |= {"trl.trainer": trainer, "trl.trainer.utils": utils}
    return module.ChunkedLogProbFunction


def padded_ids(batch: Batch) -> Tensor:
    return batch.supports.padded()


def padded_long_ids(batch: Batch) -> Tensor:
    return batch.supports.padded().long()


OURS = Rival("score_support", ours("auto"), make_plan, note="plan given, checks off")
OURS_CPU = Rival("score_support", ours("cpu"), make_plan, note="plan given, checks off")
OURS_TRITON = Rival("score_support, triton", ours("triton"), make_plan)
OURS_DENSE = Rival("score_support, dense", ours("dense"), make_plan)
PLAN = Rival("plan", ours("auto"), note="once per batch, reused over passes")
EAGER = Rival("masked logits", masked_eager, flat_members, token_chunk=TOKEN_CHUNK)
COMPILED = Rival("masked logits, compiled", masked_compiled, flat_members, token_chunk=TOKEN_CHUNK)
PRIME_RL = Rival(
    "vocabulary chunks",
    vocabulary_chunks,
    padded_long_ids,
    token_chunk=TOKEN_CHUNK,
    note="prime-rl's algorithm; entropy over the vocabulary",
)
PADDED = Rival("padded gather", padded_pairs, padded_ids, note="SkyRL's algorithm")
SKYRL = Rival("SkyRL", skyrl, padded_ids, note="its wheel")
OURS_FULL = Rival(
    "score_full",
    ours_over_vocabulary,
    question=VOCABULARY,
    backward=False,
    note="ratio to the bare product",
)
PRODUCT_ONLY = Rival(
    "bare product", product, question=PRODUCT, token_chunk=TOKEN_CHUNK, backward=False
)
LIGER = Rival("Liger", liger, question=VOCABULARY)
CCE = Rival("Cut Cross-Entropy", cut_cross_entropy, question=VOCABULARY)
TRL = Rival("TRL", trl, question=VOCABULARY)

OVER_SUPPORTS = (OURS, PADDED, COMPILED, EAGER, PRIME_RL, SKYRL)
OVER_VOCABULARY = (PRODUCT_ONLY, OURS_FULL, TRL, LIGER, CCE)

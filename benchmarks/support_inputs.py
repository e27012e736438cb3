"""Inputs for the scoring benchmark: supports as they come from the field, made fresh each time.

Sizes follow what was published for reinforcement learning with top-p 0.97 and top-k 512: 46.5 %
singletons, median 2, mean 8, p90 20, p99 83, cap 512. Ids are Zipf distributed, because a few
tokens are in most supports, and permuted, because a tokenizer does not put those side by side.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

RECORDED = Path(__file__).parent.parent / "tests" / "data" / "sglang_0.5.21_h200_flashinfer"
SINGLETON_SHARE = 0.465
LOG_MEAN, LOG_SIGMA = 1.80, 1.25  # of the size of the others, less 2
CAP = 512
ZIPF_EXPONENT = 1.05
LOGIT_SIGMA = 3.0


@dataclass(frozen=True)
class Shape:
    """The head of a model."""

    hidden_size: int
    vocab_size: int

    def __str__(self) -> str:
        return f"{self.hidden_size}x{self.vocab_size}"


@dataclass(frozen=True)
class Supports:
    """The recorded supports of T tokens and the token sampled from each."""

    targets: Tensor  # [T] int64
    ids: Tensor  # [E] int64
    offsets: Tensor  # [T + 1] int64

    @property
    def sizes(self) -> Tensor:
        return self.offsets.diff()

    @property
    def rows(self) -> Tensor:
        """[E] The token that each id belongs to."""
        return torch.repeat_interleave(self.sizes)

    def of(self, tokens: Tensor) -> Supports:
        """The supports of these tokens alone."""
        sizes = self.sizes[tokens]
        offsets = offsets_of(sizes)
        shift = torch.repeat_interleave(self.offsets[tokens] - offsets[:-1], sizes)
        places = torch.arange(len(shift), device=shift.device) + shift
        return Supports(self.targets[tokens], self.ids[places], offsets)

    def padded(self) -> Tensor:
        """[T, largest size] int32, filled up with -1."""
        table = self.ids.new_full((len(self.targets), int(self.sizes.max())), -1, dtype=torch.int32)
        rows = self.rows
        columns = torch.arange(len(rows), device=rows.device) - self.offsets[rows]
        table[rows, columns] = self.ids.to(torch.int32)
        return table


@dataclass(frozen=True)
class Batch:
    """What one call scores."""

    hidden: Tensor  # [T, D]
    weight: Tensor  # [V, D]
    supports: Supports
    gradient: Tensor  # [T] fp32: of the loss in each logprob

    def piece(self, start: int, stop: int) -> Batch:
        supports = self.supports
        first, last = (int(x) for x in supports.offsets[[start, stop]])
        return Batch(
            self.hidden[start:stop],
            self.weight,
            Supports(
                supports.targets[start:stop],
                supports.ids[first:last],
                supports.offsets[start : stop + 1] - first,
            ),
            self.gradient[start:stop],
        )


def make_weight(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """[V, D] such that the logits of standard normal hidden states have LOGIT_SIGMA."""
    size = (shape.vocab_size, shape.hidden_size)
    weight = torch.randn(size, generator=generator, device=generator.device, dtype=dtype)
    return weight.mul_(LOGIT_SIGMA / shape.hidden_size**0.5)


def make_batch(supports: Supports, weight: Tensor, generator: torch.Generator) -> Batch:
    count, device = len(supports.targets), generator.device
    size = (count, weight.shape[1])
    hidden = torch.randn(size, generator=generator, device=device, dtype=weight.dtype)
    return Batch(hidden, weight, supports, torch.randn(count, generator=generator, device=device))


def make_supports(
    kind: str, num_tokens: int, vocab_size: int, generator: torch.Generator
) -> Supports:
    """Supports of a kind in KINDS, on the device of the generator."""
    return KINDS[kind](num_tokens, vocab_size, generator)


def synthetic(
    sizes: Callable[[int, torch.Generator], Tensor],
    ids: Callable[[int, torch.Generator], Callable[[int], Tensor]],
) -> Callable[[int, int, torch.Generator], Supports]:
    """A maker of supports from a maker of sizes and one of ids; each target is a random member."""

    def make(num_tokens: int, vocab_size: int, generator: torch.Generator) -> Supports:
        counts = sizes(num_tokens, generator).clamp(max=vocab_size)
        rows = torch.repeat_interleave(counts)
        members = distinct_ids(ids(vocab_size, generator), rows, vocab_size)
        offsets = offsets_of(counts)
        chance = torch.rand(num_tokens, generator=generator, device=generator.device)
        chosen = offsets[:-1] + (chance * counts).long().clamp(max=counts - 1)
        return Supports(members[chosen], members, offsets)

    return make


def real_sizes(num_tokens: int, generator: torch.Generator, cap: int = CAP) -> Tensor:
    device = generator.device
    normal = torch.randn(num_tokens, generator=generator, device=device)
    others = 2 + (LOG_MEAN + LOG_SIGMA * normal).exp().long()
    single = torch.rand(num_tokens, generator=generator, device=device) < SINGLETON_SHARE
    return torch.where(single, 1, others).clamp(max=cap)


def real_sizes_top_50(num_tokens: int, generator: torch.Generator) -> Tensor:
    return real_sizes(num_tokens, generator, cap=50)


def equal_sizes(size: int) -> Callable[[int, torch.Generator], Tensor]:
    def make(num_tokens: int, generator: torch.Generator) -> Tensor:
        return torch.full((num_tokens,), size, device=generator.device)

    return make


def zipf_ids(vocab_size: int, generator: torch.Generator) -> Callable[[int], Tensor]:
    device = generator.device
    ranks = torch.arange(1, vocab_size + 1, dtype=torch.float64, device=device)
    shares = (ranks**-ZIPF_EXPONENT).cumsum(0)
    id_of_rank = torch.randperm(vocab_size, generator=generator, device=device)

    def draw(count: int) -> Tensor:
        chance = torch.rand(count, generator=generator, device=device, dtype=torch.float64)
        ranks = torch.searchsorted(shares, chance * shares[-1])
        return id_of_rank[ranks.clamp(max=vocab_size - 1)]

    return draw


def uniform_ids(vocab_size: int, generator: torch.Generator) -> Callable[[int], Tensor]:
    def draw(count: int) -> Tensor:
        return torch.randint(vocab_size, (count,), generator=generator, device=generator.device)

    return draw


def distinct_ids(draw: Callable[[int], Tensor], rows: Tensor, vocab_size: int) -> Tensor:
    """An id for each entry, no id twice in a row: repeated ones are drawn again."""
    ids = draw(len(rows))
    unsettled = torch.arange(len(rows), device=rows.device)
    while len(unsettled):
        keys, order = (rows * vocab_size + ids).sort(stable=True)
        unsettled = order[1:][keys[1:] == keys[:-1]]
        ids[unsettled] = draw(len(unsettled))
    return ids


def recorded_supports(num_tokens: int, vocab_size: int, generator: torch.Generator) -> Supports:
    """Tokens drawn at random from those that a real SGLang server answered with."""
    targets, rows = recorded_rows(RECORDED)
    sizes = torch.tensor([len(row) for row in rows])
    ids = torch.tensor([i for row in rows for i in row])
    if int(ids.max()) >= vocab_size:
        raise ValueError(f"recorded ids go up to {int(ids.max())}, the vocabulary to {vocab_size}")
    recorded = Supports(torch.tensor(targets), ids, offsets_of(sizes))
    device = generator.device
    chosen = torch.randint(len(targets), (num_tokens,), generator=generator, device=device)
    picked = recorded.of(chosen.cpu())
    return Supports(*(x.to(device) for x in (picked.targets, picked.ids, picked.offsets)))


def recorded_rows(folder: Path) -> tuple[list[int], list[list[int]]]:
    targets, rows = [], []
    with gzip.open(folder / "rollouts.jsonl.gz", "rt") as file:
        for line in file:
            response = json.loads(line)["response"]
            targets += response["output_ids"]
            rows += response["meta_info"]["output_token_sampling_mask"]
    return targets, rows


def offsets_of(sizes: Tensor) -> Tensor:
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


KINDS: dict[str, Callable[[int, int, torch.Generator], Supports]] = {
    "real": synthetic(real_sizes, zipf_ids),
    "real, top_k 50": synthetic(real_sizes_top_50, zipf_ids),
    "real, uniform ids": synthetic(real_sizes, uniform_ids),
    "20 each": synthetic(equal_sizes(20), zipf_ids),
    "50 each": synthetic(equal_sizes(50), zipf_ids),
    "512 each": synthetic(equal_sizes(512), zipf_ids),
    "1024 each": synthetic(equal_sizes(1024), zipf_ids),
    "2048 each": synthetic(equal_sizes(2048), zipf_ids),
    "recorded": recorded_supports,
}

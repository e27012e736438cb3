"""The padded form of a batch: one rollout a row, for policies that cannot take packed ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Batch = TypeVar("Batch", bound="DataclassInstance")


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """B rollouts as [B, L], L input tokens of the longest, padding on the right.

    What belongs to scored tokens stays on one axis [T], in the order of a `PackedBatch`: scores
    need no padding. `policy(input_ids, attention_mask).flatten(0, 1)[hidden_rows]` are the T
    hidden states, and `on_grid` brings T values back to [B, L]. A batch without rollouts has B = 1
    and one token.
    """

    number: int
    rollout_ids: tuple[str, ...]
    input_ids: Tensor  # [B, L] int64, 0 where padding
    attention_mask: Tensor  # [B, L] int64: 1 token, 0 padding
    position_ids: Tensor  # [B, L] int64, 0 where padding
    hidden_rows: Tensor  # [T] int64: place in the flat [B * L]
    targets: Tensor  # this and what follows: as in `PackedBatch`
    rollout_index: Tensor
    support_ids: Tensor
    support_offsets: Tensor
    sampling_logprobs: Tensor
    loss_mask: Tensor
    temperature: Tensor

    def on_grid(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """[B, L] of [T]: the value of a token stands at the position that predicts it.

        `fill` elsewhere: padding, prompts, and before forced tokens. Gradients pass.
        """
        flat = values.new_full((self.input_ids.numel(),), fill)
        return flat.index_copy(0, self.hidden_rows, values).view(self.input_ids.shape)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PaddedBatch:
        """The same batch with its tensors on `device`; `non_blocking` needs pinned memory."""
        return with_tensors(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PaddedBatch:
        """The same batch in pinned memory; `DataLoader(pin_memory=True)` calls it."""
        return with_tensors(self, Tensor.pin_memory)


def with_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """A batch of any form, with what `change` makes of each tensor."""
    changed: dict[str, Any] = {k: change(v) for k, v in vars(batch).items() if torch.is_tensor(v)}
    return replace(batch, **changed)

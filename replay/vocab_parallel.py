"""A head spread over ranks: each scores the rows that it owns, and [T] numbers are reduced."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from replay.problem import Forward


@dataclass(frozen=True, eq=False)
class VocabShard:
    """This rank's `weight` holds the rows from `start` on, of the `vocab_size` of all ranks."""

    start: int
    vocab_size: int
    group: dist.ProcessGroup

    def check(self, num_rows: int) -> None:
        """Raise `ValueError` if `num_rows` from `start` on are not rows of the vocabulary."""
        if not 0 <= self.start <= self.start + num_rows <= self.vocab_size:
            raise ValueError(
                f"shard: rows {self.start} to {self.start + num_rows} of a vocabulary of "
                f"{self.vocab_size}"
            )


def merge(own: Forward, shard: VocabShard) -> Forward:
    """Scores over the whole supports. A rank without ids of a row adds nothing to it."""
    peaks = torch.stack([own.logsumexp, own.logprob + own.logsumexp])
    dist.all_reduce(peaks, dist.ReduceOp.MAX, shard.group)
    top, target = peaks
    below = torch.where(own.logsumexp > -torch.inf, top - own.logsumexp, 0)
    mass = torch.where(own.logsumexp > -torch.inf, (-below).exp(), 0)
    sums = torch.stack([mass, mass * (below + own.entropy)])
    dist.all_reduce(sums, dist.ReduceOp.SUM, shard.group)
    mass, weighted = sums
    log_mass = mass.log()
    filled = mass > 0
    logprob = torch.where(target > -torch.inf, target - top - log_mass, -torch.inf)
    return own._replace(
        logprob=logprob,
        entropy=torch.where(filled, log_mass + weighted / mass, 0),
        logsumexp=torch.where(filled, top + log_mass, -torch.inf),
        outside=(logprob == -torch.inf).sum(),
    )


def sum_over_ranks(grad: Tensor | None, shard: VocabShard | None) -> Tensor | None:
    if grad is not None and shard is not None:
        dist.all_reduce(grad, dist.ReduceOp.SUM, shard.group)
    return grad


def plain_head(head: Tensor, shard: VocabShard | None) -> Tensor:
    """A DTensor's local rows where they are a shard, else all of them, gathered.

    Ranks with a gathered head each have a gradient of their own: the shards get the mean, as FSDP
    makes it.
    """
    if type(head) in (Tensor, Parameter):
        return head
    from torch.distributed.tensor import DTensor, Partial  # a second to import

    if not isinstance(head, DTensor):
        return head
    if shard is not None:
        local: Tensor = head.to_local()
        return local
    mesh = head.device_mesh
    full: Tensor = head.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if full.requires_grad:
        full.register_hook(lambda grad: grad / mesh.size())
    return full

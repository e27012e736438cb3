"""batches(): a run as packed tensors for a trainer; shuffled, resumable, dealt to ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

import torch
from torch.utils.data import IterableDataset, get_worker_info

from replay.batch import PackedBatch, assemble, group, no_rollouts
from replay.catalog import Catalog
from replay.order import deal, shuffled
from replay.padded import PaddedBatch
from replay.prefetch import prefetched
from rollout.errors import ConfigChanged, ConfigError
from rollout.reader import Run, View

Layout = Literal["packed", "padded"]


def batches(
    data: Run | View,
    max_tokens: int,
    *,
    shuffle_seed: int | None = None,
    epoch: int = 0,
    rank: int = 0,
    world_size: int = 1,
    layout: Layout = "packed",
    prefetch: int = 2,
    pin_memory: bool | None = None,
) -> Batches:
    """The rollouts of a run or of a view of it, as batches of at most `max_tokens` input tokens.

    This reads the run once, checks every format rule, and raises the `FormatError` of the first
    that is broken; iterating copies each column once, from the mapped shard into its tensor. A
    rollout longer than `max_tokens` is alone in its own batch, as with `pack`. With `layout`
    "padded" batches are `PaddedBatch`es and padding counts towards `max_tokens`.

    Without `shuffle_seed` rollouts come as they are stored; with it in the order of
    `replay.order.shuffled`. Each rank gets its part of one and the same list of batches, and all
    ranks get equally many: where some would be one short, their last has no rollouts.

    `prefetch` batches are made ahead in a thread. `pin_memory` None pins where CUDA is available,
    but not in a worker of a `DataLoader`.

    Raises `ConfigError` for arguments that cannot be.
    """
    return Batches(
        Catalog.of(data), max_tokens, shuffle_seed, epoch, rank, world_size, layout, prefetch,
        pin_memory,
    )  # fmt: skip


class Batches(IterableDataset[PackedBatch | PaddedBatch]):
    """One rank's batches of an epoch; a `torch.utils.data` dataset, `batch_size=None`.

    Workers of a `DataLoader` share the batches, and they come in the order they have without.
    Every iteration begins where `load_state_dict` said, or at the first batch; `set_epoch` begins
    the next epoch.
    """

    _mine: list[list[int]]  # the rollouts of each batch
    _start: int  # the batch that iterations begin with
    _first: int  # the batch of the first worker
    _done: int  # batches that came out, and those before the start

    def __init__(
        self,
        catalog: Catalog,
        max_tokens: int,
        shuffle_seed: int | None,
        epoch: int,
        rank: int,
        world_size: int,
        layout: Layout,
        prefetch: int,
        pin_memory: bool | None,
    ) -> None:
        if max_tokens < 1 or prefetch < 0 or layout not in get_args(Layout):
            raise ConfigError(
                f"batches: max_tokens must be 1 or more, prefetch 0 or more, layout one of "
                f"{get_args(Layout)}; got {max_tokens}, {prefetch}, {layout!r}"
            )
        if not 0 <= rank < world_size:
            raise ConfigError(f"batches: rank must be in [0, world_size), got {rank}, {world_size}")
        self._catalog = catalog
        self._max_tokens = max_tokens
        self._shuffle_seed = shuffle_seed
        self._rank, self._world_size = rank, world_size
        self._layout = layout
        self._prefetch = prefetch
        self._pin_memory = pin_memory
        self.epoch = epoch
        self._begin(0)

    def __len__(self) -> int:
        """Batches of one iteration."""
        return len(self._mine) - self._start

    def set_epoch(self, epoch: int) -> None:
        """Go to the first batch of another epoch; nothing happens in the epoch that is set."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._begin(0)

    def __iter__(self) -> Iterator[PackedBatch | PaddedBatch]:
        self._done = self._start
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        first = self._start + (number + self._first - self._start) % workers
        mine = range(first, len(self._mine), workers)
        # a worker is ahead of its consumer anyway, and CUDA does not survive a fork
        for batch in prefetched(self._make, mine, 0 if worker else self._prefetch):
            self._done = batch.number + 1
            yield batch

    def state_dict(self, after: PackedBatch | PaddedBatch | None = None) -> dict[str, Any]:
        """Where the pass stands, for `load_state_dict`; plain numbers and strings.

        It counts the batches that the consumer got, not those that were prefetched, and is equal
        on all ranks. With workers of a `DataLoader` only the consumer knows: `after` is the last
        batch that it got.
        """
        done = self._done if after is None else after.number + 1
        return self._identity() | {"epoch": self.epoch, "first": self._first, "done": done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let iterations begin behind what a pass had done, with any number of workers.

        Raises `ConfigChanged` with the differences if that pass had other rollouts or settings.
        """
        own = self._identity()
        if missing := own.keys() | {"epoch", "first", "done"} - state.keys():
            raise ConfigError(f"state of batches: {sorted(missing)} are missing")
        differences = [
            f"{name} was {state[name]!r}, is {value!r}"
            for name, value in own.items()
            if state[name] != value
        ]
        if differences:
            raise ConfigChanged(
                f"state of batches: belongs to another pass ({'; '.join(differences)}); "
                "make the batches as they were made then, or begin anew"
            )
        self.epoch = state["epoch"]
        # workers that go on keep the batches that each would have had
        self._begin(state["done"], state["first"] if get_worker_info() else None)

    def _begin(self, done: int, first: int | None = None) -> None:
        """Work out the order, and go behind the first `done` batches."""
        catalog = self._catalog
        order = list(range(len(catalog)))
        if self._shuffle_seed is not None:
            order = shuffled(catalog.rollout_ids, self._shuffle_seed, self.epoch)
        tokens = catalog.num_input_tokens.tolist()
        is_padded = self._layout == "padded"
        groups = list(group(order, tokens.__getitem__, self._max_tokens, is_padded))
        sizes = [sum(tokens[i] for i in rollouts) for rollouts in groups]
        dealt = deal(sizes, self._world_size)[self._rank]
        self._mine = [[] if place is None else groups[place] for place in dealt]
        self._start = done
        self._done = done
        self._first = done if first is None else first

    def _make(self, number: int) -> PackedBatch | PaddedBatch:
        pinned = self._pin_memory
        if pinned is None:
            pinned = torch.cuda.is_available() and get_worker_info() is None
        rollouts = self._mine[number]
        if rollouts:
            batch = assemble(self._catalog.parts(rollouts), number, pinned)
        else:
            batch = no_rollouts(number, pinned)
        return batch.padded() if self._layout == "padded" else batch

    def _identity(self) -> dict[str, Any]:
        """What a pass is, but for the epoch."""
        return {
            "rollouts": len(self._catalog),
            "rollouts_hash": self._catalog.identity,
            "max_tokens": self._max_tokens,
            "shuffle_seed": self._shuffle_seed,
            "world_size": self._world_size,
            "layout": self._layout,
        }

"""The law of batches: every scored token exactly once, in every order, on all ranks, resumed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import Batch, rollout_of, write

from replay import batches
from rollout import open_run
from rollout.record import Rollout
from rollout.rules import find_faults

sizes = st.lists(st.integers(0, 3), max_size=4)
shapes = st.lists(st.tuples(st.integers(1, 4), sizes), min_size=1, max_size=9)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    base = tmp_path_factory.mktemp("runs")
    return (base / str(i) for i in count())


def scored_tokens(batch: Batch) -> list[tuple[Any, ...]]:
    """Each scored token with all that belongs to it, found through the tensors alone."""
    offsets, found = batch.support_offsets.tolist(), []
    flat_ids, positions = batch.input_ids.flatten(), batch.position_ids.flatten()
    for t, row in enumerate(batch.hidden_rows.tolist()):
        found.append(
            (
                batch.rollout_ids[batch.rollout_index[t]],
                flat_ids[row - positions[row] : row + 1].tolist(),  # all that it is conditioned on
                batch.targets[t].item(),
                batch.support_ids[offsets[t] : offsets[t + 1]].tolist(),
                batch.sampling_logprobs[t].item(),
                batch.loss_mask[t].item(),
                batch.temperature[t].item(),
            )
        )
    return found


def recorded_tokens(rollout: Rollout) -> list[tuple[Any, ...]]:
    whole = [*rollout.prompt_ids.tolist(), *rollout.output_ids.tolist()]
    return [
        (
            rollout.rollout_id,
            whole[: len(rollout.prompt_ids) + t],
            int(rollout.output_ids[t]),
            rollout.support[t].tolist(),
            float(rollout.sampling_logprobs[t]),
            bool(rollout.loss_mask[t]),
            rollout.temperature,
        )
        for t in np.flatnonzero(~rollout.is_forced).tolist()
    ]


@given(
    shapes=shapes,
    max_tokens=st.integers(1, 20),
    shuffle_seed=st.none() | st.integers(0, 2**32),
    epoch=st.integers(0, 3),
    world_size=st.integers(1, 4),
    layout=st.sampled_from(["packed", "padded"]),
    prefetch=st.integers(0, 2),
)
@settings(max_examples=40)
def test_a_shuffled_resumed_dealt_pass_yields_every_scored_token_exactly_once(
    folders: Iterator[Path],
    shapes: list[tuple[int, list[int]]],
    max_tokens: int,
    world_size: int,
    **options: Any,
) -> None:
    rollouts = [rollout_of(str(i), prompt, rows) for i, (prompt, rows) in enumerate(shapes)]
    assert not any(find_faults(r) for r in rollouts)
    run = open_run(write(next(folders), rollouts))
    wanted = sorted(token for r in rollouts for token in recorded_tokens(r))
    options |= {"max_tokens": max_tokens, "world_size": world_size}
    ranks = [batches(run, rank=rank, **options) for rank in range(world_size)]
    (steps,) = {len(rank) for rank in ranks}
    for stop in range(steps + 1):
        got: list[Batch] = []
        for rank, made in enumerate(ranks):
            iterator = iter(made)
            got += [next(iterator) for _ in range(stop)]
            state = made.state_dict() if stop else batches(run, rank=rank, **options).state_dict()
            iterator.close()
            again = batches(run, rank=rank, **options)
            again.load_state_dict(state)
            rest = list(again)
            assert len(rest) == steps - stop
            got += rest
        assert sorted(token for batch in got for token in scored_tokens(batch)) == wanted
        assert sorted(i for batch in got for i in batch.rollout_ids) == sorted(
            r.rollout_id for r in rollouts
        )
        for batch in got:
            assert batch.input_ids.numel() <= max_tokens or len(batch.rollout_ids) <= 1

"""Packing: which hidden row scores which output token."""

from __future__ import annotations

import numpy as np
from builders import make_rollout
from hypothesis import given
from hypothesis import strategies as st

from replay.batch import num_input_tokens, pack
from rollout.record import Rollout
from rollout.support import Support


def sequence(
    name: str, prompt: list[int], output: list[int], forced: tuple[int, ...] = ()
) -> Rollout:
    rows = [[] if t in forced else [y, y + 1] for t, y in enumerate(output)]
    return make_rollout(
        name,
        prompt_ids=np.array(prompt, np.int32),
        output_ids=np.array(output, np.int32),
        support=Support.from_rows(rows),
        sampling_logprobs=-np.arange(len(output), dtype=np.float32),
        loss_mask=np.array([bool(row) for row in rows], np.int8),
    )


def test_the_documented_example_and_a_neighbour() -> None:
    first, second = sequence("a", [10, 11], [20, 21, 22]), sequence("b", [30], [40])
    (batch,) = pack([first, second], max_tokens=100)
    assert batch.input_ids.tolist() == [10, 11, 20, 21, 30]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0]
    assert batch.hidden_rows.tolist() == [1, 2, 3, 4]
    assert batch.targets.tolist() == [20, 21, 22, 40]
    assert batch.support_ids.tolist() == [20, 21, 21, 22, 22, 23, 40, 41]
    assert batch.support_offsets.tolist() == [0, 2, 4, 6, 8]
    assert batch.temperature.tolist() == [0.5] * 4


def test_forced_tokens_are_input_but_not_scored() -> None:
    (batch,) = pack([sequence("a", [10], [20, 21, 22], forced=(1,))], max_tokens=100)
    assert batch.input_ids.tolist() == [10, 20, 21]
    assert (batch.hidden_rows.tolist(), batch.targets.tolist()) == ([0, 2], [20, 22])
    assert batch.support_offsets.tolist() == [0, 2, 4]


def test_a_rollout_without_output_scores_nothing() -> None:
    (batch,) = pack([sequence("a", [10, 11], [])], max_tokens=100)
    assert (batch.input_ids.tolist(), batch.targets.tolist()) == ([10, 11], [])


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), max_size=8), st.integers(1, 12))
def test_packing_keeps_order_and_bound(lengths: list[tuple[int, int]], max_tokens: int) -> None:
    rollouts = [
        sequence(str(i), list(range(p)), list(range(100, 100 + r)))
        for i, (p, r) in enumerate(lengths)
    ]
    batches = list(pack(rollouts, max_tokens))
    assert [r for batch in batches for r in batch.rollouts] == rollouts
    for batch in batches:
        assert len(batch.input_ids) == sum(map(num_input_tokens, batch.rollouts))
        assert len(batch.input_ids) <= max_tokens or len(batch.rollouts) == 1
        # the token after each scoring row is the target, unless the target ends its rollout
        following = batch.input_ids.tolist()[1:] + [None]
        starts = batch.position_ids.tolist()[1:] + [0]
        for row, target in zip(batch.hidden_rows.tolist(), batch.targets.tolist(), strict=True):
            assert starts[row] == 0 or following[row] == target

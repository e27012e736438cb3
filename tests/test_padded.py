"""The padded form of a batch: the same rollouts, one a row."""

from __future__ import annotations

import numpy as np
import torch
from builders import make_rollout

from replay import pack
from replay.batch import no_rollouts

TWO = [
    make_rollout("a"),  # prompt 1 3, output 9 8 2, of which 8 is forced
    make_rollout("b", prompt_ids=np.array([4], np.int32)),
]


def test_rows_are_padded_on_the_right_and_scores_stay_on_one_axis() -> None:
    (packed,) = pack(TWO, 100)
    batch = packed.padded()
    assert batch.input_ids.tolist() == [[1, 3, 9, 8], [4, 9, 8, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 0]]
    assert packed.hidden_rows.tolist() == [1, 3, 4, 6]
    assert batch.hidden_rows.tolist() == [1, 3, 4, 6]  # the padding is behind the last of them
    assert batch.targets.tolist() == [9, 2, 9, 2]
    assert batch.support_ids is packed.support_ids


def test_hidden_rows_name_the_same_positions_behind_padding() -> None:
    (batch,) = pack(TWO[::-1], 100)
    assert batch.hidden_rows.tolist() == [0, 2, 4, 6]
    padded = batch.padded()
    assert padded.hidden_rows.tolist() == [0, 2, 5, 7]
    assert padded.input_ids.flatten()[padded.hidden_rows].tolist() == [4, 8, 3, 8]


def test_values_of_tokens_go_to_the_positions_that_predict_them_with_their_gradients() -> None:
    (packed,) = pack(TWO, 100)
    values = torch.tensor([1.0, 2, 3, 4], requires_grad=True)
    grid = packed.padded().on_grid(values, fill=-1)
    assert grid.tolist() == [[-1, 1, -1, 2], [3, -1, 4, -1]]
    (grid * torch.arange(8.0).view(2, 4)).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [1, 3, 4, 6]


def test_a_batch_without_rollouts_is_one_row_of_one_token() -> None:
    batch = no_rollouts(0).padded()
    assert (batch.input_ids.tolist(), batch.attention_mask.tolist()) == ([[0]], [[1]])
    assert batch.on_grid(batch.sampling_logprobs).tolist() == [[0]]


def test_both_forms_move_with_all_their_tensors() -> None:
    (packed,) = pack(TWO, 100)
    for batch in (packed, packed.padded()):
        moved = batch.to("meta")
        devices = {t.device.type for t in vars(moved).values() if torch.is_tensor(t)}
        assert (devices, moved.rollout_ids) == ({"meta"}, ("a:0", "b:0"))

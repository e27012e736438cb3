"""Scores of logits that are there already."""

from __future__ import annotations

import pytest
import torch
from supports import in_float64, problem, ragged

from replay import plan, score_support, score_support_from_logits


@pytest.mark.parametrize("shaped", [{}, {"softcap": 4.0, "logit_scale": 0.5}], ids=["", "shaped"])
def test_the_same_as_from_hidden_states(shaped: dict[str, float]) -> None:
    p = in_float64(problem([1, 0, *ragged(20, 40)], 50, 9))
    wanted = score_support(**p, **shaped, return_support_logprobs=True)
    logits = (p.pop("hidden") @ p.pop("weight").T + p.pop("bias")).requires_grad_()
    got = score_support_from_logits(logits, **p, **shaped)
    for name in ("logprob", "entropy", "support_logprobs"):
        torch.testing.assert_close(getattr(got, name), getattr(wanted, name))
    assert int(got.outside) == int(wanted.outside)


def test_gradient_stays_inside_the_support() -> None:
    logits = torch.tensor([[3.0, 2, 1, 0, -1]]).bfloat16().requires_grad_()
    ids, offsets = torch.tensor([0, 1]), torch.tensor([0, 2])
    got = score_support_from_logits(logits, torch.tensor([1]), ids, offsets)
    got.logprob.sum().backward()
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16
    assert logits.grad[0].tolist() == pytest.approx([-0.731059, 0.731059, 0, 0, 0], abs=2e-3)


def test_rows_and_offsets_that_do_not_fit_are_refused() -> None:
    logits, ids = torch.zeros(2, 5), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"\[1\] targets for logits \[2, 5\]"):
        score_support_from_logits(logits, torch.tensor([1]), ids, torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="2 support_offsets for 2 targets"):
        score_support_from_logits(logits, torch.tensor([1, 1]), ids, torch.tensor([0, 2]))


def test_a_plan_of_other_supports_is_refused() -> None:
    made = plan(torch.tensor([0, 1, 2]), torch.tensor([0, 2, 3]), 5)
    with pytest.raises(ValueError, match="the plan is for 3 support_ids, but there are 4"):
        score_support_from_logits(
            torch.zeros(2, 5),
            torch.tensor([0, 2]),
            torch.tensor([0, 1, 2, 3]),
            torch.tensor([0, 2, 4]),
            plan=made,
        )

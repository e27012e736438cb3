"""replay.losses: values computed by hand, gradients, and what must contribute exactly nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import replay
from replay import losses, score_support_from_logits

INF, NAN = float("inf"), float("nan")
LN2 = math.log(2)


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def on(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


ALL4 = on(1, 1, 1, 1)
TWO = torch.tensor([0, 0, 0, 1])  # three tokens of one rollout, one of another


def test_it_is_exported_as_a_module() -> None:
    assert replay.losses is losses


# ------------------------------------------------------------------------- values


def test_scored_leaves_out_what_is_masked_and_what_is_outside_its_support() -> None:
    got = losses.scored(torch.tensor([1, 0, 1, 1], dtype=torch.int8), t(-1, -1, -INF, NAN))
    assert got.tolist() == [True, False, False, True]


def test_log_ratio_and_importance_ratio() -> None:
    log_ratio = losses.log_ratio(t(-1, -2, -3, -INF), t(-1 - LN2, -2 + LN2, -9, -1), on(1, 1, 0, 1))
    torch.testing.assert_close(log_ratio, t(LN2, -LN2, 0, 0))
    torch.testing.assert_close(losses.importance_ratio(log_ratio), t(2, 0.5, 1, 1))


def test_the_ratio_is_bounded_by_e_to_the_20() -> None:
    got = losses.importance_ratio(t(200, -200))
    torch.testing.assert_close(got, t(math.exp(20), math.exp(-20)))


@pytest.mark.parametrize(
    ("reduce", "wanted"),
    [
        pytest.param("sum", (3 * LN2, 3 * LN2, 3 * LN2, -LN2), id="sequence"),
        pytest.param("mean", (1.5 * LN2, 1.5 * LN2, 1.5 * LN2, -LN2), id="geometric"),
    ],
)
def test_over_rollout_is_of_counted_tokens(reduce: str, wanted: tuple[float, ...]) -> None:
    log_ratio = t(LN2, 2 * LN2, 7, -LN2)
    got = losses.over_rollout(log_ratio, on(1, 1, 0, 1), TWO, reduce)
    torch.testing.assert_close(got, t(*wanted))


def test_truncated_weights_are_cut_above_and_not_below() -> None:
    assert losses.truncated_weights(t(0.1, 1, 2, 9), at_most=2.0).tolist() == [0.1, 1, 2, 2]


def test_masked_weights_are_zero_outside_the_band() -> None:
    ratio = t(0.1, 0.5, 1, 5.5)
    assert losses.in_band(ratio, 0.5, 5.0).tolist() == [False, True, True, False]
    assert losses.masked_weights(ratio, 0.5, 5.0).tolist() == [0, 0.5, 1, 0]


def test_a_ratio_that_is_no_number_is_not_masked_away() -> None:
    assert losses.in_band(t(NAN), 0.5, 5.0).item()
    assert losses.masked_weights(t(NAN), 0.5, 5.0).isnan().all()


def test_a_rejected_token_leaves_the_denominator_or_stays_in_it() -> None:
    ratio, values = t(1, 1, 1, 100), t(1, 2, 3, 4)
    kept = ALL4 & losses.in_band(ratio, 0.5, 5.0)
    assert losses.mean_over_tokens(values, kept).item() == 2
    weighted = values * losses.masked_weights(ratio, 0.5, 5.0)
    assert losses.mean_over_tokens(weighted, ALL4).item() == 1.5


@pytest.mark.parametrize(
    ("ratio", "advantage", "wanted"),
    [
        pytest.param(1.0, 2.0, -2.0, id="on policy"),
        pytest.param(1.5, 1.0, -1.28, id="good, clipped above"),
        pytest.param(1.25, 1.0, -1.25, id="good, below clip_high"),
        pytest.param(1.5, -1.0, 1.5, id="bad, not clipped above"),
        pytest.param(0.5, 1.0, -0.5, id="good, not clipped below"),
        pytest.param(0.5, -1.0, 0.8, id="bad, clipped below"),
    ],
)
def test_policy_loss(ratio: float, advantage: float, wanted: float) -> None:
    log_ratio = t(math.log(ratio))
    got = losses.policy_loss(log_ratio, t(advantage), on(1), clip_low=0.2, clip_high=0.28)
    assert got.item() == pytest.approx(wanted)
    weighted = losses.policy_loss(
        log_ratio, t(advantage), on(1), clip_low=0.2, clip_high=0.28, weights=t(0.5)
    )
    assert weighted.item() == pytest.approx(0.5 * wanted)


def test_means_over_tokens_and_over_rollouts_weigh_rollouts_differently() -> None:
    values = t(1, 2, 30, 7)
    counted = on(1, 1, 0, 1)
    assert losses.mean_over_tokens(values, counted).item() == pytest.approx(10 / 3)
    assert losses.mean_over_rollouts(values, counted, TWO).item() == pytest.approx(4.25)


def test_a_rollout_without_counted_tokens_does_not_count() -> None:
    got = losses.mean_over_rollouts(t(1, 2, 3, 9), on(1, 1, 1, 0), TWO)
    assert got.item() == 2


def test_support_kl_is_exact() -> None:
    """KL((¾, ¼) ‖ (½, ½)) = ¾ ln 1.5 + ¼ ln 0.5; then a forced token and a singleton."""
    p, q = t(0.75, 0.25, 1).log(), t(0.5, 0.5, 1).log()
    got = losses.support_kl(p, q, torch.tensor([0, 2, 2, 3]))
    torch.testing.assert_close(got, t(0.75 * math.log(1.5) - 0.25 * LN2, 0, 0))


def test_support_kl_of_an_id_without_probability_adds_nothing_and_has_no_gradient() -> None:
    p, q = t(0, -INF).requires_grad_(), t(-LN2, -INF).requires_grad_()
    losses.support_kl(p, q, torch.tensor([0, 2])).sum().backward()
    assert p.grad is not None and p.grad.tolist() == [pytest.approx(1 + LN2), 0]
    assert q.grad is not None and q.grad.tolist() == [-1, 0]


def test_sampled_kl_is_k3() -> None:
    """r = 2: 2 − ln 2 − 1; r = ½: ½ + ln 2 − 1; equal: 0; masked: 0."""
    reference = t(-1 + LN2, -1 - LN2, -1, -INF)
    got = losses.sampled_kl(t(-1, -1, -1, -1), reference, ALL4)
    torch.testing.assert_close(got, t(1 - LN2, LN2 - 0.5, 0, 0))


def test_sampled_kl_is_unbiased_for_support_kl() -> None:
    """The mean of k3 over the policy's own distribution is the exact KL."""
    p, q = t(0.6, 0.3, 0.1), t(0.2, 0.3, 0.5)
    k3 = losses.sampled_kl(p.log(), q.log(), on(1, 1, 1))
    exact = losses.support_kl(p.log(), q.log(), torch.tensor([0, 3]))
    torch.testing.assert_close((p * k3).sum(), exact[0])


@pytest.mark.parametrize(
    ("ratios", "wanted"),
    [
        pytest.param([3.0, 3.0, 3.0], 1.0, id="all alike"),
        pytest.param([1.0, 3.0], 0.8, id="(1+3)²/(2·10)"),
        pytest.param([1.0, 0.0], 0.5, id="one of two"),
    ],
)
def test_effective_sample_size(ratios: list[float], wanted: float) -> None:
    got = losses.effective_sample_size(t(*ratios).log(), on(*[1] * len(ratios)))
    assert got.item() == pytest.approx(wanted)


def test_effective_sample_size_does_not_overflow() -> None:
    assert losses.effective_sample_size(t(900, 900), on(1, 1)).item() == 1


def test_mismatch_has_the_numbers_of_a_report() -> None:
    got = losses.mismatch(t(-1 + LN2, -1, -INF, -1), t(-1, -1, -1, -5), on(1, 1, 1, 0))
    assert (got["tokens"], got["scored_tokens"], got["sampled_outside_support"]) == (3, 2, 1)
    assert got["log_ratio_abs"]["mean"] == pytest.approx(LN2 / 2)
    assert got["mismatch_kl"] == pytest.approx((1 - LN2) / 2)
    assert got["ratio_outside"] == 0.5
    assert got["effective_sample_size"] == pytest.approx(9 / 10)


def test_a_mismatch_of_nothing_is_told_as_nothing() -> None:
    got = losses.mismatch(t(), t(), on())
    assert (got["scored_tokens"], got["mismatch_kl"], got["effective_sample_size"]) == (
        0,
        None,
        None,
    )


# ------------------------------------------------------------------------- gradients


def weighted(loss: Tensor) -> Tensor:
    """A sum in which every entry has a gradient of its own."""
    return (loss * torch.arange(1.0, len(loss) + 1, dtype=loss.dtype)).sum()


COUNTED = on(1, 0, 1, 1)
OLD = t(-1.3, -0.2, -2.1, -0.4)
ADVANTAGES = t(1, -1, -2, 0.5)
PER_TOKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "log_ratio": lambda x: losses.log_ratio(x, OLD, COUNTED),
    "importance_ratio": lambda x: losses.importance_ratio(losses.log_ratio(x, OLD, COUNTED)),
    "sequence": lambda x: losses.over_rollout(
        losses.log_ratio(x, OLD, COUNTED), COUNTED, TWO, "sum"
    ),
    "geometric": lambda x: losses.over_rollout(
        losses.log_ratio(x, OLD, COUNTED), COUNTED, TWO, "mean"
    ),
    "policy_loss": lambda x: losses.policy_loss(
        losses.log_ratio(x, OLD, COUNTED), ADVANTAGES, COUNTED
    ),
    "sampled_kl": lambda x: losses.sampled_kl(x, OLD, COUNTED),
    "sampled_kl to the reference": lambda x: losses.sampled_kl(OLD, x, COUNTED),
    "support_kl": lambda x: losses.support_kl(x, OLD, torch.tensor([0, 3, 3, 4])),
    "support_kl to the reference": lambda x: losses.support_kl(OLD, x, torch.tensor([0, 3, 3, 4])),
    "mean_over_tokens": lambda x: losses.mean_over_tokens(x, COUNTED)[None],
    "mean_over_rollouts": lambda x: losses.mean_over_rollouts(x, COUNTED, TWO)[None],
}


@pytest.mark.parametrize("name", PER_TOKEN)
def test_gradients_are_right(name: str) -> None:
    x = t(-1.0, -0.7, -1.9, -0.8).requires_grad_()
    assert torch.autograd.gradcheck(PER_TOKEN[name], (x,))


@pytest.mark.parametrize("weights", [losses.truncated_weights, losses.masked_weights])
def test_weights_have_no_gradient(weights: Callable[..., Tensor]) -> None:
    x = t(0.1, 0.2).requires_grad_()
    bounds = (2.0,) if weights is losses.truncated_weights else (0.5, 5.0)
    assert not weights(losses.importance_ratio(x), *bounds).requires_grad


@pytest.mark.parametrize(
    "wild",
    [
        pytest.param(-INF, id="outside its support"),
        pytest.param(NAN, id="NaN where masked"),
        pytest.param(300.0, id="overflow where masked"),
    ],
)
@pytest.mark.parametrize("name", [n for n in PER_TOKEN if not n.startswith("support_kl")])
def test_what_does_not_count_contributes_exactly_nothing(name: str, wild: float) -> None:
    """Token 1 is masked in COUNTED: whatever stands there, values and gradients are the same."""
    results = []
    for value in (-0.7, wild):
        x = t(-1.0, value, -1.9, -0.8).requires_grad_()
        loss = PER_TOKEN[name](x)
        weighted(loss).backward()
        results.append((loss.detach(), x.grad))
    (loss, gradient), (wild_loss, wild_gradient) = results
    assert torch.equal(loss, wild_loss)
    assert torch.equal(gradient, wild_gradient)
    assert gradient[1] == 0


def test_an_advantage_that_is_no_number_does_not_leak_from_a_masked_token() -> None:
    x = t(-1.0, -0.7).requires_grad_()
    log_ratio = losses.log_ratio(x, t(-1, -1), on(1, 0))
    loss = losses.policy_loss(log_ratio, t(1, NAN), on(1, 0), weights=t(1, NAN))
    losses.mean_over_tokens(loss, on(1, 0)).backward()
    assert x.grad is not None and x.grad.tolist() == [-1, 0]


def test_a_policy_that_gives_no_number_shows_in_the_loss() -> None:
    log_ratio = losses.log_ratio(t(NAN, -1), t(-1, -1), on(1, 1))
    loss = losses.policy_loss(log_ratio, t(1, 1), on(1, 1))
    assert losses.mean_over_tokens(loss, on(1, 1)).isnan()


def test_a_large_ratio_of_a_counted_token_leaves_the_gradient_finite() -> None:
    x = torch.tensor([200.0, -1.0], requires_grad=True)
    log_ratio = losses.log_ratio(x, torch.tensor([0.0, -1.0]), on(1, 1))
    losses.policy_loss(log_ratio, torch.tensor([1.0, 1.0]), on(1, 1)).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0, -1]


def test_from_logits_to_a_loss_with_a_token_outside_its_support() -> None:
    """The row of the token that is outside gets no gradient, and nothing is NaN."""
    logits = torch.tensor([[3.0, 2, 1], [0, 1, 2]], requires_grad=True)
    scores = score_support_from_logits(
        logits, torch.tensor([1, 2]), torch.tensor([0, 1, 0, 1]), torch.tensor([0, 2, 4])
    )
    counted = losses.scored(torch.ones(2), scores.logprob)
    log_ratio = losses.log_ratio(scores.logprob, torch.tensor([-1.313262, -0.5]), counted)
    loss = losses.mean_over_tokens(losses.policy_loss(log_ratio, torch.ones(2), counted), counted)
    loss.backward()
    assert (counted.tolist(), loss.item()) == ([True, False], pytest.approx(-1))
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([0.731059, -0.731059, 0], abs=1e-6)
    assert logits.grad[1].tolist() == [0, 0, 0]


def test_an_empty_batch_is_zero_and_has_a_gradient() -> None:
    x = t().requires_grad_()
    index = torch.zeros(0, dtype=torch.int64)
    log_ratio = losses.over_rollout(losses.log_ratio(x, t(), on()), on(), index, "mean")
    loss = losses.policy_loss(log_ratio, t(), on())
    total = losses.mean_over_tokens(loss, on()) + losses.mean_over_rollouts(loss, on(), index)
    total = total + losses.support_kl(x, t(), torch.tensor([0])).sum()
    total.backward()
    assert (total.item(), x.grad.tolist()) == (0, [])
    assert losses.effective_sample_size(log_ratio, on()).isnan()


# ------------------------------------------------------------------------- what does not fit


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logprobs \[2, 1\] for loss_mask \[2\]"):
        losses.log_ratio(t(1, 2)[:, None], t(1, 2), on(1, 1))


def test_tokens_of_a_rollout_must_stand_together() -> None:
    with pytest.raises(ValueError, match="rollout_index must ascend"):
        losses.over_rollout(t(1, 2), on(1, 1), torch.tensor([1, 0]), "sum")

"""The sampler's mathematics against a definition in plain loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.engines import truncation
from rollout.engines.truncation import (
    HEADROOM,
    Recorder,
    Samplers,
    Truncated,
    draw,
    draw_uniforms,
    truncate,
)
from rollout.sampling import SamplingParams


def support_of(probs, top_k, top_p, min_p):
    """The definition: ids inside, by descending probability, then ascending id."""

    def passes(among, limit_mass):
        above = {
            i: sorted((q for q in among.values() if q > p), reverse=True) for i, p in among.items()
        }
        return {i: (len(above[i]) < top_k, sum(above[i]) < limit_mass) for i in among}

    inside = {i: p for i, p in enumerate(probs) if p > 0}
    if min_p > 0:
        inside = {i: inside[i] for i, (in_k, _) in passes(inside, math.inf).items() if in_k}
        total = sum(inside.values())
        inside = {i: p / total for i, p in inside.items()}
        largest = max(inside.values())
        inside = {i: p for i, p in inside.items() if passes(inside, top_p)[i][1]}
        inside = {i: p for i, p in inside.items() if p >= min_p * largest}
    else:
        inside = {i: inside[i] for i, both in passes(inside, top_p).items() if all(both)}
    return sorted(inside, key=lambda i: (-inside[i], i))


def rows_of(truncated: Truncated) -> list[list[int]]:
    return [
        ids[:count].tolist()
        for ids, count in zip(truncated.ids, truncated.counts.tolist(), strict=True)
    ]


def from_probs(probs: list[float], **params: float) -> Truncated:
    logits = torch.tensor([probs], dtype=torch.float64).log()
    return truncate(logits, Samplers.stack([SamplingParams(**params)], "cpu"))


SETTINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.25, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([None, 1, 2, 3, 7, 40, 500]),
    top_p=st.sampled_from([1e-6, 0.1, 0.45, 0.5, 0.8, 0.97, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.25, 1.0]),
)


@st.composite
def batches(draw_):
    """Logits with many ties, and each row its own settings."""
    params = draw_(st.lists(SETTINGS, min_size=1, max_size=4))
    shape = (len(params), draw_(st.integers(1, 90)))
    rng = np.random.default_rng(draw_(st.integers(0, 10_000)))
    logits = rng.normal(0, draw_(st.sampled_from([0.0, 0.5, 2.0, 8.0])), shape)
    if grid := draw_(st.sampled_from([0, 0.25, 1.0, 3.0])):
        logits = np.round(logits / grid) * grid
    return torch.from_numpy(logits).float(), params


@settings(max_examples=150, deadline=None)
@given(batches())
def test_agrees_with_the_definition(batch):
    logits, params = batch
    truncated = truncate(logits, Samplers.stack(params, "cpu"))
    temperatures = torch.tensor([[p.sampler.temperature] for p in params])
    scaled = logits / temperatures
    for b, (probs, ids) in enumerate(zip(scaled.softmax(1), rows_of(truncated), strict=True)):
        _, top_p, top_k, min_p = params[b].sampler
        if params[b].is_greedy:
            assert ids == [int(logits[b].argmax())]
        else:
            limit = float(np.float32(top_p)) if top_p < 1 else math.inf
            k = math.inf if top_k == -1 else top_k
            assert ids == support_of(probs.tolist(), k, limit, float(np.float32(min_p)))
        exact = scaled[b].double()
        over_support = exact[ids].log_softmax(0).float()
        over_vocabulary = exact.log_softmax(0)[ids].float()
        torch.testing.assert_close(
            truncated.support_logprobs[b, : len(ids)], over_support, atol=4e-6, rtol=1e-6
        )
        torch.testing.assert_close(
            truncated.full_logprobs[b, : len(ids)], over_vocabulary, atol=8e-6, rtol=1e-6
        )
        assert truncated.support_logprobs[b, len(ids) :].eq(-math.inf).all()


@pytest.fixture
def fetches(monkeypatch):
    """How many ids each look at the probabilities fetched."""
    seen = []
    largest = truncation._largest
    monkeypatch.setattr(
        truncation, "_largest", lambda probs, n: seen.append(n) or largest(probs, n)
    )
    return seen


def test_ties_at_the_cutoff_stay_together():
    assert rows_of(from_probs([0.4, 0.2, 0.2, 0.1, 0.1], top_k=2, top_p=0.45)) == [[0, 1, 2]]


def test_more_ids_than_top_k():
    truncated = from_probs([0.5, 0.2, 0.2, 0.05, 0.05], top_k=2)
    assert rows_of(truncated) == [[0, 1, 2]]
    assert truncated.support_logprobs[0].tolist() == pytest.approx(
        [-0.587787, -1.504077, -1.504077], abs=1e-6
    )
    assert truncated.full_logprobs[0].tolist() == pytest.approx(
        [math.log(0.5), math.log(0.2), math.log(0.2)], abs=1e-6
    )


def test_min_p():
    truncated = from_probs([0.5, 0.3, 0.15, 0.05], top_k=4, min_p=0.25)
    assert rows_of(truncated) == [[0, 1, 2]]
    assert float(truncated.support_logprobs[0, 2]) == pytest.approx(-1.845827, abs=1e-6)


def test_joint_and_sequential_differ():
    # top_p 0.6 of everything needs two ids; of the two that top-k leaves, 0.4 / 0.65 is enough
    probs = [0.4, 0.25, 0.2, 0.15]
    assert rows_of(from_probs(probs, top_k=2, top_p=0.6)) == [[0, 1]]
    assert rows_of(from_probs(probs, top_k=2, top_p=0.6, min_p=1e-3)) == [[0]]


def test_sequential_needs_the_mass_of_all_that_top_k_leaves(fetches):
    logits = torch.zeros(1, 500)
    logits[0, 499] = 1.0
    params = [SamplingParams(top_p=0.5, min_p=0.01)]
    # cut off after the first look, the mass would be too small for any of the equal ids
    assert truncate(logits, Samplers.stack(params, "cpu")).counts.tolist() == [500]
    assert fetches == [32, 64, 128, 256, 500]


def test_top_p_one_drops_nothing():
    logits = torch.zeros(1, 3000)
    assert truncate(logits, Samplers.stack([SamplingParams()], "cpu")).counts.tolist() == [3000]


def test_underflow_leaves_the_support():
    truncated = truncate(
        torch.tensor([[0.0, -200.0, -1.0]]), Samplers.stack([SamplingParams(top_k=3)], "cpu")
    )
    assert rows_of(truncated) == [[0, 2]]


def test_a_singleton_is_exactly_zero():
    logits = torch.randn(64, 333, generator=torch.Generator().manual_seed(0)) * 9 + 5000
    samplers = Samplers.stack([SamplingParams(top_k=1, temperature=0.3)] * 64, "cpu")
    truncated = truncate(logits, samplers)
    assert truncated.counts.eq(1).all()
    assert truncated.support_logprobs.eq(0).all()


def test_greedy_takes_the_largest_logit_where_probabilities_tie():
    logits = torch.tensor([[0.0, 1e-9, 2e-9, 2e-9]])
    assert logits.softmax(1).unique().numel() == 1
    params = [SamplingParams(temperature=0.0), SamplingParams(top_k=1)]
    truncated = truncate(logits.expand(2, 4), Samplers.stack(params, "cpu"))
    assert rows_of(truncated) == [[2], [0, 1, 2, 3]]
    assert truncated.support_logprobs[0, 0] == 0.0
    assert float(truncated.full_logprobs[0, 0]) == pytest.approx(-math.log(4), abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_no_distribution_is_an_empty_support(bad):
    logits = torch.tensor([[1.0, bad, 0.0], [1.0, 2.0, 0.0]])
    truncated = truncate(logits, Samplers.stack([SamplingParams(top_k=2)] * 2, "cpu"))
    assert truncated.counts.tolist() == [0, 2]


def test_half_precision_logits_are_taken_as_they_are():
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(1)).bfloat16()
    samplers = Samplers.stack([SamplingParams(top_k=20, top_p=0.9)] * 3, "cpu")
    for half, full in zip(
        truncate(logits, samplers), truncate(logits.float(), samplers), strict=True
    ):
        assert torch.equal(half, full)


def test_one_look_in_the_usual_case(fetches):
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(2))
    params = [SamplingParams(top_k=50), SamplingParams(top_k=7, top_p=0.9)]
    truncate(logits, Samplers.stack(params, "cpu"))
    assert fetches == [50 + HEADROOM]


def test_more_ties_than_headroom(fetches):
    logits = torch.zeros(2, 5000)
    logits[0, 100:400] = 3.0
    logits[0, 77] = 4.0
    logits[1, 1:6] = torch.arange(1, 6)
    truncated = truncate(logits, Samplers.stack([SamplingParams(top_k=5)] * 2, "cpu"))
    assert rows_of(truncated) == [[77, *range(100, 400)], [5, 4, 3, 2, 1]]
    first = 5 + HEADROOM
    assert fetches == [first * 2**i for i in range(5)]


def test_draw_is_the_inverse_of_the_cumulative_distribution():
    probs = torch.tensor([0.5, 0.25, 0.125, 0.125])
    row = torch.cat([probs.log(), torch.tensor([-math.inf])])
    uniforms = torch.tensor([0.0, 0.49, 0.51, 0.74, 0.76, 0.88, math.nextafter(1, 0)]).double()
    size = len(uniforms)
    truncated = Truncated(
        ids=torch.arange(5).expand(size, 5),
        counts=torch.full((size,), 4),
        support_logprobs=row.expand(size, 5),
        full_logprobs=row.expand(size, 5),
    )
    assert draw(truncated, uniforms).tolist() == [0, 0, 1, 1, 2, 3, 3]


def test_draws_follow_the_support_logprobs():
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(3)) * 2
    truncated = truncate(logits, Samplers.stack([SamplingParams(top_k=8)], "cpu"))
    size = 20_000
    many = Truncated(*(x.expand(size, *x.shape[1:]) for x in truncated))
    positions = draw(many, draw_uniforms([0], size)[0])
    frequencies = positions.bincount(minlength=8) / size
    # five standard deviations of a frequency are at most 0.018
    torch.testing.assert_close(frequencies, truncated.support_logprobs[0].exp(), atol=0.018, rtol=0)


def test_uniforms_depend_on_their_seed_alone():
    together = draw_uniforms([7, -3, 2**63 - 1], 50)
    assert torch.equal(draw_uniforms([-3], 20)[0], together[1, :20])
    assert together.dtype == torch.float64
    assert together.unique().numel() == 150
    assert not torch.equal(draw_uniforms([None], 5), draw_uniforms([None], 5))


def test_recorder_splits_steps_into_rows():
    def step(ids, counts):
        values = torch.tensor(ids) / 10
        return Truncated(torch.tensor(ids), torch.tensor(counts), values, values + 100)

    recorder = Recorder()
    recorder.add(
        [0, 1, 2], step([[1, 2, 0], [3, 0, 0], [4, 5, 6]], [2, 1, 3]), torch.tensor([1, 0, 2])
    )
    recorder.add([0, 2], step([[7, 0], [8, 9]], [1, 2]), torch.tensor([0, 0]))
    recorder.add([2], step([[10]], [1]), torch.tensor([0]))
    first, second, third = recorder.split(3)
    assert [first.support[t].tolist() for t in range(2)] == [[1, 2], [7]]
    assert [second.support[t].tolist() for t in range(1)] == [[3]]
    assert [third.support[t].tolist() for t in range(3)] == [[4, 5, 6], [8, 9], [10]]
    assert third.support.ids.dtype == np.int32
    np.testing.assert_allclose(third.support_logprobs, [0.4, 0.5, 0.6, 0.8, 0.9, 1.0])
    np.testing.assert_allclose(first.sampling_logprobs, [0.2, 0.7])
    np.testing.assert_allclose(third.sampling_logprobs, [0.6, 0.8, 1.0])
    np.testing.assert_allclose(third.full_logprobs, [100.6, 100.8, 101.0])

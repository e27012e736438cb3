"""Margins of the support audit: values by hand, and theorems held against brute force."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import replay.facts
from replay.facts import Head, Supports, gather_facts
from replay.margins import CONDITIONS, EITHER, JOINT, SEQUENTIAL, Filters, expected_ids, margins

INF = math.inf
NO_LIMIT = torch.iinfo(torch.int64).max


def filters(number: int = 1, **settings: Any) -> Filters:
    plain = {"top_k": NO_LIMIT, "top_p": 1.0, "min_p": 0.0, "order": JOINT}
    plain |= {"keeps_ties": True, "is_partial": False} | settings
    types = [torch.int64, torch.float64, torch.float64, torch.int8, torch.bool, torch.bool]
    columns = {n: torch.full((number,), plain[n], dtype=t) for n, t in zip(plain, types)}  # noqa: B905
    return Filters(**columns)


def one(z: list[float], support: list[int], **settings: Any) -> dict[str, float]:
    """Margins by condition of one row of logits; the hidden state is the row, the head identity."""
    rows = torch.tensor([z], dtype=torch.float64)
    supports = Supports(
        torch.tensor(support), torch.tensor([0, len(support)]), torch.ones(1, dtype=torch.float64)
    )
    head = Head(torch.eye(len(z), dtype=torch.float64))
    found = margins(rows, head, supports, filters(**settings))[0]
    return dict(zip(CONDITIONS, found.tolist(), strict=True))


def logit(p: float) -> float:
    return math.log(p / (1 - p))


P = [0.4, 0.3, 0.2, 0.1]
LOG_P = [math.log(p) for p in P]


@pytest.mark.parametrize(
    ("support", "settings", "condition", "margin"),
    [
        # gap between 0.3 and 0.2
        pytest.param([0, 1], {"top_k": 2}, "prefix", math.log(1.5) / 2, id="prefix"),
        pytest.param([0, 2], {"top_k": 2}, "prefix", -math.log(1.5) / 2, id="swapped"),
        pytest.param([1, 3], {"top_k": 2}, "prefix", -math.log(4) / 2, id="largest left out"),
        pytest.param([0, 1, 2, 3], {}, "prefix", INF, id="everything"),
        # 0.2 would have to tie with 0.3
        pytest.param([0, 1, 2], {"top_k": 2}, "top_k", -math.log(1.5) / 2, id="one more: a tie"),
        pytest.param(
            [0, 1, 2], {"top_k": 2, "keeps_ties": False}, "top_k", -INF, id="one more, ties cut"
        ),
        pytest.param([0, 1], {"top_k": 3}, "top_k", -INF, id="one less, nothing cut it"),
        pytest.param([0, 1], {"top_k": 2}, "top_k", INF, id="as many"),
        # 0.4 is before the weakest, 0.7 inside
        pytest.param(
            [0, 1], {"top_p": 0.6}, "top_p", (logit(0.7) - logit(0.6)) / 2, id="enough mass"
        ),
        pytest.param(
            [0, 1], {"top_p": 0.45}, "top_p", (logit(0.45) - logit(0.4)) / 2, id="one was needed"
        ),
        pytest.param(
            [0, 1], {"top_p": 0.8}, "top_p", (logit(0.7) - logit(0.8)) / 2, id="mass missing"
        ),
        # of {0, 1, 2} before the third is 0.7
        pytest.param(
            [0, 1, 2],
            {"top_p": 0.6, "keeps_ties": False},
            "top_p",
            (logit(0.6) - logit(0.7)) / 2,
            id="one too many",
        ),
        # or it ties with the second (0.2027): dearer than the mass (0.2209)? no, cheaper
        pytest.param(
            [0, 1, 2], {"top_p": 0.6}, "top_p", -math.log(1.5) / 2, id="one too many, or a tie"
        ),
        pytest.param(
            [0, 1],
            {"top_p": 0.9, "top_k": 2},
            "top_p",
            (logit(0.9) - logit(0.4)) / 2,
            id="top_k stopped it",
        ),
        # within {0, 1, 2} the masses are 4/9, 7/9
        pytest.param(
            [0, 1],
            {"top_p": 0.75, "top_k": 3, "order": SEQUENTIAL, "keeps_ties": False},
            "top_p",
            (logit(7 / 9) - logit(0.75)) / 2,
            id="sequential",
        ),
        pytest.param(
            [0, 1], {"top_p": 0.75, "top_k": 3}, "top_p", (logit(0.7) - logit(0.75)) / 2, id="joint"
        ),
        pytest.param(
            [0, 1],
            {"top_p": 0.75, "top_k": 3, "order": EITHER, "keeps_ties": False},
            "top_p",
            (logit(7 / 9) - logit(0.75)) / 2,
            id="either: what explains more",
        ),
        # keep from 0.4 * min_p on
        pytest.param([0, 1], {"min_p": 0.6}, "min_p", math.log(0.24 / 0.2) / 2, id="min_p"),
        pytest.param([0, 1], {"min_p": 0.74}, "min_p", math.log(0.75 / 0.74) / 2, id="just inside"),
        pytest.param([0, 1], {"min_p": 0.8}, "min_p", -math.log(0.8 / 0.75) / 2, id="below it"),
        pytest.param([0, 1], {"min_p": 0.4}, "min_p", -math.log(0.5 / 0.4) / 2, id="next passes"),
        # excluded ids: ratios inside the support still say something
        pytest.param([0, 2], {"top_k": 2, "is_partial": True}, "prefix", 0.0, id="partial"),
        pytest.param(
            [0, 1, 2],
            {"top_k": 2, "is_partial": True},
            "top_k",
            -math.log(1.5) / 2,
            id="partial, too many",
        ),
        pytest.param(
            [1, 2], {"min_p": 0.9, "is_partial": True}, "min_p", -math.log(1.35) / 2, id="partial m"
        ),
    ],
)
def test_margins_by_hand(
    support: list[int], settings: dict[str, Any], condition: str, margin: float
) -> None:
    assert one(LOG_P, support, **settings)[condition] == pytest.approx(margin, abs=1e-12)


def test_a_tie_of_the_top_k_joins_the_renormalised_mass() -> None:
    """p = .4 .3 .15 .15, k 3, p 0.8: {0, 1} has 0.7/0.85 of the top 3, 0.7 of what ties with it."""
    z = [math.log(p) for p in (0.4, 0.3, 0.15, 0.15)]
    kept = one(z, [0, 1], top_p=0.8, top_k=3, order=SEQUENTIAL)
    cut = one(z, [0, 1], top_p=0.8, top_k=3, order=SEQUENTIAL, keeps_ties=False)
    assert kept["top_p"] == pytest.approx(0, abs=1e-12), "a tie of the trainer's logits"
    assert cut["top_p"] == pytest.approx((logit(0.7 / 0.85) - logit(0.8)) / 2)


SETTINGS = [
    pytest.param({"top_k": 3}, id="top_k"),
    pytest.param({"top_k": 3, "keeps_ties": False}, id="top_k, ties cut"),
    pytest.param({"top_k": 5, "top_p": 0.7}, id="joint"),
    pytest.param({"top_k": 5, "top_p": 0.7, "keeps_ties": False}, id="joint, ties cut"),
    pytest.param({"top_k": 4, "top_p": 0.7, "order": SEQUENTIAL}, id="sequential"),
    pytest.param(
        {"top_k": 4, "top_p": 0.7, "order": SEQUENTIAL, "keeps_ties": False}, id="sequential, cut"
    ),
    pytest.param({"top_k": 4, "top_p": 0.8, "min_p": 0.2, "order": SEQUENTIAL}, id="all three"),
    pytest.param({"min_p": 0.3}, id="min_p"),
]


def sampled(z: Tensor, f: Filters) -> list[list[int]]:
    return [sorted(expected_ids(row, f, i).tolist()) for i, row in enumerate(z)]


def supports_of(rows: list[list[int]]) -> Supports:
    offsets = torch.tensor([0, *np.cumsum([len(r) for r in rows]).tolist()])
    ids = torch.tensor([i for row in rows for i in row])
    return Supports(ids, offsets, torch.ones(len(rows), dtype=torch.float64))


def on_grid(generator: torch.Generator, number: int, vocab_size: int) -> Tensor:
    """Logits with ties, as a bf16 head makes them."""
    z = torch.randn(number, vocab_size, generator=generator, dtype=torch.float64)
    return (z * 4).round() / 4


@pytest.mark.parametrize("settings", SETTINGS)
def test_what_the_sampler_keeps_of_the_same_logits_is_consistent(settings: dict[str, Any]) -> None:
    z = on_grid(torch.Generator().manual_seed(0), 60, 12)
    f = filters(len(z), **settings)
    found = margins(z, Head(torch.eye(12, dtype=torch.float64)), supports_of(sampled(z, f)), f)
    assert found.min() >= -1e-12


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_support_of_moved_logits_needs_no_more_than_the_move(settings: dict[str, Any]) -> None:
    """The theorem behind `inconsistent`, with moves at the corners of the cube and ties made."""
    generator = torch.Generator().manual_seed(1)
    head = Head(torch.eye(7, dtype=torch.float64))
    for eps in (0.1, 0.8):
        z = torch.randn(60, 7, generator=generator, dtype=torch.float64)
        move = torch.rand(z.shape, generator=generator, dtype=torch.float64) * 2 - 1
        corners = move.sign() * eps
        snapped = ((z / eps).round() * eps - z).clamp(-eps, eps)  # ids tie
        for moved in (z + move * eps, z + corners, z + snapped):
            f = filters(len(z), **settings)
            found = margins(z, head, supports_of(sampled(moved, f)), f)
            assert -found.min() <= eps + 1e-9


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_robust_support_survives_every_move_within_its_margin(settings: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(12, 6, generator=generator, dtype=torch.float64)
    f = filters(len(z), **settings)
    rows = sampled(z, f)
    least = margins(z, Head(torch.eye(6, dtype=torch.float64)), supports_of(rows), f).amin(1)
    assert (least > 0).sum() > 6
    reach = least.clamp(min=0, max=50)[:, None] * (1 - 1e-9)
    corners = torch.tensor([[1.0 - 2 * (c >> i & 1) for i in range(6)] for c in range(64)])
    for corner in corners.double():
        assert sampled(z + corner * reach, f) == rows


def best_by_brute_force(z: Tensor, support: list[int], f: Filters, eps: float) -> bool:
    """Whether some move on a fine grid of the cube yields the support (3 ids)."""
    steps = torch.linspace(-eps, eps, 9, dtype=torch.float64)
    moves = torch.cartesian_prod(steps, steps, steps)
    return any(sorted(expected_ids(z + m, f, 0).tolist()) == support for m in moves)


@pytest.mark.parametrize("settings", [{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.5}], ids=str)
def test_a_single_condition_can_be_met_just_beyond_its_distance(settings: dict[str, Any]) -> None:
    """The distance is not only a bound for these: brute force finds logits a little further."""
    z = torch.tensor([1.0, 0.6, 0.1], dtype=torch.float64)
    f = filters(**{"keeps_ties": False} | settings)
    for support in ([0], [0, 1], [0, 2], [1]):
        found = one(z.tolist(), support, **{"keeps_ties": False} | settings)
        eps = -min(found.values())
        if not 0 < eps < INF or sum(m < 0 for m in found.values()) > 1:
            continue
        assert best_by_brute_force(z, support, f, eps * 1.02 + 1e-6)
        assert not best_by_brute_force(z, support, f, eps * 0.98)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), case=st.integers(0, len(SETTINGS) - 1))
def test_noise_below_half_a_margin_never_changes_the_verdict(seed: int, case: int) -> None:
    """Logits moved by less than eps/2: what was explained with eps stays within 1.5 eps."""
    generator = torch.Generator().manual_seed(seed)
    eps = 0.2
    z = torch.randn(8, 9, generator=generator, dtype=torch.float64)
    f = filters(len(z), **SETTINGS[case].values[0])
    rows = supports_of(sampled(z, f))
    noise = (torch.rand(z.shape, generator=generator, dtype=torch.float64) - 0.5) * eps
    assert -margins(z + noise, Head(torch.eye(9).double()), rows, f).min() <= eps / 2 + 1e-12


@pytest.mark.parametrize("shaped", [{}, {"softcap": 2.0, "logit_scale": 0.7}], ids=["", "shaped"])
@pytest.mark.parametrize("tile", [20, 10_000], ids=str)
def test_facts_equal_the_materialised_ones(
    tile: int, shaped: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay.facts, "TILE_ELEMENTS", tile)
    monkeypatch.setattr(replay.facts, "TOKEN_CHUNK", 4)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 5, generator=generator)
    weight, bias = torch.randn(31, 5, generator=generator), torch.randn(31, generator=generator)
    rows = [torch.randperm(31, generator=generator)[: 1 + 3 * i].tolist() for i in range(8)]
    supports = supports_of([*rows, list(range(31))])
    temperature = torch.linspace(0.5, 1.5, 9)
    supports = Supports(supports.ids, supports.offsets, temperature)
    got = gather_facts(hidden, Head(weight, bias, **shaped), supports)
    z = (hidden @ weight.T + bias) * shaped.get("logit_scale", 1.0)
    if shaped:
        z = 2 * torch.tanh(z / 2)
    z = z / temperature[:, None]
    torch.testing.assert_close(got.members, z[supports.rows, supports.ids])
    z[supports.rows, supports.ids] = -torch.inf
    torch.testing.assert_close(got.top_outside, z.amax(1))
    torch.testing.assert_close(got.logsumexp_outside, z.logsumexp(1))
    assert torch.equal(got.argmax_outside[:-1], z.argmax(1)[:-1])


def test_no_tokens() -> None:
    empty = Supports(torch.empty(0, dtype=torch.int64), torch.tensor([0]), torch.empty(0))
    assert margins(torch.empty(0, 3), Head(torch.eye(3)), empty, filters(0)).shape == (0, 4)


def test_rows_that_ties_can_save_are_looked_at_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of [rows, K, M] numbers only so many are held at once."""
    z = torch.randn(40, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    f = filters(len(z), top_k=5, top_p=0.7, order=SEQUENTIAL)
    rows = supports_of(sampled(z + 0.5 * z.roll(1, 0), f))
    head = Head(torch.eye(7, dtype=torch.float64))
    whole = margins(z, head, rows, f)
    assert (whole[:, 2] < 0).sum() > 3
    monkeypatch.setattr("replay.margins.CUBE", 1)
    assert torch.equal(margins(z, head, rows, f), whole)

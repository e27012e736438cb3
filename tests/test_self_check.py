"""What recorded numbers alone say about the engine: three real ones, and ones made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import RECORDED, make_rollout, recorded_rollouts

from rollout.record import Rollout
from rollout.self_check import check_engine
from rollout.stats import run_stats
from rollout.support import Support
from rollout.writer import RunWriter


@pytest.mark.parametrize("name", RECORDED)
def test_three_real_engines(name: str) -> None:
    got = check_engine(recorded_rollouts(name))
    assert got.filter_order == "joint"
    assert (got.joint_violated, got.after_temperature_violated) == (0, 0)
    assert got.tie_policy == ("keep" if "flashinfer" in name else "cut")
    assert got.head == "bfloat16"
    assert got.on_grid / got.grid_pairs > 0.97
    assert got.full_logprobs == "after_temperature"


def engine(
    seed: int,
    order: str = "joint",
    ties: str = "keep",
    head: str = "bfloat16",
    full: str = "after",
    temperature: float = 0.7,
) -> Rollout:
    """64 tokens of an engine made to measure: 400 ids, top_k 20, top_p 0.9."""
    generator = np.random.default_rng(seed)
    rows, sampling, full_logprobs, logprobs, output = [], [], [], [], []
    for _ in range(64):
        z = generator.normal(16, 2, 400)
        if head == "bfloat16":
            z = np.round(z * 16) / 16
        p = np.exp(z / temperature - np.logaddexp.reduce(z / temperature))
        rank = np.argsort(-p, kind="stable")
        kept = rank[p[rank] >= p[rank[19]]] if ties == "keep" else rank[:20]
        mass = p[kept].sum() if order == "sequential" else 1.0
        kept = kept[np.cumsum(p[kept]) - p[kept] < 0.9 * mass]
        over = z[kept] / temperature - np.logaddexp.reduce(z[kept] / temperature)
        y = generator.choice(len(kept), p=np.exp(over) / np.exp(over).sum())
        t = 1.0 if full == "before" else temperature
        rows.append(kept.tolist())
        output.append(kept[y])
        sampling.append(over[y])
        full_logprobs.append(z[kept[y]] / t - np.logaddexp.reduce(z / t))
        logprobs += over.tolist()
    return make_rollout(
        str(seed),
        output_ids=np.array(output, np.int32),
        loss_mask=np.ones(64, np.int8),
        support=Support.from_rows(rows),
        sampling_logprobs=np.array(sampling, np.float32),
        full_logprobs=np.array(full_logprobs, np.float32),
        support_logprobs=np.array(logprobs, np.float32),
        temperature=temperature,
        top_k=20,
        top_p=0.9,
        weight_versions=(),
    )


@pytest.mark.parametrize(
    ("made", "fact", "wanted"),
    [
        pytest.param({}, "filter_order", "joint", id="joint"),
        pytest.param({"order": "sequential"}, "filter_order", "sequential", id="sequential"),
        pytest.param({}, "tie_policy", "keep", id="ties kept"),
        pytest.param({"ties": "cut"}, "tie_policy", "cut", id="ties cut"),
        pytest.param({}, "head", "bfloat16", id="bf16 head"),
        pytest.param({"head": "float32"}, "head", "finer", id="fp32 head"),
        pytest.param({}, "full_logprobs", "after_temperature", id="after temperature"),
        pytest.param({"full": "before"}, "full_logprobs", "before_temperature", id="before"),
        pytest.param({"full": "before"}, "filter_order", "unknown", id="p_i are not known then"),
    ],
)
def test_an_engine_is_recognised(made: dict[str, str], fact: str, wanted: str) -> None:
    assert getattr(check_engine([engine(seed, **made) for seed in range(20)]), fact) == wanted


@pytest.mark.parametrize("wrong", [0.999, 1.001, 1.05])
def test_the_grid_resolves_a_temperature_that_is_off_by_a_thousandth(wrong: float) -> None:
    got = check_engine([replace(engine(0), temperature=0.7 * wrong)])
    assert got.head != "bfloat16"


def test_rows_that_say_nothing_say_nothing() -> None:
    """p = 1, singletons, forced tokens, nothing recorded, numbers that are none."""
    rollout = make_rollout()
    nothing = [
        replace(rollout, support_logprobs=None),
        replace(rollout, full_logprobs=None, temperature=1.0),
        replace(rollout, support_logprobs=np.full(3, np.nan, np.float32)),
        replace(engine(1), top_p=1.0),
    ]
    got = check_engine(nothing)
    assert (got.filter_order, got.order_rows) == ("unknown", 0)
    assert check_engine([]) == check_engine([replace(rollout, support_logprobs=None)])
    assert set(check_engine([]).as_dict().values()) == {"unknown", 0}


def test_a_support_whose_mass_is_top_p_but_for_rounding_contradicts_no_order() -> None:
    """p = [.5, .3, .15, .05], top_p 0.95, which is 0.949999988 in float32: {0, 1, 2} is right."""
    p = np.array([0.5, 0.3, 0.15])
    over = np.log(np.tile(p / p.sum(), 20)).astype(np.float32)
    rollout = make_rollout(
        output_ids=np.zeros(20, np.int32),
        loss_mask=np.ones(20, np.int8),
        support=Support.from_rows([[0, 1, 2]] * 20),
        sampling_logprobs=over[::3].copy(),
        full_logprobs=np.full(20, np.log(0.5), np.float32),
        support_logprobs=over,
        temperature=1.0,
        top_k=4,
        top_p=float(np.float32(0.95)),
        weight_versions=(),
    )
    got = check_engine([rollout])
    assert (got.order_rows, got.joint_violated) == (20, 0)
    narrow = replace(rollout, top_p=0.96)
    assert check_engine([narrow]).joint_violated == 20


def test_stats_of_a_run_hold_it(tmp_path: Path) -> None:
    rollouts = [engine(seed) for seed in range(3)]
    with RunWriter(tmp_path, {}) as writer:
        for rollout in rollouts:
            writer.write(rollout)
    assert run_stats(tmp_path)["engine_check"] == check_engine(rollouts).as_dict()

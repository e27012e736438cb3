"""Filter order of a real run: the embedded engine samples sequentially where there is min_p."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import make_prompt
from fault_injector import declared_order

from replay.audit import measured_semantics
from rollout.config import EmbeddedConfig
from rollout.engines.embedded import EmbeddedEngine
from rollout.record import Rollout
from rollout.record_faults import explain_record
from rollout.sampling import SamplingParams, canonical_json
from rollout.self_check import check_engine

SAMPLED = 8 * 24


async def collect(model: Path, min_p: float) -> list[Rollout]:
    prompt = make_prompt(5, 17, 29)
    params = [
        SamplingParams(
            temperature=1.3,
            top_k=20,
            top_p=0.8,
            min_p=min_p,
            max_new_tokens=24,
            ignore_eos=True,
            sampling_seed=seed,
        )
        for seed in range(8)
    ]
    config = EmbeddedConfig(dtype="float32", device="cpu", batch_size=8)
    async with EmbeddedEngine(str(model), config) as engine:
        done = await asyncio.gather(*(engine.generate(prompt, p) for p in params))
    return [
        completion.to_rollout(
            prompt_id="7",
            sample_index=i,
            prompt_ids=prompt.ids,
            prompt_text=None,
            params=p,
            sampling_params=canonical_json({"temperature": 1.3, "min_p": min_p}),
        )
        for i, (completion, p) in enumerate(zip(done, params, strict=True))
    ]


@pytest.fixture(scope="module")
def runs(tiny_model_path: Path) -> dict[float, list[Rollout]]:
    """By min_p: off, so small that it cuts nothing, and as people use it."""
    return {p: asyncio.run(collect(tiny_model_path, p)) for p in (0.0, 1e-9, 0.05)}


def test_a_run_that_says_what_it_did_is_clean(runs: dict[float, list[Rollout]]) -> None:
    for rollouts in runs.values():
        assert explain_record(rollouts) == []
    assert explain_record([r for rollouts in runs.values() for r in rollouts]) == []


def test_a_sequential_run_that_claims_joint_filters_is_found_out(
    runs: dict[float, list[Rollout]],
) -> None:
    claimed = [declared_order("joint")(r) for r in runs[1e-9]]
    (got,) = explain_record([*claimed, *runs[0.0]])
    where = "In 8 of 16 rollouts, the only ones with min_p 1e-09"
    assert (got.code, got.scope["where"]) == ("filter_order", where)
    assert "filters are joint; the recorded probabilities show that they are sequential" in (
        got.sentence
    )
    assert got.evidence["sequential_violated"] == 0
    assert got.evidence["joint_violated"] > SAMPLED / 4


def test_a_joint_run_that_claims_sequential_filters_is_found_out(
    runs: dict[float, list[Rollout]],
) -> None:
    (got,) = explain_record([declared_order("sequential")(r) for r in runs[0.0]])
    assert (got.code, got.evidence["joint_violated"]) == ("filter_order", 0)
    small = [replace(declared_order("sequential")(r), min_p=1e-9) for r in runs[0.0]]
    assert [d.code for d in explain_record(small)] == ["filter_order"]


def test_the_audit_filters_rollouts_with_min_p_in_their_own_order(
    runs: dict[float, list[Rollout]],
) -> None:
    both = [declared_order("")(r) for r in (*runs[0.0], *runs[1e-9])]
    engine = check_engine(both)
    assert measured_semantics(engine, both[0]).filter_order == "joint"
    assert measured_semantics(engine, both[-1]).filter_order == "sequential"
    (used, *_) = runs[0.05]
    told = measured_semantics(check_engine(runs[0.05]), used).filter_order
    assert told == "sequential", "where the numbers do not tell, engine_meta does"


def test_what_min_p_may_have_cut_proves_nothing(runs: dict[float, list[Rollout]]) -> None:
    got = check_engine(runs[0.05])
    assert (got.min_p_filter_order, got.min_p_joint_violated) == ("unknown", 0)
    assert got.order_rows == 0
    assert np.mean([r.support.counts.mean() for r in runs[0.05]]) > 1
    assert explain_record([declared_order("joint")(r) for r in runs[0.05]]) == []

"""The noise floor is what two honest sides are apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import make_rollout

from replay import noise
from replay.batch import pack
from replay.noise import NoiseMeter, noise_sample
from replay.policy import Policy
from rollout.record import Rollout
from rollout.support import Support

VOCABULARY = 64


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def policy(request: pytest.FixtureRequest, tiny_model_path: Path) -> Policy:
    return Policy.load(str(tiny_model_path), dtype=request.param, device="cpu")


def rollout(name: str, tokens: int = 6, width: int = 8) -> Rollout:
    generator = np.random.default_rng(sum(map(ord, name)))
    rows = [np.sort(generator.choice(VOCABULARY, width, replace=False)) for _ in range(tokens)]
    return make_rollout(
        name,
        output_ids=np.array([row[0] for row in rows], np.int32),
        support=Support.from_rows([row.tolist() for row in rows]),
        sampling_logprobs=np.full(tokens, -1.0, np.float32),
        loss_mask=np.ones(tokens, np.int8),
        temperature=0.7,
    )


def logprobs(policy: Policy, rollouts: list[Rollout], head_dtype: torch.dtype) -> torch.Tensor:
    (batch,) = pack(rollouts, 10_000)
    hidden = policy.hidden(batch.input_ids, batch.position_ids)[batch.hidden_rows]
    scores = policy.over_supports(hidden, batch, head_dtype)
    assert scores.support_logprobs is not None
    return scores.support_logprobs


def test_the_change_is_that_to_the_policy_loaded_in_the_other_precision(
    policy: Policy, tiny_model_path: Path
) -> None:
    is_rough = policy.weight.dtype == torch.bfloat16
    name, factor = ("float32", 2**0.5) if is_rough else ("bfloat16", 1.0)
    rollouts = [rollout("a"), rollout("b")]
    own = logprobs(policy, rollouts, torch.float32)
    if is_rough:  # exact weights, so that both hold the same
        other = replace(policy, body=policy.body).in_precision(torch.float32)
    else:
        other = Policy.load(str(tiny_model_path), dtype=name, device="cpu")
    again = logprobs(other, rollouts, torch.bfloat16)
    got = NoiseMeter(policy, "float32", {"a:0", "b:0"}).change(rollouts, own)
    torch.testing.assert_close(got, factor * (own - again), atol=1e-6, rtol=1e-5)
    assert got.abs().max() > 1e-4


def test_rollouts_outside_the_sample_are_not_measured(policy: Policy) -> None:
    rollouts = [rollout("a"), rollout("b", tokens=3), rollout("c")]
    own = logprobs(policy, rollouts, torch.float32)
    got = NoiseMeter(policy, "float32", {"b:0"}).change(rollouts, own)
    assert torch.isfinite(got).tolist() == [False] * 48 + [True] * 24 + [False] * 48
    alone = NoiseMeter(policy, "float32", {"b:0"}).change(rollouts[1:2], own[48:72])
    torch.testing.assert_close(got[48:72], alone)
    nothing = NoiseMeter(policy, "float32", ()).change(rollouts, own)
    assert torch.isnan(nothing).all()


def test_a_sample_is_from_all_over_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "NOISE_TOKENS", 30)
    rollouts = [rollout(f"{i}") for i in range(20)]
    assert noise_sample(rollouts) == {f"{i}:0" for i in (0, 4, 8, 12, 16)}
    assert noise_sample(rollouts[:5]) == {f"{i}:0" for i in range(5)}
    assert noise_sample([]) == frozenset()


def test_rollouts_that_cannot_differ_are_not_in_the_sample() -> None:
    alone = rollout("singletons", width=1)
    lost = replace(rollout("lost"), sampling_logprobs=np.full(6, np.nan, np.float32))
    assert noise_sample([alone, rollout("a"), lost]) == {"a:0"}

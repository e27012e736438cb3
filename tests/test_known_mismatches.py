"""Mismatches that trainers met, from the policy's forward pass to the report, with their values."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders import make_rollout
from torch import Tensor

from replay import GatesConfig, Policy, ReplayConfig, Report, Verified, make_report, verify
from rollout.record import Rollout
from rollout.support import Support

SIZE = 8
CONFIG = ReplayConfig(dtype="float32", device="cpu", audit_tokens=0)


def make_policy(vocab_size: int, seed: int = 0) -> Policy:
    """A policy whose next token depends on the last one alone; its last hidden number is 1."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(vocab_size, SIZE, generator=generator)
    table[:, -1] = 1

    def body(input_ids: Tensor, position_ids: Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(last_hidden_state=table[input_ids])

    return Policy(
        body=body,
        weight=torch.randn(vocab_size, SIZE, generator=generator),
        bias=None,
        logit_scale=None,
        softcap=None,
        device=torch.device("cpu"),
        description={},
    )


def sampled_from(
    policy: Policy, supports: list[list[int]], outputs: list[int], name: str
) -> Rollout:
    """What an engine with the policy's own weights records."""
    fed = torch.tensor([0, *outputs[:-1]])
    z = (policy.body(fed, fed, False).last_hidden_state @ policy.weight.T).double()
    rows = [z[t, ids].log_softmax(0) for t, ids in enumerate(supports)]
    at = [ids.index(y) for ids, y in zip(supports, outputs, strict=True)]
    return make_rollout(
        name,
        prompt_ids=np.array([0], np.int32),
        output_ids=np.array(outputs, np.int32),
        loss_mask=np.ones(len(outputs), np.int8),
        support=Support.from_rows(supports),
        sampling_logprobs=np.array([r[i] for r, i in zip(rows, at, strict=True)], np.float32),
        full_logprobs=z.log_softmax(1)[range(len(outputs)), outputs].float().numpy(),
        support_logprobs=torch.cat(rows).float().numpy(),
        temperature=1.0,
        weight_versions=(),
    )


def replayed(rollouts: list[Rollout], policy: Policy) -> tuple[Verified, Report]:
    verified = verify(rollouts, policy, CONFIG)
    return verified, make_report(verified, GatesConfig(), {})


def test_one_stale_row_of_the_head_moves_only_the_supports_that_hold_its_id() -> None:
    """200 tokens, 50 with id 3 in their support, whose logit is 0.5 higher in replay."""
    policy = make_policy(20)
    generator = np.random.default_rng(3)
    rollouts = []
    for n in range(10):
        supports = [[0, 1, 2, 3 if t % 4 == 0 else 4] for t in range(20)]
        outputs = [int(generator.choice(ids)) for ids in supports]
        rollouts.append(sampled_from(policy, supports, outputs, str(n)))
    _, same = replayed(rollouts, policy)
    assert same.numbers["log_ratio_abs"]["max"] < 1e-6
    weight = policy.weight.clone()
    weight[3, -1] += 0.5
    verified, report = replayed(rollouts, replace(policy, weight=weight))
    differs = np.abs(verified.tokens.log_ratio) > 1e-6
    holds_3 = np.tile([True, False, False, False], 50)
    np.testing.assert_array_equal(differs, holds_3)
    (got,) = report.diagnoses
    assert (got.code, got.scope["ids"], got.evidence["tokens"]) == ("bias", [3], 50)
    assert got.evidence["ids"] == {3: pytest.approx(-0.5, abs=1e-3)}
    assert "other_weights" in got.also
    assert report.verdict == "inconsistent"


@pytest.fixture(scope="module")
def noisy() -> tuple[Policy, list[Rollout], np.ndarray]:
    """10,000 tokens whose recorded logprobs are off by N(0, 0.02); only those of sampled ids."""
    policy = make_policy(8)
    generator = np.random.default_rng(0)
    rollouts, exact = [], []
    for n in range(50):
        outputs = generator.integers(0, 4, 200).tolist()
        made = sampled_from(policy, [[0, 1, 2, 3]] * 200, outputs, str(n))
        noise = generator.normal(0, 0.02, 200).astype(np.float32)
        logprobs = np.minimum(made.sampling_logprobs + noise, 0)
        exact.append(made.sampling_logprobs)
        rollouts.append(
            replace(made, sampling_logprobs=logprobs, support_logprobs=None, full_logprobs=None)
        )
    return policy, rollouts, np.concatenate(exact)


def test_small_honest_noise_is_consistent(noisy: Any) -> None:
    policy, rollouts, _ = noisy
    _, report = replayed(rollouts, policy)
    size = report.numbers["log_ratio_abs"]
    assert report.numbers["scored_tokens"] == 10_000
    assert size["mean"] == pytest.approx(0.0160, abs=3e-4)
    assert size["p99"] == pytest.approx(0.0515, abs=2e-3)
    assert (report.verdict, [d.code for d in report.diagnoses]) == ("consistent", ["clean"])


def test_one_token_that_is_far_off_is_the_maximum_and_can_be_found(noisy: Any) -> None:
    policy, rollouts, exact = noisy
    at = int(np.argmin(exact))  # unlikely enough to be recorded 3 nats higher
    of_rollout, position = divmod(at, 200)
    logprobs = rollouts[of_rollout].sampling_logprobs.copy()
    logprobs[position] += 3
    changed = list(rollouts)
    changed[of_rollout] = replace(rollouts[of_rollout], sampling_logprobs=logprobs)
    verified, report = replayed(changed, policy)
    assert report.numbers["log_ratio_abs"]["max"] == pytest.approx(3.0, abs=0.1)
    tokens = verified.tokens
    worst = int(np.argmax(np.abs(tokens.log_ratio)))
    assert (tokens.rollout_id[worst], tokens.position[worst]) == (f"{of_rollout}:0", position)
    assert [d.code for d in report.diagnoses] == ["clean"], "one token is no cause"


def test_one_token_outside_its_support_fails_although_the_drift_is_unchanged(noisy: Any) -> None:
    policy, rollouts, _ = noisy
    first = rollouts[0]
    rows = [[0, 1, 2, 3]] * 199
    y = int(first.output_ids[-1])
    outside = Support.from_rows([*rows, [i for i in range(4) if i != y]])
    _, report = replayed([replace(first, support=outside), *rollouts[1:]], policy)
    assert report.numbers["sampled_outside_support"] == 1
    assert report.numbers["log_ratio_abs"]["mean"] == pytest.approx(0.0160, abs=3e-4)
    assert (report.verdict, [d.code for d in report.diagnoses]) == (
        "inconsistent",
        ["sampled_outside_support"],
    )


def test_ids_are_replayed_as_sampled_whatever_their_text_encodes_to() -> None:
    """Ids 0, 1 read "ab", which a tokenizer with the token "ab" would encode as id 2."""
    policy = make_policy(3)
    supports = [[0, 2], [1, 2]]
    rollout = replace(sampled_from(policy, supports, [0, 1], "0"), output_text="ab")
    verified, report = replayed([rollout], policy)
    assert verified.tokens.token_id.tolist() == [0, 1]
    assert report.numbers["log_ratio_abs"]["max"] < 1e-6

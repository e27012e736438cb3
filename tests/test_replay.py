"""verify, report and verdict on hand-made runs: seed one fault, find that one."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from builders import make_rollout

from replay import GatesConfig, Policy, ReplayConfig, Verified, make_report, replay_run, verify
from replay.metrics import ratio_numbers
from replay.report import Gate, measure
from rollout import errors
from rollout.record import Rollout
from rollout.support import Support
from rollout.writer import RunWriter

FP32 = ReplayConfig(dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def policy(tiny_model_path: Path) -> Policy:
    return Policy.load(str(tiny_model_path), dtype="float32", device="cpu")


def honest(policy: Policy, name: str, temperature: float = 0.7, length: int = 12) -> Rollout:
    """What a perfect engine with top_k 8 would have recorded, computed the slow way."""
    generator = np.random.default_rng(int(name))
    sequence, rows, selected, full, per_id = [0, 20, 30], [], [], [], []
    for _ in range(length):
        hidden = policy.hidden(torch.tensor(sequence), torch.arange(len(sequence)))[-1]
        z = (hidden.double() @ policy.weight.double().T) / temperature
        ids = z.topk(8).indices
        logprobs = z[ids].log_softmax(0)
        choice = generator.choice(8, p=logprobs.exp().numpy())
        rows.append(ids.tolist())
        per_id += logprobs.tolist()
        selected.append(logprobs[choice].item())
        full.append(z.log_softmax(0)[ids[choice]].item())
        sequence.append(int(ids[choice]))
    return make_rollout(
        name,
        prompt_ids=np.array(sequence[:3], np.int32),
        output_ids=np.array(sequence[3:], np.int32),
        loss_mask=np.ones(length, np.int8),
        support=Support.from_rows(rows),
        sampling_logprobs=np.array(selected, np.float32),
        full_logprobs=np.array(full, np.float32),
        support_logprobs=np.array(per_id, np.float32),
        temperature=temperature,
        top_p=1.0,
        top_k=8,
        max_new_tokens=length,
        weight_versions=(),
    )


@pytest.fixture(scope="module")
def rollouts(policy: Policy) -> list[Rollout]:
    return [honest(policy, str(i)) for i in range(4)]


def summary(rollouts: list[Rollout], policy: Policy, config: ReplayConfig = FP32) -> dict[str, Any]:
    return make_report(verify(rollouts, policy, config), config.gates, {}).as_dict()


def test_an_honest_run_is_consistent(rollouts: list[Rollout], policy: Policy) -> None:
    got = summary(rollouts, policy)
    assert (got["verdict"], got["findings"], got["failed_gates"]) == ("consistent", [], [])
    assert got["log_ratio_abs"]["max"] <= 1e-4
    assert got["support_kl"] == pytest.approx(0, abs=1e-6)
    assert got["scored_tokens"] == got["tokens"] == 48
    assert got["kept_mass"] == pytest.approx(got["replay_kept_mass"], abs=1e-5)


def test_without_the_support_the_bias_is_the_log_of_the_kept_mass(
    rollouts: list[Rollout], policy: Policy
) -> None:
    got = summary(rollouts, policy)
    kept = np.concatenate([r.kept_mass for r in rollouts if r.kept_mass is not None])
    assert got["without_support"]["log_ratio"]["mean"] == pytest.approx(
        np.log(kept).mean(), abs=1e-5
    )
    assert got["without_support"]["log_ratio"]["mean"] < -0.05


@pytest.mark.parametrize("max_tokens", [1, 20, 4096], ids=str)
def test_packing_does_not_change_the_numbers(
    rollouts: list[Rollout], policy: Policy, max_tokens: int
) -> None:
    got = summary(rollouts, policy, FP32.model_copy(update={"max_tokens": max_tokens}))
    assert got["log_ratio_abs"]["max"] <= 1e-4


def test_another_temperature_than_sampled_is_inconsistent(
    rollouts: list[Rollout], policy: Policy
) -> None:
    got = summary([replace(r, temperature=1.0) for r in rollouts], policy)
    assert got["verdict"] == "inconsistent"
    assert set(got["failed_gates"]) >= {"log_ratio_abs_mean", "mismatch_kl", "support_kl"}


def test_other_weights_are_inconsistent(rollouts: list[Rollout], policy: Policy) -> None:
    noise = 1 + 0.3 * torch.randn(policy.weight.shape, generator=torch.Generator().manual_seed(0))
    got = summary(rollouts, replace(policy, weight=policy.weight * noise))
    assert got["verdict"] == "inconsistent"
    assert "log_ratio_abs_mean" in got["failed_gates"]


def changed(rollout: Rollout, position: int, **arrays: Any) -> Rollout:
    """`rollout` with one entry of each named array replaced."""
    copies = {name: getattr(rollout, name).copy() for name in arrays}
    for name, value in arrays.items():
        copies[name][position] = value
    return replace(rollout, **copies)


def outside(rollout: Rollout, position: int) -> Rollout:
    """Move the sampled token's place in its support to another id."""
    ids = rollout.support.ids.copy()
    row = slice(*rollout.support.offsets[[position, position + 1]])
    unused = next(i for i in range(1000, 0, -1) if i not in ids[row])
    ids[row][ids[row] == rollout.output_ids[position]] = unused
    return replace(rollout, support=Support(ids, rollout.support.offsets))


def test_a_sampled_token_outside_its_support_is_a_finding_not_a_number(
    rollouts: list[Rollout], policy: Policy
) -> None:
    got = summary([outside(rollouts[0], 5), *rollouts[1:]], policy)
    assert got["verdict"] == "inconsistent"
    (finding,) = got["findings"]
    assert (finding["code"], finding["count"], finding["rollouts"]) == (
        "sampled_outside_support",
        1,
        1,
    )
    assert "0:0: output token 5" in finding["first"]
    assert (got["sampled_outside_support"], got["scored_tokens"], got["tokens"]) == (1, 47, 48)
    assert got["log_ratio_abs"]["max"] <= 1e-4, "the other tokens are judged without it"
    assert got["failed_gates"] == []


def test_an_id_outside_the_vocabulary_is_a_finding_and_its_rollout_is_not_run(
    rollouts: list[Rollout], policy: Policy
) -> None:
    bad = changed(rollouts[0], 1, prompt_ids=policy.vocab_size)
    got = summary([bad, *rollouts[1:]], policy)
    assert [f["code"] for f in got["findings"]] == ["id_outside_vocabulary"]
    assert (got["tokens"], got["scored_tokens"]) == (48, 36)


def test_a_logprob_that_is_no_number_is_left_out_of_every_mean(
    rollouts: list[Rollout], policy: Policy
) -> None:
    verified = verify([changed(rollouts[0], 3, sampling_logprobs=np.nan)], policy, FP32)
    codes = {finding.code for finding in verified.findings}
    assert "nonfinite_logprob" in codes
    assert measure(verified)["scored_tokens"] == 11
    assert measure(verified)["log_ratio_abs"]["max"] <= 1e-4


def test_a_policy_that_gives_no_number_is_a_finding_not_a_pass(
    rollouts: list[Rollout], policy: Policy
) -> None:
    weight = policy.weight.clone()
    weight[int(rollouts[0].output_ids[4])] = torch.nan
    got = summary(rollouts, replace(policy, weight=weight))
    assert got["verdict"] == "inconsistent"
    (finding,) = got["findings"]
    assert finding["code"] == "nonfinite_replay"
    assert finding["count"] == got["tokens"] - got["scored_tokens"] > 0


def test_what_was_not_recorded_is_not_measured(rollouts: list[Rollout], policy: Policy) -> None:
    bare = [replace(r, full_logprobs=None, support_logprobs=None) for r in rollouts]
    got = summary(bare, policy)
    assert (got["support_kl"], got["kept_mass"]) == (None, None)
    assert got["replay_kept_mass"] is not None
    assert got["gates"]["support_kl"] == {"value": None, "limit": 0.005}
    assert got["verdict"] == "consistent"


def test_forced_tokens_condition_what_follows_and_are_not_scored(
    rollouts: list[Rollout], policy: Policy
) -> None:
    r = rollouts[0]
    rows = [[] if t == 4 else r.support[t].tolist() for t in range(len(r.support))]
    keep = r.support.rows != 4
    forced = replace(
        changed(r, 4, loss_mask=0, sampling_logprobs=0.0),
        support=Support.from_rows(rows),
        support_logprobs=r.support_logprobs[keep] if r.support_logprobs is not None else None,
    )
    verified = verify([forced], policy, FP32)
    assert verified.findings == ()
    assert 4 not in verified.tokens.position.tolist()
    assert measure(verified)["log_ratio_abs"]["max"] <= 1e-4


def test_drift_is_measured_and_one_wild_token_does_not_hide() -> None:
    """10,000 tokens with N(0, 0.02) noise: values computed independently."""
    noise = np.random.default_rng(0).normal(0, 0.02, 10_000).astype(np.float32)
    numbers = ratio_numbers(noise)
    assert numbers["log_ratio_abs"]["mean"] == pytest.approx(0.0160, abs=3e-4)
    assert numbers["log_ratio_abs"]["p99"] == pytest.approx(0.0515, abs=1.5e-3)
    noise[77] = 3.0
    assert ratio_numbers(noise)["log_ratio_abs"]["max"] == 3.0


@pytest.mark.parametrize(
    ("log_ratios", "kl", "share"),
    [
        pytest.param([0.0, 0.0], 0.0, 0.0, id="equal"),
        pytest.param([math.log(2.0)], 2 - math.log(2) - 1, 1.0, id="ratio 2"),
        pytest.param([math.log(0.5), 0.0], (0.5 + math.log(2) - 1) / 2, 0.5, id="ratio 0.5"),
    ],
)
def test_mismatch_kl_and_ratio_outside(log_ratios: list[float], kl: float, share: float) -> None:
    got = ratio_numbers(np.array(log_ratios, np.float32))
    assert got["mismatch_kl"] == pytest.approx(kl, abs=1e-7)
    assert got["ratio_outside"] == share


@pytest.mark.parametrize(
    ("value", "passed"),
    [(0.1, True), (0.1000001, False), (None, True), (math.nan, False)],
    ids=["at the limit", "above", "not measured", "NaN"],
)
def test_gates(value: float | None, passed: bool) -> None:
    assert Gate("g", value, 0.1).passed is passed


def test_nothing_scored_is_told_as_nothing(rollouts: list[Rollout], policy: Policy) -> None:
    bad = changed(rollouts[0], 0, prompt_ids=-1)
    got = summary([bad], policy)
    assert (got["scored_tokens"], got["log_ratio_abs"]["mean"]) == (0, None)
    assert got["verdict"] == "inconsistent"


def store(path: Path, rollouts: list[Rollout]) -> Path:
    with RunWriter(path, {}) as writer:
        for rollout in rollouts:
            writer.write(rollout)
    return path


def test_a_run_is_replayed_from_disk_into_a_report(
    tmp_path: Path, rollouts: list[Rollout], tiny_model_path: Path
) -> None:
    store(tmp_path, rollouts)
    heard: list[tuple[int, int, int]] = []
    report, folder = replay_run(
        tmp_path, str(tiny_model_path), FP32, lambda *progress: heard.append(progress)
    )
    assert heard[-1] == (4, 4, 48)
    written = json.loads((folder / "summary.json").read_text())
    assert folder.parent == tmp_path / "reports"
    assert written | report.as_dict() == written
    assert written["precision"] == {
        "model": str(tiny_model_path),
        "dtype": "float32",
        "device": "cpu",
        "head_dtype": "float32",
    }
    with pa.memory_map(str(folder / "tokens.arrow")) as source:
        table = pa.ipc.open_stream(source).read_all()
    assert table.num_rows == 48
    assert table["rollout_id"].to_pylist()[::12] == ["0:0", "1:0", "2:0", "3:0"]
    gap = table["replay_logprobs"].to_numpy() - table["sampling_logprobs"].to_numpy()
    assert np.abs(gap).max() == pytest.approx(written["log_ratio_abs"]["max"])
    assert set(table["finding"].to_pylist()) == {"ok"}


def test_an_empty_run_is_not_consistent(tmp_path: Path, tiny_model_path: Path) -> None:
    with pytest.raises(errors.NotARun, match="nothing to replay"):
        replay_run(store(tmp_path, []), str(tiny_model_path), FP32)


def test_gates_can_be_set(rollouts: list[Rollout], policy: Policy) -> None:
    verified: Verified = verify(rollouts, policy, FP32)
    tight = GatesConfig(log_ratio_abs_mean=0.0)
    report = make_report(verified, tight, {})
    assert [gate.name for gate in report.failed_gates] == ["log_ratio_abs_mean"]

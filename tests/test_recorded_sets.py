"""Replies of three real servers, replayed with the same weights: the reference figures hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from builders import RECORDED, recorded_lines, write_lines

from replay import Policy, ReplayConfig, make_report, verify
from replay.report import Report
from rollout.adapters.sglang_jsonl import import_sglang_jsonl
from rollout.reader import open_run

pytestmark = pytest.mark.smollm2

# (mean |log_ratio|, mismatch_kl) of the bf16 engines, measured once with transformers
FIGURES = {
    ("bfloat16", "bfloat16"): {
        "sglang_0.5.23_cpu_pytorch": (0.0386, 2.0e-3),
        "sglang_0.5.21_h200_pytorch": (0.0391, 2.1e-3),
        "sglang_0.5.21_h200_flashinfer": (0.0378, 2.0e-3),
    },
    ("bfloat16", "float32"): {
        "sglang_0.5.23_cpu_pytorch": (0.0351, 1.6e-3),
        "sglang_0.5.21_h200_pytorch": (0.0351, 1.7e-3),
        "sglang_0.5.21_h200_flashinfer": (0.0339, 1.5e-3),
    },
    ("float32", "float32"): {
        "sglang_0.5.23_cpu_pytorch": (0.0290, 1.1e-3),
        "sglang_0.5.21_h200_pytorch": (0.0299, 1.2e-3),
        "sglang_0.5.21_h200_flashinfer": (0.0279, 1.0e-3),
    },
}


@pytest.fixture(scope="module")
def policies(smollm2_path: Path) -> dict[str, Policy]:
    return {
        dtype: Policy.load(str(smollm2_path), dtype=dtype, device="cpu")
        for dtype in ("bfloat16", "float32")
    }


@pytest.fixture
def policy(policies: dict[str, Policy]) -> Policy:
    return policies["bfloat16"]


def replayed(run: Path, policy: Policy, head_dtype: str = "float32") -> Report:
    config = ReplayConfig(device="cpu", head_dtype=head_dtype)
    return make_report(verify(open_run(run), policy, config), config.gates, {})


@pytest.mark.parametrize(("dtype", "head_dtype"), list(FIGURES))
@pytest.mark.parametrize("name", RECORDED)
def test_reference_figures(
    name: str, dtype: str, head_dtype: str, policies: dict[str, Policy], tmp_path: Path
) -> None:
    policy = policies[dtype]
    mean, mismatch_kl = FIGURES[dtype, head_dtype][name]
    file = write_lines(tmp_path / "dump.jsonl", recorded_lines(name))
    assert import_sglang_jsonl(file, tmp_path / "run", vocab_size=policy.vocab_size).rejected == {}
    report = replayed(tmp_path / "run", policy, head_dtype)
    assert report.verdict == "consistent"
    assert report.numbers["log_ratio_abs"]["mean"] == pytest.approx(mean, rel=0.15)
    assert report.numbers["mismatch_kl"] == pytest.approx(mismatch_kl, rel=0.15)
    assert -0.13 < report.numbers["without_support"]["log_ratio"]["mean"] < -0.09


def test_a_temperature_other_than_sampled_is_inconsistent(policy: Policy, tmp_path: Path) -> None:
    lines = [r for r in recorded_lines(RECORDED[2]) if r["sampling_params"]["temperature"] == 1.0]
    for line in lines:
        line["sampling_params"]["temperature"] = 0.8
    import_sglang_jsonl(write_lines(tmp_path / "d.jsonl", lines), tmp_path / "run")
    report = replayed(tmp_path / "run", policy)
    assert report.verdict == "inconsistent"
    assert {gate.name for gate in report.failed_gates} >= {"mismatch_kl", "support_kl"}


def test_perturbed_weights_are_inconsistent(policy: Policy, tmp_path: Path) -> None:
    """W·(1 + 0.05·N(0,1)) in every matrix of the policy."""
    import_sglang_jsonl(
        write_lines(tmp_path / "d.jsonl", recorded_lines(RECORDED[2])), tmp_path / "run"
    )
    generator = torch.Generator().manual_seed(0)
    kept = {name: weight.clone() for name, weight in policy.body.named_parameters()}
    with torch.no_grad():
        for weight in policy.body.parameters():
            if weight.ndim == 2:
                noise = torch.randn(weight.shape, generator=generator)
                weight.mul_(1 + 0.05 * noise)
    try:
        report = replayed(tmp_path / "run", policy)
    finally:
        with torch.no_grad():
            for name, weight in policy.body.named_parameters():
                weight.copy_(kept[name])
    assert report.verdict == "inconsistent"
    assert {gate.name for gate in report.failed_gates} >= {"log_ratio_abs_mean", "mismatch_kl"}

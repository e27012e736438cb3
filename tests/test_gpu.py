"""On a CUDA device: the same scores, the same verdicts, the same rollouts as on the CPU."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay import Policy, ReplayConfig, batches, make_report, score_full, score_support, verify
from rollout import RunWriter, open_run
from rollout.collect import Request, collect
from rollout.config import EmbeddedConfig
from rollout.prompts import Prompt
from rollout.record import Rollout
from rollout.sampling import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def problem(num_tokens: int, vocab_size: int, dim: int) -> dict[str, Any]:
    """Ragged supports of 1 to 300 ids in float64, on the CPU."""
    generator = torch.Generator().manual_seed(num_tokens)
    sizes = torch.randint(1, min(300, vocab_size) + 1, (num_tokens,), generator=generator)
    rows = [torch.randperm(vocab_size, generator=generator)[:size] for size in sizes.tolist()]
    return {
        "hidden": torch.randn(num_tokens, dim, generator=generator, dtype=torch.float64),
        "weight": torch.randn(vocab_size, dim, generator=generator, dtype=torch.float64) / dim**0.5,
        "targets": torch.stack([row[-1] for row in rows]),
        "support_ids": torch.cat(rows),
        "support_offsets": torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]),
    }


def on_gpu(p: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {k: v.to("cuda", dtype if v.is_floating_point() else v.dtype) for k, v in p.items()}


@pytest.mark.parametrize(("num_tokens", "vocab_size", "dim"), [(1, 2, 1), (255, 5003, 321)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_equal_float64_on_the_same_inputs(
    num_tokens: int, vocab_size: int, dim: int, dtype: torch.dtype
) -> None:
    p = problem(num_tokens, vocab_size, dim)
    p |= {k: v.to(dtype).double() for k, v in p.items() if v.is_floating_point()}
    got = score_support(**on_gpu(p, dtype), return_logsumexp=True)
    wanted = score_support(**p, return_logsumexp=True)
    for name in ("logprob", "entropy", "logsumexp"):
        gap = getattr(got, name).cpu().double() - getattr(wanted, name)
        assert gap.abs().max() < 1e-4, name
    dense = {k: v for k, v in p.items() if not k.startswith("support")}
    full = score_full(**on_gpu(dense, dtype)).logprob.cpu().double()
    assert (full - score_full(**dense).logprob).abs().max() < 1e-4


def test_two_runs_agree_bitwise() -> None:
    p = on_gpu(problem(255, 5003, 321), torch.bfloat16)
    first, second = score_support(**p), score_support(**p)
    assert torch.equal(first.logprob, second.logprob)
    assert torch.equal(first.entropy, second.entropy)


@pytest.fixture(scope="module")
def rollouts(tiny_model_path: Path) -> list[Rollout]:
    from rollout.engines.embedded import EmbeddedEngine

    async def sample() -> list[Rollout]:
        config = EmbeddedConfig(dtype="float32", device="cuda")
        requests = [
            Request(Prompt(str(i), np.array([0, 40 + i], np.int32), ""), 0) for i in range(8)
        ]
        params = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, max_new_tokens=24)
        async with EmbeddedEngine(str(tiny_model_path), config) as engine:
            return [r async for r in collect(engine, requests, params, seed=0)]

    return asyncio.run(sample())


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_the_gpu_sampled_replays_on_either_device(
    rollouts: list[Rollout], tiny_model_path: Path, device: str
) -> None:
    policy = Policy.load(str(tiny_model_path), dtype="float32", device=device)
    config = ReplayConfig(dtype="float32", device=device)
    report = make_report(verify(rollouts, policy, config), config.gates, {})
    assert (report.verdict, len(rollouts)) == ("consistent", 8)
    assert report.numbers["log_ratio_abs"]["max"] <= 1e-4


def test_batches_are_pinned_and_arrive_as_they_were(
    tmp_path: Path, rollouts: list[Rollout]
) -> None:
    with RunWriter(tmp_path, {}) as writer:
        for rollout in rollouts:
            writer.write(rollout)
    run = open_run(tmp_path)
    for layout in ("packed", "padded"):
        for batch in batches(run, 100, shuffle_seed=0, layout=layout):
            moved = vars(batch.to("cuda", non_blocking=True))
            torch.cuda.synchronize()
            for name, tensor in vars(batch).items():
                if torch.is_tensor(tensor):
                    assert tensor.is_pinned(), name
                    assert torch.equal(moved[name].cpu(), tensor), name

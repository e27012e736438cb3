"""A real SGLang server: collect from it, replay, judge."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from builders import make_prompt
from click.testing import CliRunner

from cli.main import cli
from rollout.engines.sglang import SGLangEngine
from rollout.errors import IdOutsideVocabulary
from rollout.reader import open_run
from rollout.sampling import SamplingParams

pytestmark = [pytest.mark.smollm2, pytest.mark.sglang]

ROOT = Path(__file__).parent.parent
VOCAB_SIZE = 49152


def invoke(*arguments: str) -> Any:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def collect(url: str, model: Path, out: Path, *overrides: str) -> dict[str, Any]:
    settings = [
        f"model={model}",
        f"engine.url={url}",
        "prompts.rollouts_per_prompt=1",
        "sampling.max_new_tokens=32",
        *overrides,
    ]
    options = [word for setting in settings for word in ("-o", setting)]
    stats: dict[str, Any] = invoke(
        "collect", str(ROOT / "configs" / "sglang.yaml"), "--out", str(out), "--json", *options
    )
    return stats


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param((1.0, 50, 0.95), id="T 1.0, top_k 50, top_p 0.95"),
        pytest.param((0.7, 20, 0.9), id="T 0.7, top_k 20, top_p 0.9"),
    ],
)
def test_what_sglang_sampled_is_consistent_with_transformers(
    sglang_url: str,
    smollm2_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    setting: tuple[float, int, float],
) -> None:
    monkeypatch.chdir(ROOT)
    temperature, top_k, top_p = setting
    stats = collect(
        sglang_url,
        smollm2_path,
        tmp_path / "run",
        "prompts.limit=18",
        f"sampling.temperature={temperature}",
        f"sampling.top_k={top_k}",
        f"sampling.top_p={top_p}",
    )
    assert (stats["rollouts"], stats["failed"], stats["rejected"]) == (18, {}, {})
    summary = invoke("replay", str(tmp_path / "run"), "--model", str(smollm2_path), "--json")
    assert (summary["verdict"], summary["findings"]) == ("consistent", [])
    assert summary["log_ratio_abs"]["mean"] <= 0.06
    assert summary["mismatch_kl"] <= 5e-3
    assert summary["support_kl"] <= 5e-3
    assert summary["without_support"]["log_ratio"]["mean"] < -0.04
    meta = json.loads(next(iter(open_run(tmp_path / "run"))).engine_meta)
    assert meta == {
        "engine": "sglang",
        "version": "0.5.23",
        "sampling_backend": "pytorch",
        "filter_order": "joint",
        "tie_policy": "cut",
        "fp32_head": False,
        "deterministic": False,
        "support_source": "captured",
        "endpoint": sglang_url,
    }


def test_greedy_is_recorded_as_singletons(
    sglang_url: str, smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    collect(sglang_url, smollm2_path, tmp_path / "run", "prompts.limit=2", "sampling.temperature=0")
    for rollout in open_run(tmp_path / "run"):
        assert (rollout.temperature, rollout.top_k) == (1.0, 1)
        assert set(rollout.support.counts.tolist()) == {1}
        assert set(rollout.sampling_logprobs.tolist()) == {0.0}


def test_the_server_survives_what_the_engine_refuses(sglang_url: str) -> None:
    params = SamplingParams(temperature=0.0, max_new_tokens=2)

    async def ask() -> Any:
        async with SGLangEngine(sglang_url, vocab_size=VOCAB_SIZE) as engine:
            with pytest.raises(IdOutsideVocabulary):
                await engine.generate(make_prompt(1, VOCAB_SIZE), params)
            return await engine.generate(make_prompt(1, 5), params)

    completion = asyncio.run(ask())
    assert completion.finish_reason == "length" and len(completion.output_ids) == 2
    assert [span.version for span in completion.weight_versions] == ["default"]

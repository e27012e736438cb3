"""A real SGLang server: collect from it by both endpoints, replay, judge."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import make_prompt
from live import VOCAB_SIZE, collect_mixed, collect_run, replay_run, requests

from rollout.engines.sglang.engine import SGLangEngine
from rollout.errors import IdOutsideVocabulary
from rollout.reader import open_run
from rollout.sampling import SamplingParams

pytestmark = [pytest.mark.smollm2, pytest.mark.sglang]


@pytest.mark.parametrize(
    ("setting", "route"),
    [
        pytest.param((1.0, 50, 0.95), "generate", id="T 1.0, top_k 50, top_p 0.95"),
        pytest.param((0.7, 20, 0.9), "generate", id="T 0.7, top_k 20, top_p 0.9"),
        pytest.param((1.0, 50, 0.95), "chat", id="by chat"),
    ],
)
def test_what_sglang_sampled_is_consistent_with_transformers(
    sglang_url: str,
    smollm2_path: Path,
    tmp_path: Path,
    setting: tuple[float, int, float],
    route: str,
) -> None:
    temperature, top_k, top_p = setting
    stats = collect_run(
        sglang_url,
        smollm2_path,
        tmp_path / "run",
        "prompts.limit=18",
        f"engine.route={route}",
        f"sampling.temperature={temperature}",
        f"sampling.top_k={top_k}",
        f"sampling.top_p={top_p}",
    )
    assert (stats["rollouts"], stats["last_command"]["prompts_differ"]) == (18, 0)
    summary = replay_run(tmp_path / "run", smollm2_path)
    assert summary["findings"] == []
    assert summary["log_ratio_abs"]["mean"] <= 0.06
    assert summary["mismatch_kl"] <= 5e-3
    assert summary["support_kl"] <= 5e-3
    assert summary["without_support"]["log_ratio"]["mean"] < -0.04
    rollout = next(iter(open_run(tmp_path / "run")))
    assert rollout.full_logprobs is not None and rollout.support_logprobs is not None
    assert json.loads(rollout.engine_meta) == {
        "engine": "sglang",
        "version": "0.5.23",
        "sampling_backend": "pytorch",
        "filter_order": "joint",
        "tie_policy": "cut",
        "fp32_head": False,
        "deterministic": False,
        "support_source": "captured",
        "endpoint": sglang_url,
        "route": route,
    }


def test_a_live_run_is_clean_in_the_precision_of_either_side(
    sglang_url: str, smollm2_path: Path, tmp_path: Path
) -> None:
    limits = ("prompts.limit=8", "sampling.temperature=0.8", "sampling.top_k=40")
    collect_run(sglang_url, smollm2_path, tmp_path / "run", *limits)
    for dtype in ("bfloat16", "float32"):
        summary = replay_run(tmp_path / "run", smollm2_path, flags=["--dtype", dtype])
        assert [d["code"] for d in summary["diagnoses"]] == ["clean"], summary["diagnoses"]


def test_chat_arguments_reach_the_servers_template(
    sglang_url: str, smollm2_path: Path, tmp_path: Path
) -> None:
    """Tools are rendered by the server as by us, or it is told; here, no template knows them."""
    cities = ("Rome", "Oslo", "Cairo", "Quito", "Hanoi", "Perth")
    rows = [{"prompt": f"Weather in {c}?", "tools": json.dumps([WEATHER])} for c in cities]
    dataset = tmp_path / "rows.jsonl"
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stats = collect_run(
        sglang_url,
        smollm2_path,
        tmp_path / "run",
        "engine.route=chat",
        f"prompts.dataset={dataset}",
        "sampling.top_k=50",
        "prompts.tools=tools",
        "prompts.template_kwargs={enable_thinking: false}",
    )
    assert stats["last_command"]["prompts_differ"] == 0
    replay_run(tmp_path / "run", smollm2_path)


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def test_settings_of_every_kind_in_one_batch_replay_together(
    sglang_url: str, smollm2_path: Path, tmp_path: Path
) -> None:
    settings: list[dict[str, Any]] = [
        {"temperature": 1.0, "top_k": 50, "top_p": 0.95},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 200},
        {"temperature": 1.0, "top_k": 50, "min_p": 0.1},
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 40, "regex": "[0-9]{4,8}"},
    ]
    wanted = [
        (request, SamplingParams(max_new_tokens=24, **settings[i % len(settings)]))
        for i, request in enumerate(requests(smollm2_path, 18))
    ]
    rollouts = collect_mixed(sglang_url, wanted, tmp_path / "run")
    greedy = [r for r in rollouts if r.top_k == 1]
    assert len(greedy) == 3
    for rollout in greedy:
        assert rollout.temperature == 1.0
        assert set(rollout.support.counts.tolist()) == {1}
        assert set(rollout.sampling_logprobs.tolist()) == {0.0}
    summary = replay_run(tmp_path / "run", smollm2_path)
    assert summary["rollouts"] == 18


@pytest.mark.parametrize("route", ["generate", "chat"])
def test_a_grammar_replays_exactly(
    sglang_url: str, smollm2_path: Path, tmp_path: Path, route: str
) -> None:
    """Most of the mass may be forbidden: only over the support do both sides agree."""
    collect_run(
        sglang_url,
        smollm2_path,
        tmp_path / "run",
        "prompts.limit=6",
        f"engine.route={route}",
        "sampling.top_k=50",
        "sampling.regex='[0-9]{3,8}'",
    )
    for rollout in open_run(tmp_path / "run"):
        assert rollout.output_text is not None and re.fullmatch("[0-9]{3,8}", rollout.output_text)
        assert json.loads(rollout.sampling_params)["regex"] == "[0-9]{3,8}"
    summary = replay_run(tmp_path / "run", smollm2_path)
    assert summary["without_support"]["log_ratio"]["mean"] < -1.0


def test_banned_tokens_and_a_least_length_replay_exactly(
    sglang_url: str, smollm2_path: Path, tmp_path: Path
) -> None:
    banned = list(range(200, 1200))  # with many of the likeliest words
    collect_run(
        sglang_url,
        smollm2_path,
        tmp_path / "run",
        "prompts.limit=6",
        "sampling.top_k=50",
        "sampling.min_new_tokens=32",
        f"sampling.disallowed_token_ids={banned}",
    )
    for rollout in open_run(tmp_path / "run"):
        assert rollout.num_output_tokens == 32
        assert not np.isin(rollout.support.ids, banned).any()
        assert json.loads(rollout.sampling_params)["custom_params"] == {"token_ids": banned}
    summary = replay_run(tmp_path / "run", smollm2_path)
    assert summary["without_support"]["log_ratio"]["mean"] < -0.2


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

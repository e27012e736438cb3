"""`rollout collect` from a vLLM server, on constructed replies and on those of a real sampler."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from builders import make_prompt, write_lines
from chaos import running
from test_cli import run
from vllm_server import Asked, reply, server, spoiled

from rollout import errors, open_run
from rollout.config import CollectConfig, EmbeddedConfig
from rollout.engines.embedded import EmbeddedEngine
from rollout.files import read_lines
from rollout.sampling import SamplingParams


def config_file(folder: Path, model: Path, url: str) -> Path:
    prompts = write_lines(folder / "p.jsonl", [{"prompt": w} for w in ("The", "An", "if", "A")])
    path = folder / "c.yaml"
    path.write_text(
        f"model: {model}\n"
        f"prompts: {{dataset: {prompts}, format: text}}\n"
        "sampling: {temperature: 0.7, top_k: 20, top_p: 0.9, max_new_tokens: 8}\n"
        f"engine: {{kind: vllm, url: '{url}'}}\n"
    )
    return path


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["collect", "dry run"])
def test_without_masks_collect_exits_4_and_names_the_flag(
    tmp_path: Path, tiny_model_path: Path, dry: list[str]
) -> None:
    with running(server(spoiled(sampling_mask=None))) as (url, _):
        out = tmp_path / "run"
        result = run("collect", config_file(tmp_path, tiny_model_path, url), "--out", out, *dry)
    assert result.exit_code == 4
    assert "start the server with --return-sampling-mask" in result.stderr
    assert not out.exists()


def test_single_weight_version_is_refused() -> None:
    with pytest.raises(errors.ConfigError, match="single_weight_version: a vLLM server does not"):
        CollectConfig.load(
            Path(__file__).parents[2] / "configs" / "vllm.yaml", ["single_weight_version=true"]
        )


@asynccontextmanager
async def embedded_as_vllm(model: Path) -> AsyncIterator[tuple[str, list[Asked]]]:
    """A vLLM whose sampler is the embedded engine: honest numbers on the documented wire."""
    async with EmbeddedEngine(str(model), EmbeddedConfig()) as engine:

        async def answer(asked: Asked) -> dict[str, Any]:
            sent = asked["sampling_params"]
            params = SamplingParams(
                temperature=sent["temperature"],
                top_k=sent["top_k"],
                top_p=sent["top_p"],
                max_new_tokens=sent["max_tokens"],
                sampling_seed=sent.get("seed"),
                ignore_eos=sent["ignore_eos"],
            )
            got = await engine.generate(make_prompt(*asked["token_ids"]), params)
            mask = [got.support[t].tolist() for t in range(len(got.support))]
            logprobs: list[float | None] = got.sampling_logprobs.tolist()
            return reply(asked, got.output_ids.tolist(), mask, logprobs, got.finish_reason)

        async with server(answer) as found:
            yield found


def test_what_is_collected_replays_to_what_the_sampler_did(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    out = tmp_path / "run"
    with running(embedded_as_vllm(tiny_model_path)) as (url, _):
        config = config_file(tmp_path, tiny_model_path, url)
        result = run("collect", config, "--out", out)
        assert result.exit_code == 0, result.output + result.stderr
    rollouts = list(open_run(out))
    assert len(rollouts) == 4
    assert json.loads((out / "run.json").read_text())["engine"]["name"] == "vllm"
    assert list(read_lines(out / "rejected.jsonl")) == []
    replayed = run("replay", out, "--model", tiny_model_path, "--dtype", "float32", "--json")
    assert replayed.exit_code == 0, replayed.output
    summary = json.loads(replayed.stdout)
    assert summary["verdict"] == "consistent"
    assert summary["log_ratio_abs"]["max"] <= 1e-4
    assert summary["scored_tokens"] == sum(r.num_output_tokens for r in rollouts)

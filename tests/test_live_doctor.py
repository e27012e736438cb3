"""`rollout doctor` on real processes: SGLang, and the same server behind two routers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from live import collect_run

from cli.main import cli

pytestmark = [pytest.mark.smollm2, pytest.mark.sglang]

OF_THE_SERVER = {
    "version": "0.5.23",
    "sampler": "pytorch",
    "top_k": "at most 4096",
    "speculative decoding": "off",
    "deterministic": "off",
    "custom logit processors": "on",
    "weight version": "default",
    "mask on /generate": "yes",
    "mask on /v1/chat/completions": "yes",
    "support logprobs": "of every id of the support",
    "full logprobs": "after temperature",
    "sampling_params": "arrive",
    "seeds": "ignored",
}


@cache  # asking a server on the CPU takes its time
def doctor(url: str) -> tuple[int, dict[str, Any], dict[str, str], str]:
    """Exit code, the JSON document, its probes as name and value, and the notes."""
    result = CliRunner().invoke(cli, ["doctor", url, "--json"])
    found = json.loads(result.stdout)
    values = {probe["name"]: probe["value"] for probe in found["probes"]}
    return result.exit_code, found, values, result.stderr


def test_a_real_server_can_be_collected_from(sglang_url: str, smollm2_path: Path) -> None:
    code, found, values, _ = doctor(sglang_url)
    assert values == OF_THE_SERVER | {"endpoint": "SGLang", "model": str(smollm2_path)}
    assert all(probe["ok"] for probe in found["probes"])
    assert (code, found["usable"]) == (0, True)
    assert found["config"] == {
        "engine": {"kind": "sglang", "url": sglang_url, "support_logprobs": True},
        "sampling": {"top_k": "auto"},
    }


def test_sglang_router_drops_the_mask_and_the_server_behind_it_is_named(
    sglang_router_url: str, sglang_url: str, smollm2_path: Path
) -> None:
    code, found, values, notes = doctor(sglang_router_url)
    dropped = {"mask on /generate", "mask on /v1/chat/completions"}
    assert {name for name, value in values.items() if value == "dropped"} == dropped
    assert (values["endpoint"], values["model"]) == ("sglang-router", str(smollm2_path))
    assert (values["version"], values["sampling_params"]) == ("unknown", "not all arrive")
    assert (code, found["usable"], found["config"]) == (4, False, None)
    assert found["reason"] == (
        "mask on /generate dropped: sglang-router drops return_sampling_mask; "
        f"ask the server behind sglang-router: rollout doctor {sglang_url}"
    )
    assert notes == f"not usable: {found['reason']}\n"


def test_smg_passes_the_mask_but_not_every_sampling_field(smg_url: str, smollm2_path: Path) -> None:
    _, _, values, _ = doctor(smg_url)
    assert values == OF_THE_SERVER | {
        "endpoint": "smg",
        "model": str(smollm2_path),
        "sampling_params": "not all arrive",
    }


def test_rollouts_can_be_collected_through_smg(
    smg_url: str, smollm2_path: Path, tmp_path: Path
) -> None:
    code, found, _, _ = doctor(smg_url)
    assert (code, found["usable"], found["config"]["engine"]["url"]) == (0, True, smg_url)
    for route in ("generate", "chat"):
        options = ("prompts.limit=2", "sampling.max_new_tokens=8", f"engine.route={route}")
        stats = collect_run(smg_url, smollm2_path, tmp_path / route, *options)
        assert (stats["rollouts"], stats["last_command"]["prompts_differ"]) == (2, 0)

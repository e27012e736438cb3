"""`rollout collect --dry-run`: the endpoints, one real rollout, nothing on the disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chaos import fake_reply, fake_server, running
from faults import Asked, settings_file
from test_cli import run


def without_mask(asked: Asked) -> Asked:
    reply = fake_reply(asked)
    del reply["meta_info"]["output_token_sampling_mask"]
    return reply


def test_a_dry_run_shows_the_endpoint_and_one_rollout_and_writes_nothing(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    with running(fake_server()) as server:
        settings = settings_file(tmp_path, tiny_model_path, server.url, 4)
        out = tmp_path / "run"
        before = sorted(tmp_path.rglob("*"))
        result = run("collect", settings, "--out", out, "--dry-run", "-o", "sampling.top_k=auto")
        as_json = run("collect", settings, "--out", out, "--dry-run", "--json", "-o", "seed=5")
    assert result.exit_code == 0, result.output
    assert "0.5.23" in result.stdout and "0:0" in result.stdout
    assert "note: top_k auto is 512 here" in result.stderr
    assert "nothing was written; next: rollout" in result.stderr
    found = json.loads(as_json.stdout)
    (endpoint,) = found["endpoints"]
    assert endpoint["usable"] and endpoint["url"] == server.url
    assert found["rollout"]["rollout_id"] == "0:0"
    assert found["rollout"]["output_tokens"] > 0
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_of_an_endpoint_without_masks_exits_4(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    with running(fake_server(without_mask, probe=without_mask)) as server:
        settings = settings_file(tmp_path, tiny_model_path, server.url, 4)
        result = run("collect", settings, "--dry-run", "--json")
    assert result.exit_code == 4, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert (found["endpoints"][0]["usable"], found["rollout"]) == (False, None)
    assert f"{server.url}: not usable: mask on /generate dropped" in result.stderr


def test_a_reply_that_breaks_a_rule_is_its_error(tmp_path: Path, tiny_model_path: Path) -> None:
    def outside(asked: Asked) -> Asked:
        reply = fake_reply(asked)
        if asked["sampling_params"].get("sampling_seed") is not None:  # not a question of doctor's
            reply["meta_info"]["output_token_sampling_logprobs"][0][0] = -5000.0
        return reply

    with running(fake_server(outside)) as server:
        settings = settings_file(tmp_path, tiny_model_path, server.url, 4)
        result = run("collect", settings, "--dry-run")
    assert result.exit_code == 3, result.output


@pytest.mark.parametrize("top_k", [40, -1])
def test_the_embedded_engine_has_no_endpoint_to_examine(
    tmp_path: Path, tiny_model_path: Path, top_k: int
) -> None:
    settings = settings_file(tmp_path, tiny_model_path, "none", 2, engine={"kind": "embedded"})
    result = run("collect", settings, "--dry-run", "--json", "-o", f"sampling.top_k={top_k}")
    if top_k < 0:
        assert result.exit_code == 2, "what a run would refuse, a dry run refuses"
        return
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["endpoints"] == [] and found["rollout"]["rollout_id"] == "0:0"

"""Who answers at a URL, and whether rollouts can be collected from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from endpoints import (
    HANG_UP,
    WIRE,
    Answer,
    chat_reply,
    examined,
    refused,
    reply,
    row,
)

from rollout import errors
from rollout.config import CollectConfig

ROOT = Path(__file__).parents[3]

ROUTER_PAGES = {
    "/get_server_info": {"router_manager": True, "routers_count": 1, "workers_count": 1},
    "/get_model_info": WIRE["get_model_info"]["response"],
    "/workers": {"workers": [{"url": "http://user:secret@10.0.0.1:30000"}]},
}


def through_typed_params(asked: dict[str, Any], mask: bool) -> dict[str, Any]:
    """What arrives behind a router that knows neither stop_regex nor, without `mask`, the mask."""
    params = asked["sampling_params"].copy()
    params.pop("stop_regex", None)
    return reply(
        asked | {"sampling_params": params} | ({} if mask else {"return_sampling_mask": 0})
    )


def test_sglang_router_is_named_with_the_server_to_ask_instead() -> None:
    found = examined(
        lambda asked: through_typed_params(asked, mask=False),
        chat=lambda asked: chat_reply(None, None),
        pages=ROUTER_PAGES,
    )
    assert row(found, "endpoint") == (
        "sglang-router",
        "a router in front of http://10.0.0.1:30000",
        True,
    )
    instead = (
        "sglang-router drops return_sampling_mask; ask the server behind sglang-router: "
        "rollout doctor http://10.0.0.1:30000"
    )
    assert row(found, "mask on /generate") == ("dropped", instead, False)
    assert row(found, "mask on /v1/chat/completions") == ("dropped", instead, False)
    assert row(found, "version") == (
        "unknown",
        "nothing of the server at /server_info or /get_server_info",
        None,
    )
    assert row(found, "model") == ("smollm2-135m-instruct", "", True)
    assert found.reason == f"mask on /generate dropped: {instead}"


def test_smg_passes_the_mask_and_drops_some_sampling_params() -> None:
    pages = ROUTER_PAGES | {
        "/get_server_info": WIRE["get_server_info"]["response"],
        "/workers": {"workers": [{"url": "http://10.0.0.1:1"}, {"url": "http://10.0.0.2:1"}]},
    }
    found = examined(
        lambda asked: through_typed_params(asked, mask=True),
        pages=pages,
        headers={"x-smg-routed-worker-id": "http://10.0.0.1:1"},
    )
    assert row(found, "endpoint") == (
        "smg",
        "a router in front of http://10.0.0.1:1, http://10.0.0.2:1; what follows is of one of them",
        True,
    )
    assert row(found, "version") == ("0.5.23", "", True)
    assert row(found, "mask on /generate")[0] == "yes"
    value, detail, ok = row(found, "sampling_params")
    assert (value, ok) == ("not all arrive", False)
    assert detail.startswith("smg drops stop_regex, and likely structural_tag, logit_bias")


def test_masks_are_no_use_where_an_engine_cannot_be_entered() -> None:
    found = examined(pages={"/workers": {"workers": [{"url": "http://10.0.0.1:1"}]}})
    assert row(found, "endpoint")[0] == "a router"
    assert not found.usable and found.config is None and found.as_yaml() == ""
    assert found.reason.startswith(
        "masks arrive, but rollouts cannot be collected: http://127.0.0.1"
    )
    assert found.reason.endswith("ask the server behind a router: rollout doctor http://10.0.0.1:1")


def test_a_router_whose_server_is_gone_keeps_its_words() -> None:
    gone = refused("error sending request for url (http://10.0.0.1:30000/generate)", 500)
    found = examined(gone, chat=gone, pages=ROUTER_PAGES)
    assert row(found, "mask on /generate")[::2] == ("failed", False)
    assert found.reason.startswith("mask on /generate failed: HTTP 500: error sending request")


def test_a_server_that_goes_away_meanwhile_is_unreachable() -> None:
    with pytest.raises(errors.EngineUnreachable, match="/v1/chat/completions: no answer"):
        examined(chat=lambda asked: HANG_UP)


def test_no_secret_is_shown() -> None:
    found = examined(lambda asked: through_typed_params(asked, mask=False), pages=ROUTER_PAGES)
    assert "secret" not in json.dumps(found.as_json())
    found = examined(api_key="sk-secret", admin_api_key="sk-secret")
    assert "secret" not in json.dumps(found.as_json()) + found.as_yaml()


def test_the_config_block_completes_a_config(tmp_path: Path) -> None:
    found = examined()
    settings = yaml.safe_load((ROOT / "configs" / "sglang.yaml").read_text())
    del settings["engine"], settings["sampling"]
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings) + found.as_yaml())
    loaded = CollectConfig.load(path)
    assert (loaded.engine.kind, loaded.sampling.top_k) == ("sglang", "auto")
    assert found.as_yaml().splitlines() == [
        "engine:",
        "  kind: sglang",
        f"  url: {found.url}",
        "  support_logprobs: true",
        "sampling:",
        "  top_k: auto  # 512 here",
    ]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        pytest.param(lambda asked: web.Response(status=404), "HTTP 404", id="404"),
        pytest.param(lambda asked: web.Response(text="<html>"), "HTTP 200", id="HTML"),
        pytest.param(lambda asked: {}, "HTTP 200", id="an empty object"),
    ],
)
def test_another_kind_of_server_is_refused(answer: Answer, words: str) -> None:
    with pytest.raises(errors.EngineRefused, match=f"not an SGLang server: .*{words}.*; give the"):
        examined(answer, pages={"/server_info": {}, "/v1/models": [1]})


def test_a_vllm_server_is_named_with_the_engine_that_collects_from_it() -> None:
    models = {"data": [{"id": "org/model", "owned_by": "vllm"}]}
    with pytest.raises(errors.EngineRefused, match="a vLLM server, .* engine.kind: vllm; rollout"):
        examined(lambda asked: web.Response(status=404), pages={"/v1/models": models})


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_wants_a_key_says_so(status: int) -> None:
    denied = refused("Unauthorized", status)
    with pytest.raises(errors.EngineRefused, match=rf"API key \(HTTP {status}\); put it into SGL"):
        examined(denied, pages={})

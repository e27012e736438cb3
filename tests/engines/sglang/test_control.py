"""SGLangControl over real HTTP, against a local server that answers as each SGLang release does."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from control_server import Server, rename, with_control

import rollout
from rollout import errors
from rollout.engines.sglang.control import SGLangControl


def test_it_is_exported() -> None:
    assert rollout.SGLangControl is SGLangControl


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_paused_pauses_and_goes_on(mode: Any) -> None:
    server = Server()

    async def use(control: SGLangControl) -> str | None:
        async with control.paused(mode):
            return server.paused

    assert with_control(server, use) == mode
    assert server.paused is None
    assert server.asked == [("/pause_generation", {"mode": mode}), ("/continue_generation", {})]


def test_every_request_has_a_connection_of_its_own() -> None:
    """One that the server closed while the trainer computed would lose the next request."""
    server = Server()
    with_control(server, lambda control: control.resume())
    assert server.connections == ["close"] * 2  # /server_info, /continue_generation


def test_paused_goes_on_after_an_exception() -> None:
    server = Server()

    async def use(control: SGLangControl) -> None:
        async with control.paused():
            raise KeyError("the trainer's")

    with pytest.raises(KeyError, match="the trainer's"):
        with_control(server, use)
    assert server.paused is None


def test_a_server_that_cannot_go_on_is_noted_on_the_first_error() -> None:
    server = Server()
    server.instead["/continue_generation"] = lambda: web.Response(status=500, text="dead")

    async def use(control: SGLangControl) -> None:
        async with control.paused():
            raise KeyError("the trainer's")

    with pytest.raises(KeyError, match="the trainer's") as caught:
        with_control(server, use)
    (note,) = caught.value.__notes__
    assert note.startswith("the server may still be paused, resume() it (http://127.0.0.1:")
    assert note.endswith("/continue_generation: HTTP 500: dead)")


def test_abort_over_a_pause_in_place_is_not_sent() -> None:
    server = Server()

    async def use(control: SGLangControl) -> None:
        async with control.paused("in_place"):
            await control.pause("abort")

    with pytest.raises(errors.ConfigError, match=r"waits with it forever; resume\(\) first"):
        with_control(server, use)
    assert [path for path, _ in server.asked] == ["/pause_generation", "/continue_generation"]


@pytest.mark.parametrize(
    ("rid", "body"),
    [
        pytest.param("r-1", {"rid": "r-1"}, id="one"),
        pytest.param(None, {"abort_all": True}, id="all"),
    ],
)
def test_abort_ends_one_or_all(rid: str | None, body: Any) -> None:
    server = Server()
    with_control(server, lambda control: control.abort(rid))
    assert server.asked == [("/abort_request", body)]


def test_an_empty_request_id_is_not_sent() -> None:
    server = Server()
    with pytest.raises(errors.ConfigError, match="wanted a request id, got ''; None aborts all"):
        with_control(server, lambda control: control.abort(""))
    assert server.asked == []


def test_flush_says_how_long_it_may_wait() -> None:
    server = Server()
    with_control(server, lambda control: control.flush_cache(2.5))
    assert server.asked == [("/flush_cache?timeout=2.5", {})]


@pytest.mark.parametrize(
    ("timeout_s", "words"),
    [
        pytest.param(0.0, "got: Flush cache failed. Give it a timeout_s, or pause it", id="now"),
        pytest.param(1.0, "got: Timed out waiting for idle state. Give it", id="waited"),
    ],
)
def test_a_busy_server_is_not_flushed(timeout_s: float, words: str) -> None:
    with pytest.raises(errors.EngineBusy, match=words):
        with_control(Server(busy=True), lambda control: control.flush_cache(timeout_s))


@pytest.mark.parametrize("abort_all", [False, True], ids=str)
def test_running_requests_are_aborted_only_when_asked(abort_all: bool) -> None:
    server = Server()

    async def use(control: SGLangControl) -> str:
        await control.set_weight_version("step-3", abort_all=abort_all)
        return await control.weight_version()

    assert with_control(server, use) == "step-3"
    body = {"new_version": "step-3", "abort_all_requests": abort_all}
    assert server.asked == [("/update_weight_version", body)]


def test_a_server_without_a_version_is_told_apart() -> None:
    server = Server()
    server.weight_version = None
    with pytest.raises(errors.ReplyMalformed, match="wanted weight_version, got None"):
        with_control(server, lambda control: control.weight_version())


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        pytest.param(
            lambda: web.json_response({"success": False, "message": "no"}),
            errors.EngineRefused,
            "wanted success, got false: no",
            id="success false",
        ),
        pytest.param(
            lambda: web.Response(text="<html>"),
            errors.ReplyMalformed,
            "is this an SGLang server",
            id="a proxy's page",
        ),
        pytest.param(
            lambda: web.json_response(["ok"]),
            errors.ReplyMalformed,
            r"wanted success, got b'\[\"ok\"\]'",
            id="another answer",
        ),
        pytest.param(
            lambda: web.json_response({"error": "Unauthorized"}, status=401),
            errors.EngineRefused,
            "HTTP 401: Unauthorized; control endpoints want the key of --admin-api-key",
            id="401",
        ),
        pytest.param(
            lambda: web.json_response({"error": "Forbidden"}, status=403),
            errors.EngineRefused,
            "HTTP 403: Forbidden; control endpoints want the key of --admin-api-key",
            id="403",
        ),
        pytest.param(
            lambda: web.json_response({"detail": "Not Found"}, status=404),
            errors.EngineRefused,
            "HTTP 404: .*not a router or the Rust front end",
            id="404",
        ),
        pytest.param(
            lambda: web.json_response({"detail": [{"msg": "Field required"}]}, status=422),
            errors.EngineRefused,
            "HTTP 422: .*Field required",
            id="422",
        ),
        pytest.param(
            lambda: web.Response(text="queue", status=503, headers={"Retry-After": "7"}),
            errors.EngineBusy,
            "HTTP 503: queue",
            id="503",
        ),
        pytest.param(
            lambda: web.Response(text="Internal Server Error", status=500),
            errors.EngineFailed,
            "HTTP 500: Internal Server Error",
            id="500",
        ),
    ],
)
def test_every_bad_answer_has_its_error(answer: Any, error: type[Exception], words: str) -> None:
    server = Server()
    server.instead["/update_weight_version"] = answer
    with pytest.raises(error, match=rf"127.0.0.1:\d+/update_weight_version: .*{words}") as caught:
        with_control(server, rename)
    assert getattr(caught.value, "retry_after_s", 0.0) == (7.0 if "queue" in words else 0.0)


def test_nobody_there() -> None:
    async def enter() -> None:
        async with SGLangControl("http://127.0.0.1:9"):
            pass

    with pytest.raises(errors.EngineUnreachable, match="no answer"):
        asyncio.run(enter())


@pytest.mark.parametrize(
    ("version", "error", "words"),
    [
        pytest.param("0.5.15", errors.EngineError, "came with 0.5.16", id="too old"),
        pytest.param(None, errors.ReplyMalformed, "is not known", id="unknown"),
    ],
)
def test_a_release_it_does_not_know_is_refused(
    version: str | None, error: type[Exception], words: str
) -> None:
    server = Server()
    info = {} if version is None else {"version": version}
    server.instead["/server_info"] = lambda: web.Response(text=json.dumps(info))
    with pytest.raises(error, match=words):
        with_control(server, rename)


@pytest.mark.parametrize(
    ("admin", "wanted"), [("sk-admin", "Bearer sk-admin"), (None, "Bearer sk-user")], ids=str
)
def test_reading_gets_the_api_key_and_control_the_admins_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, admin: str | None, wanted: str
) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", "sk-user")
    if admin is not None:
        monkeypatch.setenv("SGLANG_ADMIN_API_KEY", admin)
    server = Server()
    with_control(server, lambda control: control.set_weight_version("v2"))
    assert server.keys == {
        "/server_info": "Bearer sk-user",
        "/update_weight_version": wanted,
        "/model_info": "Bearer sk-user",
    }


def test_new_weights_over_an_old_cache_get_a_version_of_their_own() -> None:
    server = Server()
    server.instead["/flush_cache"] = lambda: web.Response(status=400, text="busy")

    async def use(control: SGLangControl) -> None:
        async with control.paused("abort"):
            await control.update_weights_from_disk("/ckpt", version="step-12")

    with pytest.raises(errors.EngineBusy):
        with_control(server, use)
    assert server.weight_version == "step-12-incomplete"

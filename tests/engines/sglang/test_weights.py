"""Weights that move, against a local server that answers as each SGLang release does."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from control_server import BUCKET, Server, rename, with_control

from rollout import errors
from rollout.engines.sglang.control import SGLangControl


async def from_disk(control: SGLangControl) -> None:
    await control.update_weights_from_disk("/ckpt", version="step-3")


async def in_two_calls(control: SGLangControl) -> None:
    async with control.paused(), control.weight_update("step-3") as update:
        await update.from_distributed(*BUCKET)
        await update.from_distributed(["c"], ["float16"], [[1]], group_name="g", load_format="f")


@pytest.mark.parametrize("use", [from_disk, rename, in_two_calls])
def test_a_version_that_was_not_taken_is_unconfirmed(use: Any) -> None:
    server = Server()
    server.instead["/model_info"] = lambda: web.json_response({"weight_version": "step-2"})
    with pytest.raises(
        errors.WeightVersionUnconfirmed, match=r"wanted weight_version 'step-3' .*, got 'step-2';"
    ) as caught:
        with_control(server, use)
    assert caught.value.code == "weight_version_unconfirmed"


def test_weights_from_disk_take_the_version_with_them() -> None:
    server = Server()

    async def use(control: SGLangControl) -> str:
        await control.update_weights_from_disk("/ckpt", version="step-3", load_format="dummy")
        return await control.weight_version()

    assert with_control(server, use) == "step-3"
    request = {
        "model_path": "/ckpt",
        "weight_version": "step-3",
        "abort_all_requests": False,
        "flush_cache": True,
        "load_format": "dummy",
    }
    assert server.asked == [("/update_weights_from_disk", request)]


@pytest.mark.parametrize(
    ("version", "mode", "flush"),
    [
        pytest.param("0.5.16", "abort", "/flush_cache?timeout=30.0", id="0.5.16, abort"),
        pytest.param("0.5.21", "abort", "/flush_cache?timeout=30.0", id="0.5.21, abort"),
        pytest.param("0.5.21", "retract", "/flush_cache?timeout=0.0", id="0.5.21, retract"),
        pytest.param("0.5.23", "retract", "/flush_cache?timeout=0.0", id="0.5.23, retract"),
    ],
)
@pytest.mark.parametrize("way", ["disk", "distributed"])
def test_a_paused_server_is_flushed_apart_from_the_update(
    version: str, mode: Any, flush: str, way: str
) -> None:
    server = Server(version, busy=True)

    async def use(control: SGLangControl) -> None:
        async with control.paused(mode):
            if way == "disk":
                await control.update_weights_from_disk("/ckpt", version="step-3")
            else:
                await control.update_weights_from_distributed(*BUCKET, version="step-3")

    with_control(server, use)
    loads = [body for path, body in server.asked if path.startswith("/update_weights_from")]
    assert [body["flush_cache"] for body in loads] == [False]
    assert [path for path, _ in server.asked if "flush" in path] == [flush]
    assert server.weight_version == "step-3"


@pytest.mark.parametrize(
    ("version", "mode", "words"),
    [
        pytest.param(
            "0.5.16", None, r"one that is not paused.*kill it; use paused\(\"abort\"\)", id="0.5.16"
        ),
        pytest.param("0.5.21", None, "wants an idle SGLang 0.5.21", id="0.5.21"),
        pytest.param("0.5.20", "retract", "waiting requests count as running", id="retracted"),
        pytest.param("0.5.23", "in_place", "paused in place, whose requests hold", id="in place"),
    ],
)
def test_a_flush_that_would_hurt_is_not_sent(version: str, mode: Any, words: str) -> None:
    server = Server(version, busy=True)

    async def use(control: SGLangControl) -> None:
        if mode is not None:
            await control.pause(mode)
        await control.update_weights_from_disk("/ckpt", version="step-3")

    with pytest.raises(errors.ConfigError, match=words):
        with_control(server, use)
    assert not [path for path, _ in server.asked if "weights" in path or "flush" in path]


@pytest.mark.parametrize("version", ["0.5.16", "0.5.23"])
def test_without_a_flush_weights_move_at_any_time(version: str) -> None:
    server = Server(version, busy=True)

    async def use(control: SGLangControl) -> None:
        async with control.paused("in_place"):
            await control.update_weights_from_disk("/ckpt", version="step-3", flush_cache=False)

    with_control(server, use)
    assert server.weight_version == "step-3"
    assert not [path for path, _ in server.asked if "flush" in path]


@pytest.mark.parametrize(
    ("version", "begin", "end"),
    [
        pytest.param("0.5.16", [], [], id="0.5.16"),
        pytest.param("0.5.20", [], [], id="0.5.20"),
        pytest.param("0.5.21", ["begin_weight_update"], ["end_weight_update"], id="0.5.21"),
        pytest.param("0.5.23", ["begin_weight_update"], ["end_weight_update"], id="0.5.23"),
        pytest.param("0.6.0", ["begin_weight_update"], ["end_weight_update"], id="a later one"),
    ],
)
def test_an_update_is_a_session_where_the_release_has_them(
    version: str, begin: list[str], end: list[str]
) -> None:
    server = Server(version)
    with_control(server, in_two_calls)
    assert [path.removeprefix("/") for path, _ in server.asked] == [
        "pause_generation",
        *begin,
        "update_weights_from_distributed",
        "update_weights_from_distributed",
        *end,
        "flush_cache?timeout=30.0",
        "update_weight_version",
        "continue_generation",
    ]
    first, second = [body for path, body in server.asked if "distributed" in path]
    assert first == {
        "names": ["a.weight", "b.weight"],
        "dtypes": ["bfloat16", "float32"],
        "shapes": [[2, 3], [4]],
        "group_name": "weight_update_group",
        "flush_cache": False,
    }
    assert (second["group_name"], second["load_format"]) == ("g", "f")
    assert (server.weight_version, server.in_session) == ("step-3", False)


@pytest.mark.parametrize("version", ["0.5.20", "0.5.23"])
@pytest.mark.parametrize(
    ("loads", "weight_version"),
    [
        pytest.param(0, "default", id="before anything was loaded"),
        pytest.param(1, "step-3-incomplete", id="between two calls"),
    ],
)
def test_an_update_that_breaks_off_never_claims_the_version(
    version: str, loads: int, weight_version: str
) -> None:
    server = Server(version)

    async def use(control: SGLangControl) -> None:
        async with (
            control.paused("retract"),
            control.weight_update("step-3", flush_cache=False) as u,
        ):
            for _ in range(loads):
                await u.from_distributed(*BUCKET)
            raise KeyError("the trainer's")

    with pytest.raises(KeyError, match="the trainer's"):
        with_control(server, use)
    assert (server.weight_version, server.in_session) == (weight_version, False)
    assert server.paused is None


def test_an_update_that_the_server_broke_off_is_incomplete() -> None:
    server = Server()
    words = {"success": False, "message": "The full weights are partially updated."}
    server.instead["/update_weights_from_distributed"] = lambda: web.json_response(
        words, status=400
    )

    with pytest.raises(errors.EngineRefused, match="HTTP 400: The full weights are part") as caught:
        with_control(server, in_two_calls)
    assert caught.value.__notes__ == [
        "the weights may be half new, as version 'step-3-incomplete': load all of them"
    ]
    assert (server.weight_version, server.in_session) == ("step-3-incomplete", False)


def test_a_session_that_does_not_end_is_not_the_new_version() -> None:
    server = Server()
    server.instead["/end_weight_update"] = lambda: web.Response(status=500, text="dead")
    with pytest.raises(errors.EngineFailed, match="/end_weight_update: HTTP 500: dead") as caught:
        with_control(server, in_two_calls)
    assert caught.value.__notes__[0].startswith("the weight update session may still be open: POST")
    assert server.weight_version == "step-3-incomplete"


def test_the_session_of_another_trainer_is_not_ended() -> None:
    server = Server()
    server.in_session = True
    with pytest.raises(errors.EngineRefused, match="already open.*another trainer is loading"):
        with_control(server, in_two_calls)
    assert (server.in_session, server.weight_version) == (True, "default")


def test_an_update_without_weights_is_refused() -> None:
    server = Server()

    async def use(control: SGLangControl) -> None:
        async with control.paused(), control.weight_update("step-3"):
            pass

    with pytest.raises(errors.ConfigError, match="wanted weights for version 'step-3', got none"):
        with_control(server, use)
    assert (server.weight_version, server.in_session) == ("default", False)


def test_weights_move_in_pieces_only_while_paused() -> None:
    server = Server()
    with pytest.raises(errors.ConfigError, match="wanted a paused server, got a running one"):
        with_control(
            server,
            lambda control: control.update_weights_from_distributed(*BUCKET, version="step-3"),
        )
    assert server.asked == []


def test_the_update_group_is_joined_with_the_trainers_numbers() -> None:
    server = Server()
    with_control(
        server,
        lambda control: control.init_weights_update_group(
            "10.0.0.1", 29500, rank_offset=1, world_size=3, backend="gloo"
        ),
    )
    assert server.asked[0][1] == {
        "master_address": "10.0.0.1",
        "master_port": 29500,
        "rank_offset": 1,
        "world_size": 3,
        "group_name": "weight_update_group",
        "backend": "gloo",
    }


def test_a_group_that_does_not_exist_cannot_be_left() -> None:
    with pytest.raises(errors.EngineRefused, match="group to be destroyed does not exist"):
        with_control(Server(), lambda control: control.destroy_weights_update_group("g"))


def test_a_checkpoint_that_cannot_be_loaded_is_refused_in_the_servers_words() -> None:
    server = Server()

    async def use(control: SGLangControl) -> None:
        await control.update_weights_from_disk("/nowhere", version="step-3")

    with pytest.raises(errors.EngineRefused, match=r"disk: HTTP 400: Failed to get weights it"):
        with_control(server, use)
    assert server.weight_version == "default"


def test_a_checkpoint_that_broke_off_is_incomplete() -> None:
    server = Server()

    async def use(control: SGLangControl) -> None:
        await control.update_weights_from_disk("/half", version="step-3")

    with pytest.raises(errors.EngineRefused, match="Rolling back to original weights") as caught:
        with_control(server, use)
    assert caught.value.__notes__ == [
        "the weights may be half new, as version 'step-3-incomplete': load all of them"
    ]
    assert server.weight_version == "step-3-incomplete"


def test_new_weights_over_an_old_cache_are_refused_with_what_to_do() -> None:
    server = Server("0.5.22", busy=True)
    with pytest.raises(errors.EngineRefused, match="the cache was not flushed") as caught:
        with_control(server, from_disk)
    assert caught.value.__notes__ == [
        "these are the weights of 'step-3' over the old cache: flush_cache() while paused, then "
        "set_weight_version('step-3')"
    ]

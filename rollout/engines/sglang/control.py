"""SGLangControl: pause an SGLang server, move its weights, and know which ones it has."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from os import PathLike, fspath
from types import TracebackType
from typing import Any, Literal, Self

from rollout.engines.base import left_on_error
from rollout.engines.sglang.calls import ControlCalls
from rollout.engines.sglang.rules import ServerRules
from rollout.engines.sglang.weights import DEFAULT_GROUP, WeightUpdate, mark_incomplete, noted
from rollout.errors import ConfigError, EngineError, EngineRefused, ReplyMalformed

PauseMode = Literal["abort", "retract", "in_place"]

SESSIONS_SINCE = (0, 5, 21)  # loads must stand between begin_weight_update and end_weight_update
RETRACTED_FLUSH_SINCE = (0, 5, 21)  # before, requests that wait count as busy even while paused
BUSY_FLUSH_ANSWERS_SINCE = (0, 5, 22)  # before, a flush refused inside an update kills the server

DRAIN_TIMEOUT_S = 30.0
"""How long a flush waits for requests whose client is gone: they are aborted a step later."""


class SGLangControl:
    """The control endpoints of one SGLang server, 0.5.16 or newer; an async context manager::

        async with SGLangControl("http://localhost:30000") as control:
            async with control.paused("abort"):
                await control.update_weights_from_disk(checkpoint, version="step-12")

    Whatever changes weights or their version reads the version back and raises
    `WeightVersionUnconfirmed` where it is another one. Everything raises `EngineRefused` (HTTP 4xx
    or ``success: false``, with the server's words), `EngineFailed`, `EngineBusy`,
    `EngineUnreachable` and `ReplyMalformed`; what would hurt the server is a `ConfigError` and is
    not sent. A request that got no answer within `timeout_s` seconds may still be carried out.

    A server with two keys wants `api_key` for what only reads and `admin_api_key` for the rest;
    without them, SGLANG_API_KEY and SGLANG_ADMIN_API_KEY of the environment are taken.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._calls = ControlCalls(
            url, api_key=api_key, admin_api_key=admin_api_key, timeout_s=timeout_s
        )
        self._version: tuple[int, ...] = ()
        self._paused: PauseMode | None = None  # as far as this object did it

    async def __aenter__(self) -> Self:
        self._calls.open()
        async with left_on_error(self):
            rules = ServerRules.of(await self._calls.describe("/server_info"))
            if not rules.version:
                raise ReplyMalformed(
                    f"{self._calls.url}/server_info: wanted the server's version, got none; ask "
                    "the Python server directly, not a router or the Rust front end"
                )
        self._version = rules.version
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._calls.close()

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stop generating; new requests wait until `resume`.

        `abort` ends what is running: replies come back as they are, with finish_reason abort.
        `retract` sends it back to the queue; it goes on after `resume` with its cache computed
        anew. `in_place` holds it, and it goes on over the cache it has.
        """
        if mode == "abort" and self._paused == "in_place":
            raise ConfigError(
                f"{self._calls.url}/pause_generation: mode abort waits for requests that the pause "
                "in place holds, and the server waits with it forever; resume() first"
            )
        await self._calls.post("/pause_generation", {"mode": mode})
        self._paused = mode

    async def resume(self) -> None:
        """Generate again, whoever paused it; nothing happens where it was not paused."""
        await self._calls.post("/continue_generation", {})
        self._paused = None

    @asynccontextmanager
    async def paused(self, mode: PauseMode = "abort") -> AsyncGenerator[None, None]:
        """Paused for the time of the block, and always resumed."""
        try:
            await self.pause(mode)
            yield
        except BaseException as error:
            # also where pause failed: without an answer nobody knows whether it was done
            with noted(error, "the server may still be paused, resume() it"):
                await self.resume()
            raise
        await self.resume()

    async def abort(self, rid: str | None = None) -> None:
        """End the requests whose id begins with `rid`, or all; an unknown one is no error."""
        if rid == "":
            raise ConfigError(
                f"{self._calls.url}/abort_request: wanted a request id, got ''; None aborts all"
            )
        await self._calls.post(
            "/abort_request", {"abort_all": True} if rid is None else {"rid": rid}
        )

    async def flush_cache(self, timeout_s: float = 0.0) -> None:
        """Forget cached prefixes; `EngineBusy` where requests still run after `timeout_s` seconds.

        While paused with mode retract (0.5.21 and newer) leave `timeout_s` 0: the requests that
        wait are no obstacle then, and are one for the server's own waiting.
        """
        await self._calls.flush(timeout_s)

    async def weight_version(self) -> str:
        """The version of the weights that the server has, as it says itself."""
        return await self._calls.weight_version()

    async def set_weight_version(self, version: str, *, abort_all: bool = False) -> None:
        """Say which weights these are. Rollouts that are running get a new span (0.5.19 and newer);
        the server's own default, to abort them, is only asked for with `abort_all`."""
        await self._calls.set_weight_version(version, abort_all)

    async def update_weights_from_disk(
        self,
        model_path: str | PathLike[str],
        *,
        version: str,
        load_format: str | None = None,
        flush_cache: bool = True,
        abort_all: bool = False,
    ) -> None:
        """Load the checkpoint at `model_path`, a path on the server's machine.

        Where the server is not paused, it waits until no request runs. Without `flush_cache` new
        rollouts may begin with prefixes that the old weights computed. A path with no checkpoint is
        `EngineRefused` and changes nothing; one whose tensors do not fit kills SGLang, which rolls
        back by reading the same path again.
        """
        path = "/update_weights_from_disk"
        self._check_flush(path, flush_cache)
        request: dict[str, Any] = {
            "model_path": fspath(model_path),
            "weight_version": version,
            "abort_all_requests": abort_all,
            "flush_cache": flush_cache and self._paused is None,
        }
        if load_format is not None:
            request["load_format"] = load_format
        try:
            await self._calls.change(path, request)
        except EngineRefused as error:
            if "Rolling back" in str(error):  # to what it could read of the new checkpoint
                await mark_incomplete(self._calls, error, version)
            elif "was not flushed" in str(error):
                error.add_note(
                    f"these are the weights of {version!r} over the old cache: flush_cache() while "
                    f"paused, then set_weight_version({version!r})"
                )
            raise
        if flush_cache and self._paused is not None:
            try:
                await self._flush_paused()
            except EngineError as error:  # new weights over the cache of the old ones
                await mark_incomplete(self._calls, error, version)
                raise
        await self._calls.confirm(version, path)

    async def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        *,
        rank_offset: int,
        world_size: int,
        group_name: str = DEFAULT_GROUP,
        backend: str = "nccl",
    ) -> None:
        """Let the server join the trainer's process group, with ranks from `rank_offset` on.

        It answers when all `world_size` ranks are there: start the trainer's side beside it.
        """
        await self._calls.change(
            "/init_weights_update_group",
            {
                "master_address": master_address,
                "master_port": master_port,
                "rank_offset": rank_offset,
                "world_size": world_size,
                "group_name": group_name,
                "backend": backend,
            },
        )

    async def destroy_weights_update_group(self, group_name: str = DEFAULT_GROUP) -> None:
        """Let the server leave the group; `EngineRefused` where there is none of that name."""
        await self._calls.change("/destroy_weights_update_group", {"group_name": group_name})

    @asynccontextmanager
    async def weight_update(
        self, version: str, *, flush_cache: bool = True
    ) -> AsyncGenerator[WeightUpdate, None]:
        """Load new weights in as many calls as it takes; `version` is set once all are there::

            async with control.paused("retract"), control.weight_update("step-12") as update:
                for names, dtypes, shapes in buckets:
                    await update.from_distributed(names, dtypes, shapes)

        Only while paused: requests between two calls would be sampled from half of the weights. An
        exception inside ends the server's session too, and where something was loaded the version
        becomes ``"{version}-incomplete"``, so that no rollout passes as one of the old weights.
        """
        path = "/update_weights_from_distributed"
        if self._paused is None:
            raise ConfigError(
                f"{self._calls.url}{path}: wanted a paused server, got a running one; requests "
                "between two calls see half of the new weights, use it inside paused()"
            )
        self._check_flush(path, flush_cache)
        update = WeightUpdate(self._calls, has_sessions=self._version >= SESSIONS_SINCE)
        try:
            await update.begin()
            yield update
            if not update.touched:
                raise ConfigError(
                    f"{self._calls.url}{path}: wanted weights for version {version!r}, got none; "
                    "set_weight_version() only renames"
                )
            await update.end()
            if flush_cache:
                await self._flush_paused()
        except BaseException as error:
            await update.abandon(error, version)
            raise
        await self.set_weight_version(version)

    async def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        version: str,
        group_name: str = DEFAULT_GROUP,
        load_format: str | None = None,
        flush_cache: bool = True,
    ) -> None:
        """A `weight_update` of one call."""
        async with self.weight_update(version, flush_cache=flush_cache) as update:
            await update.from_distributed(
                names, dtypes, shapes, group_name=group_name, load_format=load_format
            )

    def _check_flush(self, path: str, flush_cache: bool) -> None:
        """Refuse a flush that this release cannot do now; up to 0.5.21 trying would kill it."""
        if not flush_cache:
            return
        got, wanted = None, 'paused("abort")'
        if self._paused is None and self._version < BUSY_FLUSH_ANSWERS_SINCE:
            got = "one that is not paused, where a request that still runs would kill it"
        elif self._paused == "retract" and self._version < RETRACTED_FLUSH_SINCE:
            got = "one paused with mode retract, whose waiting requests count as running"
        elif self._paused == "in_place":
            got = "one paused in place, whose requests hold on to the cache"
            wanted = 'paused("retract") or paused("abort")'
        if got is not None:
            release = ".".join(map(str, self._version))
            raise ConfigError(
                f"{self._calls.url}{path}: flush_cache wants an idle SGLang {release}, got {got}; "
                f"use {wanted}, or flush_cache=False to keep what the old weights cached"
            )

    async def _flush_paused(self) -> None:
        # apart from the update: here a busy server answers, whatever its release
        await self.flush_cache(DRAIN_TIMEOUT_S if self._paused == "abort" else 0.0)

"""A local server with the control endpoints of one SGLang release, and a client on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from loopback import served

from rollout.engines.sglang.control import SGLangControl

BUCKET: Any = (["a.weight", "b.weight"], ["bfloat16", "float32"], [[2, 3], (4,)])
BUSY_WORDS = {
    "now": "Flush cache failed.\n",
    "waited": "Timed out waiting for idle state.",
}


class Server:
    """The control endpoints of one release, with what its source does to version and session."""

    def __init__(self, version: str = "0.5.23", *, busy: bool = False) -> None:
        self.release = tuple(map(int, version.split(".")))
        self.version = version
        self.busy = busy  # a request runs; a pause with mode abort ends it
        self.weight_version: Any = "default"
        self.paused: str | None = None
        self.in_session = False
        self.asked: list[tuple[str, Any]] = []
        self.keys: dict[str, str | None] = {}  # the Authorization that each path came with
        self.connections: list[str | None] = []  # what each request says of its connection
        self.instead: dict[str, Callable[[], web.Response]] = {}  # answers that break a promise

    async def answer(self, request: web.Request) -> web.Response:
        self.keys[request.path] = request.headers.get("Authorization")
        self.connections.append(request.headers.get("Connection"))
        if request.method == "GET":
            return self._described(request.path)
        body = await request.json()
        self.asked.append((request.path_qs, body))
        if request.path in self.instead:
            return self.instead[request.path]()
        handle = getattr(self, request.path.removeprefix("/"), None)
        if handle is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        reply: web.Response = handle(body, request)
        return reply

    def _described(self, path: str) -> web.Response:
        if path in self.instead:
            return self.instead[path]()
        if path == "/server_info":
            return web.json_response({"version": self.version})
        assert path == "/model_info", path
        return web.json_response({"model_path": "m", "weight_version": self.weight_version})

    def pause_generation(self, body: Any, request: web.Request) -> web.Response:
        self.paused = body["mode"]
        self.busy = self.busy and self.paused != "abort"
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    def continue_generation(self, body: Any, request: web.Request) -> web.Response:
        self.paused = None
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    def abort_request(self, body: Any, request: web.Request) -> web.Response:
        return web.Response()

    def flush_cache(self, body: Any, request: web.Request) -> web.Response:
        waits = float(request.query["timeout"]) > 0
        retracted = self.paused == "retract" and self.release >= (0, 5, 21) and not waits
        if self.busy and not retracted:
            return web.Response(text=BUSY_WORDS["waited" if waits else "now"], status=400)
        return web.Response(text="Cache flushed.\n")

    def update_weight_version(self, body: Any, request: web.Request) -> web.Response:
        self.weight_version = body["new_version"]
        return web.json_response({"success": True, "new_version": self.weight_version})

    def _loaded(self, body: Any) -> web.Response:
        if body["flush_cache"] and self.busy:
            assert self.release >= (0, 5, 22), "Cache flush failed after updating weights"
            message = "Weights were updated, but the cache was not flushed because requests run."
            return web.json_response({"success": False, "message": message}, status=400)
        self.weight_version = body.get("weight_version", self.weight_version)
        return web.json_response({"success": True, "message": "Succeeded"})

    def update_weights_from_disk(self, body: Any, request: web.Request) -> web.Response:
        if body["model_path"] == "/nowhere":
            message = "Failed to get weights iterator: no such model."
            return web.json_response({"success": False, "message": message}, status=400)
        if body["model_path"] == "/half":
            message = "Failed to update weights: I/O.\nRolling back to original weights."
            return web.json_response({"success": False, "message": message}, status=400)
        return self._loaded(body)

    def _session(self, opens: bool) -> web.Response:
        if self.release < (0, 5, 21):
            return web.json_response({"detail": "Not Found"}, status=404)
        if self.in_session == opens:
            message = "a weight-update session is already open; call end_weight_update() first"
            if not opens:
                message = "no weight-update session is open; call begin_weight_update() first"
            return web.json_response({"success": False, "message": message}, status=400)
        self.in_session = opens
        return web.json_response({"success": True, "message": "Success"})

    def begin_weight_update(self, body: Any, request: web.Request) -> web.Response:
        return self._session(True)

    def end_weight_update(self, body: Any, request: web.Request) -> web.Response:
        return self._session(False)

    def update_weights_from_distributed(self, body: Any, request: web.Request) -> web.Response:
        if self.release >= (0, 5, 21) and not self.in_session:
            message = "update_weights_from_distributed must run between begin_weight_update() ..."
            return web.json_response({"success": False, "message": message}, status=400)
        return self._loaded(body)

    def init_weights_update_group(self, body: Any, request: web.Request) -> web.Response:
        return web.json_response({"success": True, "message": "Succeeded"})

    def destroy_weights_update_group(self, body: Any, request: web.Request) -> web.Response:
        message = "The group to be destroyed does not exist."
        return web.json_response({"success": False, "message": message}, status=400)


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    async with served(app) as url:
        yield url


def with_control(server: Server, use: Callable[[SGLangControl], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with serving(server) as url, SGLangControl(url) as control:
            return await use(control)

    return asyncio.run(run())


async def rename(control: SGLangControl) -> None:
    await control.set_weight_version("step-3")

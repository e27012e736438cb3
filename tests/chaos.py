"""A server that looks like SGLang, and a proxy before it that spoils a share of its replies.

Both live in an event loop of their own thread: `with running(fake_server()) as server`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from aiohttp import web
from builders import DATA
from loopback import served

WIRE: dict[str, Any] = json.loads((DATA / "sglang_0.5.23_cpu_pytorch" / "wire.json").read_text())
VOCAB_SIZE = 1000
HANG_UP = object()
"""An answer: the connection is closed without a word, after the work was done."""

T = TypeVar("T")


@contextmanager
def running(manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Enter `manager` in an event loop of its own, in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    try:
        yield run(manager.__aenter__())
    finally:
        run(manager.__aexit__(None, None, None))
        run(_cancel_the_rest())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _cancel_the_rest() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


def fake_reply(request: dict[str, Any]) -> dict[str, Any]:
    """What a server answers: always the same for the same prompt and seed, else something else."""
    params = request["sampling_params"]
    rng = np.random.default_rng([*request["input_ids"], params.get("sampling_seed", 0)])
    longest = params["max_new_tokens"]
    num_tokens = int(rng.integers(min(3, longest), longest + 1))
    sizes = np.where(rng.random(num_tokens) < 0.4, 1, rng.integers(1, 40, num_tokens))
    rows = [rng.permutation(VOCAB_SIZE)[:size].tolist() for size in sizes]
    weights = [np.sort(rng.random(size) + 1e-3)[::-1] for size in sizes]
    logprobs = [np.log(w / w.sum()).astype(np.float32) for w in weights]
    at = [int(rng.integers(size)) for size in sizes]
    return make_reply(
        request,
        output_ids=[row[i] for row, i in zip(rows, at, strict=True)],
        mask=rows,
        logprobs=[[float(x) for x in row] for row in logprobs],
        full=[float(row[i]) - 0.125 for row, i in zip(logprobs, at, strict=True)],
    )


def make_reply(
    request: dict[str, Any],
    output_ids: list[int],
    mask: list[list[int]],
    logprobs: list[Any],
    full: list[float] | None = None,
    finish: str = "length",
    text: str = "text",
) -> dict[str, Any]:
    """The body of a reply, as SGLang puts it together."""
    meta: dict[str, Any] = {
        "finish_reason": {"type": finish},
        "prompt_tokens": len(request["input_ids"]),
        "completion_tokens": len(output_ids),
        "weight_version": "v1",
        "output_token_sampling_mask": mask,
        "output_token_sampling_logprobs": logprobs,
        "output_token_sampling_mask_length": len(mask),
    }
    if full is not None:
        meta["output_token_logprobs"] = [
            [value, token, None] for value, token in zip(full, output_ids, strict=True)
        ]
    return {"text": text, "output_ids": output_ids, "meta_info": meta}


def queue_abort(output_ids: list[int] | None = None) -> dict[str, Any]:
    """Aborted before or between its steps: HTTP 200, no sampling mask, no prompt_tokens."""
    reason = {"type": "abort", "message": "Abort in waiting queue"}
    meta = {"id": "x", "finish_reason": reason, "completion_tokens": len(output_ids or [])}
    return {"text": "", "output_ids": output_ids or [], "meta_info": meta}


def running_abort(reply: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """Aborted while it ran: the rows there are, and finish_reason abort."""
    meta = reply["meta_info"]
    cut: dict[str, Any] = {
        key: value[:num_tokens] for key, value in meta.items() if isinstance(value, list)
    }
    cut |= {"completion_tokens": num_tokens, "output_token_sampling_mask_length": num_tokens}
    cut |= {"finish_reason": {"type": "abort", "message": "Aborted", "status_code": None}}
    return {"text": "", "output_ids": reply["output_ids"][:num_tokens], "meta_info": meta | cut}


@dataclass
class FakeServer:
    """`requests` and the times they came at, without the probes of an engine that is entered;
    `authorizations` of every request."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)


@asynccontextmanager
async def fake_server(
    answer: Callable[[dict[str, Any]], Any] = fake_reply,
    probe: Callable[[dict[str, Any]], dict[str, Any]] = fake_reply,
    **info: Any,
) -> AsyncIterator[FakeServer]:
    """A server whose /generate is `answer`: a reply as dict or bytes, a `web.Response`, `HANG_UP`,
    or something to await for one of these. `probe` answers an engine that is entered."""

    async def generate(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        server.authorizations.append(request.headers.get("Authorization"))
        if asked["sampling_params"]["temperature"] == 0:
            return web.json_response(probe(asked))
        server.requests.append(asked)
        server.times.append(time.monotonic())
        reply = answer(asked)
        if inspect.isawaitable(reply):
            reply = await reply
        if reply is HANG_UP:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if isinstance(reply, web.StreamResponse):
            return reply
        body = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        return web.Response(body=body, content_type="application/json")

    async def described(request: web.Request) -> web.Response:
        server.authorizations.append(request.headers.get("Authorization"))
        case = "get_server_info" if request.path == "/server_info" else "get_model_info"
        return web.json_response(WIRE[case]["response"] | info)

    app = web.Application()
    app.router.add_post("/generate", generate)
    app.router.add_get("/server_info", described)
    app.router.add_get("/model_info", described)
    async with served(app, shutdown_timeout=0.1, access_log=None) as url:
        server = FakeServer(url)
        yield server


KINDS = {
    "reset": "engine_unreachable",
    "stall": "engine_unreachable",
    "cut": "engine_unreachable",
    "noise": "engine_unreachable",
    "429": "engine_busy",
    "502": "engine_busy",
    "503": "engine_busy",
    "504": "engine_busy",
    "500": "engine_failed",
    "garbage": "reply_malformed",
    "html": "reply_malformed",
    "truncated": "reply_malformed",
    "queue abort": "aborted",
    "running abort": "aborted",
}
"""Every way to spoil a reply, and the code of the error that a client must make of it."""

RETRY_AFTER_S = 1


class Chaos:
    """What becomes of each reply; the same for the same seed, in whatever order requests come.

    A request is failed with 500 once at most: clients give up on the second, as they should on a
    prompt that a server cannot serve.
    """

    def __init__(self, share: float, seed: int) -> None:
        self.share, self.seed = share, seed
        self.spoiled: Counter[str] = Counter()
        self.too_early = 0  # requests before the Retry-After of their last answer was over
        self._times_asked: Counter[str] = Counter()
        self._failed: set[str] = set()
        self._not_before: dict[str, float] = {}

    @property
    def by_code(self) -> Counter[str]:
        """How often which error must have been met."""
        codes: Counter[str] = Counter()
        for kind, count in self.spoiled.items():
            codes[KINDS[kind]] += count
        return codes

    def fate(self, request: dict[str, Any]) -> str | None:
        """How to spoil the reply to `request`, if at all."""
        if request["sampling_params"]["temperature"] == 0:
            return None  # the probe of an engine that is entered
        key = f"{request['input_ids']}/{request['sampling_params'].get('sampling_seed')}"
        self._times_asked[key] += 1
        self.too_early += time.monotonic() < self._not_before.get(key, 0.0)
        rng = random.Random(f"{self.seed}/{key}/{self._times_asked[key]}")
        if rng.random() >= self.share:
            return None
        kind = rng.choice([k for k in KINDS if k != "500" or key not in self._failed])
        if kind == "500":
            self._failed.add(key)
        if kind == "429":
            self._not_before[key] = time.monotonic() + RETRY_AFTER_S
        self.spoiled[kind] += 1
        return kind


@asynccontextmanager
async def proxy(upstream: str, chaos: Chaos) -> AsyncIterator[str]:
    """A TCP proxy before the server at `upstream`; yields its URL."""
    host, port = upstream.removeprefix("http://").split(":")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(host, int(port))
        try:
            while (head := await _head(reader)) is not None:
                body = await reader.readexactly(_length(head))
                to_server.write(head + body)
                reply_head = await _head(from_server)
                assert reply_head is not None
                reply = await from_server.readexactly(_length(reply_head))
                kind = chaos.fate(json.loads(body)) if body else None
                if kind is None:
                    writer.write(reply_head + reply)
                    await writer.drain()
                elif await _spoil(kind, reply_head, reply, reader, writer):
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client went away
        finally:
            to_server.close()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=512)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def _head(reader: asyncio.StreamReader) -> bytes | None:
    """The first lines of a message, with the empty one; None where there is none any more."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.split(b":")[1])
    return 0


async def _spoil(
    kind: str,
    head: bytes,
    reply: bytes,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> bool:
    """Send something else than `reply`; whether the connection is of no more use."""
    if kind == "reset":
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        return True
    if kind == "stall":
        await reader.read()  # until the client has had enough
        return True
    if kind in ("cut", "noise"):
        writer.write(head + reply[: len(reply) // 2] if kind == "cut" else b"\x16\x03\x01\x00" * 9)
        return True
    status, headers, body = 200, "", reply
    match kind:
        case "429":
            status, headers, body = 429, f"Retry-After: {RETRY_AFTER_S}\r\n", b"slow down"
        case "500" | "502" | "503" | "504":
            status, body = int(kind), b'{"error": {"message": "The request queue is full."}}'
        case "garbage":
            body = random.Random(len(reply)).randbytes(len(reply))
        case "html":
            body = b"<html><body>Please log in.</body></html>"
        case "truncated":
            body = reply[: len(reply) * 2 // 3]
        case "queue abort":
            body = json.dumps(queue_abort()).encode()
        case "running abort":
            body = json.dumps(running_abort(json.loads(reply), 1)).encode()
    writer.write(f"HTTP/1.1 {status} X\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode())
    writer.write(body)
    await writer.drain()
    return False

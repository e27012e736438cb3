"""How long a streamed plain request waits for each token, alone and beside another request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import msgspec
from overhead_arms import MASKED, PLAIN, Arm, Load, Setting, decode_head, post, request_of

from rollout.engines.http import READ_BUFFER_BYTES, check_status, error_words
from rollout.engines.sglang.http import SGLangHttp
from rollout.errors import ReplyMalformed

SETTING = Setting(512)
"""Of both requests: the largest supports, and one sampler for the whole batch."""

NEIGHBOURS: dict[str, Arm | None] = {
    "alone": None,
    "beside a plain request": PLAIN,
    "beside a mask request": MASKED,
}


class Chunk(NamedTuple):
    at_s: float  # when it came
    num_tokens: int  # that have come until then


async def measure(
    http: SGLangHttp, neighbour: Arm | None, load: Load, stream_tokens: int
) -> dict[str, Any]:
    """One streamed request; the neighbour is asked again whenever it has its reply."""
    subject = Load(load.prompts, 1, stream_tokens)
    request = request_of(PLAIN, load.prompts[0], subject.params(SETTING)) | {"stream": True}
    if neighbour is None:
        return {"gaps_ms": gaps_ms(await streamed(http.url, request)), "neighbour_replies": 0}
    beside = request_of(neighbour, load.prompts[-1], load.params(SETTING))
    async with repeated(http, beside) as replies:
        gaps = gaps_ms(await streamed(http.url, request))
    return {"gaps_ms": gaps, "neighbour_replies": len(replies)}


@asynccontextmanager
async def repeated(http: SGLangHttp, request: Mapping[str, Any]) -> AsyncIterator[list[int]]:
    """Asks again and again; the last one is waited for, so that nothing of it remains. Yields the
    sizes of the replies."""
    sizes: list[int] = []
    stop = asyncio.Event()

    async def ask() -> None:
        while not stop.is_set():
            sizes.append(len(await post(http, request)))

    asking = asyncio.create_task(ask())
    try:
        yield sizes
    finally:
        stop.set()
        await asking


async def streamed(url: str, request: Mapping[str, Any]) -> list[Chunk]:
    """When each chunk came; they are decoded afterwards."""
    came: list[tuple[float, bytes]] = []
    async with (
        aiohttp.ClientSession(read_bufsize=READ_BUFFER_BYTES) as session,
        session.post(f"{url}/generate", json=request) as response,
    ):
        if response.status != 200:
            check_status(response.status, await response.read())
        async for line in response.content:
            if line.startswith(b"data: {"):
                came.append((time.perf_counter(), line.removeprefix(b"data: ")))
    return [Chunk(at_s, num_tokens(line)) for at_s, line in came]


def num_tokens(chunk: bytes) -> int:
    try:
        return decode_head(chunk).meta_info.completion_tokens
    except msgspec.DecodeError as error:  # what goes wrong in a stream comes after its HTTP 200
        raise ReplyMalformed(f"stream: {error_words(chunk)}") from error


def gaps_ms(chunks: Sequence[Chunk]) -> list[float]:
    """Between the arrivals of chunks that bring tokens; the wait for the first is not in it.

    A chunk with several tokens is one gap: nothing is spread over them.
    """
    bringing = [
        chunk
        for chunk, before in zip(chunks, [Chunk(0.0, 0), *chunks], strict=False)
        if chunk.num_tokens > before.num_tokens
    ]
    return [
        1e3 * (later.at_s - earlier.at_s)
        for earlier, later in zip(bringing, bringing[1:], strict=False)
    ]

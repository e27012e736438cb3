"""ParseProcess: replies decoded outside the event loop's process.

JSON decoders hold the GIL: a 30 MB reply would stop every other request for a third of a second.
Small replies are decoded on the spot. The worker is `python -m rollout.engines.parse_process`, one
reply at a time: a frame in (length, pickled (status, prompt ids), length, body), a frame out
(length, pickled `Completion` or error).
"""

from __future__ import annotations

import asyncio
import pickle
import struct
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import BinaryIO

from rollout.engines.base import Completion
from rollout.engines.sglang_reply import parse_reply
from rollout.errors import RolloutError

INLINE_BYTES = 32 * 1024
"""Decoding this much takes well under a millisecond."""

_LENGTH = struct.Struct("<Q")


class ParseProcess:
    """A worker process that lives as long as its engine; started by the first large reply."""

    def __init__(self) -> None:
        self._worker: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: deque[asyncio.Future[Completion | RolloutError]] = deque()
        self._starting = asyncio.Lock()

    async def parse(self, status: int, body: bytes, prompt_ids: Sequence[int]) -> Completion:
        """`parse_reply`, with the same errors; the body travels back in `raw` as ever."""
        if len(body) <= INLINE_BYTES:
            return parse_reply(status, body, prompt_ids)
        worker = await self._started()
        assert worker.stdin is not None
        answer: asyncio.Future[Completion | RolloutError] = asyncio.Future()
        self._waiting.append(answer)
        head = pickle.dumps((status, list(prompt_ids)))
        worker.stdin.write(_LENGTH.pack(len(head)) + head + _LENGTH.pack(len(body)))
        worker.stdin.write(body)
        await worker.stdin.drain()
        result = await answer
        if isinstance(result, RolloutError):
            raise result
        return replace(result, raw=body)

    async def close(self) -> None:
        """End the worker; replies still in it are lost with their requests."""
        if self._worker is None or self._reader is None:
            return
        if self._worker.returncode is None:
            self._worker.kill()
        await self._worker.wait()
        await self._reader

    async def _started(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._worker is None or self._worker.returncode is not None:
                pipe = asyncio.subprocess.PIPE
                self._worker = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", __name__, stdin=pipe, stdout=pipe
                )
                self._reader = asyncio.create_task(self._read(self._worker))
        return self._worker

    async def _read(self, worker: asyncio.subprocess.Process) -> None:
        """Hand answers out in the order of the questions, until the worker ends."""
        assert worker.stdout is not None
        try:
            while True:
                (length,) = _LENGTH.unpack(await worker.stdout.readexactly(_LENGTH.size))
                result = pickle.loads(await worker.stdout.readexactly(length))
                answer = self._waiting.popleft()
                if not answer.done():  # its caller may be gone
                    answer.set_result(result)
        except asyncio.IncompleteReadError:
            error = RuntimeError("the process that decodes replies ended; was it out of memory?")
            for answer in self._waiting:
                if not answer.done():
                    answer.set_exception(error)
            self._waiting.clear()


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """The worker: answer frames until there are no more."""
    while head := source.read(_LENGTH.size):
        status, prompt_ids = pickle.loads(source.read(*_LENGTH.unpack(head)))
        (length,) = _LENGTH.unpack(source.read(_LENGTH.size))
        result: Completion | RolloutError
        try:
            result = replace(parse_reply(status, source.read(length), prompt_ids), raw=None)
        except RolloutError as error:
            result = error
        answer = pickle.dumps(result, protocol=5)
        sink.write(_LENGTH.pack(len(answer)) + answer)
        sink.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)

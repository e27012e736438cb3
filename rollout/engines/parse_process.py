"""ParseProcess: replies decoded outside the event loop's process.

JSON decoders hold the GIL: a 30 MB reply would stop every other request for a third of a second.
Small replies are decoded on the spot. The worker is a Python of its own that runs `main`, one reply
at a time: a frame in (length, pickled (parse, status), length, body), a frame out (length, pickled
`Completion` or error).
"""

from __future__ import annotations

import asyncio
import fcntl
import pickle
import struct
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, BinaryIO

from rollout.engines.base import Completion
from rollout.errors import ReplyMalformed, RolloutError

INLINE_BYTES = 32 * 1024
"""Decoding this much takes well under a millisecond."""

PIPE_BYTES = 2**20

ENDED = "the process that decodes replies ended before it had decoded this one; out of memory?"

_LENGTH = struct.Struct("<Q")


class ParseProcess:
    """A worker process that lives as long as its engine; started by the first large reply."""

    def __init__(self) -> None:
        self._worker: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: deque[asyncio.Future[Completion | RolloutError]] = deque()
        self._writing = asyncio.Lock()

    async def parse(
        self, parse: Callable[[int, bytes], Completion], status: int, body: bytes
    ) -> Completion:
        """`parse(status, body)`, with the same errors; it must be a function that pickle knows, or
        a partial of one. The body travels back in `raw` as ever."""
        if len(body) <= INLINE_BYTES:
            return parse(status, body)
        answer: asyncio.Future[Completion | RolloutError] = asyncio.Future()
        head = pickle.dumps((parse, status))
        async with self._writing:  # one body at a time lies in the pipe's buffer
            worker = await self._started()
            assert worker.stdin is not None
            self._waiting.append(answer)
            worker.stdin.write(_LENGTH.pack(len(head)) + head + _LENGTH.pack(len(body)))
            worker.stdin.write(body)
            with suppress(ConnectionError):  # it ended: `_read` tells
                await worker.stdin.drain()
        result = await answer
        if isinstance(result, RolloutError):
            raise result
        return replace(result, raw=body)

    async def close(self) -> None:
        """End the worker; replies still in it are lost with their requests."""
        worker, reader = self._worker, self._reader
        if worker is not None:
            if worker.returncode is None:
                worker.kill()
            await worker.wait()
        if reader is not None:
            await reader

    async def _started(self) -> asyncio.subprocess.Process:
        if self._worker is None:
            pipe = asyncio.subprocess.PIPE
            # in a process group of its own: Ctrl-C is for us, and what is in flight gets decoded
            self._worker = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                f"from {__name__} import main; main()",
                stdin=pipe,
                stdout=pipe,
                start_new_session=True,
            )
            assert self._worker.stdin is not None
            _widen(self._worker.stdin.get_extra_info("pipe"))
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
            pass  # it ended
        finally:
            self._worker = None  # the next reply starts another
            for answer in self._waiting:
                if not answer.done():
                    answer.set_result(ReplyMalformed(ENDED))
            self._waiting.clear()


def _widen(pipe: Any) -> None:
    """Replies are larger than the 64 kB a pipe holds; every refill wakes both processes."""
    if sys.platform == "linux":
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """The worker: answer frames until there are no more."""
    while head := source.read(_LENGTH.size):
        parse, status = pickle.loads(source.read(*_LENGTH.unpack(head)))
        (length,) = _LENGTH.unpack(source.read(_LENGTH.size))
        result: Completion | RolloutError
        try:
            result = replace(parse(status, source.read(length)), raw=None)
        except RolloutError as error:
            result = error
        answer = pickle.dumps(result, protocol=5)
        sink.write(_LENGTH.pack(len(answer)) + answer)
        sink.flush()


def main() -> None:
    """The worker, on its standard streams."""
    serve(sys.stdin.buffer, sys.stdout.buffer)

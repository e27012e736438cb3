"""HTTP to one server: every way it can fail has its error, with the URL in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar, NamedTuple

import aiohttp
import msgspec

from rollout.config import holds_credentials
from rollout.engines.base import Completion
from rollout.engines.parse_process import ParseProcess
from rollout.errors import (
    ConfigError,
    EngineBusy,
    EngineError,
    EngineFailed,
    EngineRefused,
    EngineUnreachable,
    ReplyMalformed,
    RolloutError,
)

CONNECT_TIMEOUT_S = 10.0
DESCRIBE_TIMEOUT_S = 60.0
READ_BUFFER_BYTES = 2**20
"""Replies are larger than aiohttp's 64 kB, after which it stops and starts reading."""
BUSY = {429, 502, 503, 504}


class Answer(NamedTuple):
    """What came back, whatever its status."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class EngineHttp:
    """Requests to `url`, after `open` and before `close`; raises `EngineUnreachable`.

    `api_key` is sent as a bearer token; without one, that of the environment is. Without
    `keep_alive` every request has a connection of its own. A subclass names the variable, and what
    is expected to answer.
    """

    api_key_variable: ClassVar[str]
    server: ClassVar[str]

    def __init__(self, url: str, *, api_key: str | None = None, keep_alive: bool = True) -> None:
        if holds_credentials(url):
            raise ConfigError(  # without the URL: it would stand in logs and records
                "the server's URL holds a user name or password; give an API key in the "
                f"environment variable {self.api_key_variable} instead"
            )
        self.url = url.rstrip("/")
        key = api_key or os.environ.get(self.api_key_variable)
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key.strip()}"
        self._keep_alive = keep_alive
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        # concurrency is bounded by the collector alone, and time by each request
        connector = aiohttp.TCPConnector(limit=0, force_close=not self._keep_alive)
        self._session = aiohttp.ClientSession(connector=connector, read_bufsize=READ_BUFFER_BYTES)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, path: str, request: Mapping[str, Any], timeout_s: float) -> Answer:
        """One POST with a JSON body."""
        return await self._ask("POST", path, timeout_s, msgspec.json.encode(request))

    async def complete(
        self,
        path: str,
        request: Mapping[str, Any],
        timeout_s: float,
        parse: Callable[[int, bytes], Completion],
        parser: ParseProcess,
    ) -> Completion:
        """`post`, decoded by `parse` in `parser`; errors get the reply, its URL and Retry-After."""
        answer = await self.post(path, request, timeout_s)
        try:
            return await parser.parse(parse, answer.status, answer.body)
        except RolloutError as error:
            error.body = answer.body
            error.args = (f"{self.url}{path}: {error}",)
            if isinstance(error, EngineError):
                error.retry_after_s = retry_after_s(answer.headers.get("Retry-After"))
            raise

    async def describe(self, path: str) -> dict[str, Any]:
        """The object at `path`; `EngineRefused` or `ReplyMalformed` where there is none."""
        return (await self.describe_first(path))[1]

    async def describe_first(self, *paths: str) -> tuple[str, dict[str, Any]]:
        """The first of `paths` that is there, and its object; errors as those of `describe`."""
        for path in paths:
            status, _, body = await self._ask("GET", path, DESCRIBE_TIMEOUT_S, None)
            if status != 404:
                break
        where = f"{self.url}{path}"
        if status in (401, 403):
            raise EngineRefused(
                f"{where}: HTTP {status}: {error_words(body)}; the server wants an API key: "
                f"set the environment variable {self.api_key_variable}"
            )
        if status != 200:
            raise EngineRefused(
                f"{where}: HTTP {status}: {error_words(body)}; is this {self.server}?"
            )
        try:
            value = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ReplyMalformed(f"{where}: {error}; is this {self.server}?") from error
        if not isinstance(value, dict):
            raise ReplyMalformed(f"{where}: not an object; is this {self.server}?")
        return path, value

    async def _ask(self, method: str, path: str, timeout_s: float, data: bytes | None) -> Answer:
        assert self._session is not None, "open it first"
        try:
            async with self._session.request(
                method,
                self.url + path,
                data=data,
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S),
            ) as response:
                return Answer(response.status, response.headers, await response.read())
        except aiohttp.InvalidURL as error:
            raise EngineUnreachable(f"{self.url}: not a URL; wanted http://host:port") from error
        except TimeoutError as error:
            raise EngineUnreachable(f"{self.url}{path}: no answer in {timeout_s:.0f} s") from error
        except aiohttp.ClientError as error:
            raise EngineUnreachable(
                f"{self.url}{path}: no answer ({error or type(error).__name__}); "
                "is the server up, and is engine.url right?"
            ) from error


def retry_after_s(header: str | None) -> float:
    """Seconds that a Retry-After header asks for, as a number or a date; 0 without one."""
    if header is None:
        return 0.0
    if header.strip().isdecimal():
        return float(header)
    try:
        until = parsedate_to_datetime(header)
    except (ValueError, OverflowError):
        return 0.0  # not in either form: as good as absent
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return max(0.0, (until - datetime.now(UTC)).total_seconds())


def check_status(
    status: int, body: bytes, refusal: Callable[[str], EngineRefused] = EngineRefused
) -> None:
    """Raise `EngineBusy`, `EngineFailed` or, of a 4xx, `refusal` of the server's words, unless it
    is 200."""
    if status == 200:
        return
    words = f"HTTP {status}: {error_words(body)}"
    if status in BUSY:
        raise EngineBusy(words)
    raise refusal(words) if 400 <= status < 500 else EngineFailed(words)


def error_words(body: bytes) -> str:
    """What the server says in an error reply, whichever of its envelopes it used."""
    try:
        envelope = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[:500].decode(errors="replace") or "(empty body)"
    if isinstance(envelope, dict):
        error = envelope.get("error", envelope)
        message = error.get("message") if isinstance(error, dict) else error
        if isinstance(message, str):
            return message
    return body[:500].decode(errors="replace")

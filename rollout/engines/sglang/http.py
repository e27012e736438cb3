"""HTTP to one SGLang server: every way it can fail has its error, with the URL in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import aiohttp
import msgspec

from rollout.config import holds_credentials
from rollout.engines.sglang.reply import error_words
from rollout.errors import ConfigError, EngineRefused, EngineUnreachable, ReplyMalformed

CONNECT_TIMEOUT_S = 10.0
DESCRIBE_TIMEOUT_S = 60.0
API_KEY_VARIABLE = "SGLANG_API_KEY"

# routers pass the older names alone
SERVER_PATHS = ("/server_info", "/get_server_info")
MODEL_PATHS = ("/model_info", "/get_model_info")
READ_BUFFER_BYTES = 2**20
"""Replies are larger than aiohttp's 64 kB, after which it stops and starts reading."""


class Answer(NamedTuple):
    """What came back, whatever its status."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class SGLangHttp:
    """Requests to `url`, after `open` and before `close`; raises `EngineUnreachable`.

    `api_key` is sent as a bearer token; without one, the environment's SGLANG_API_KEY is.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        if holds_credentials(url):
            raise ConfigError(  # without the URL: it would stand in logs and records
                "the server's URL holds a user name or password; give an API key in the "
                f"environment variable {API_KEY_VARIABLE} instead"
            )
        self.url = url.rstrip("/")
        key = api_key or os.environ.get(API_KEY_VARIABLE)
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key.strip()}"
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        # concurrency is bounded by the collector alone, and time by each request
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), read_bufsize=READ_BUFFER_BYTES
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, path: str, request: Mapping[str, Any], timeout_s: float) -> Answer:
        """One POST with a JSON body."""
        return await self._ask("POST", path, timeout_s, msgspec.json.encode(request))

    async def describe(self, path: str) -> dict[str, Any]:
        """The object at `path`; `EngineRefused` or `ReplyMalformed` where this is no SGLang."""
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
                f"set the environment variable {API_KEY_VARIABLE}"
            )
        if status != 200:
            raise EngineRefused(
                f"{where}: HTTP {status}: {error_words(body)}; is this an SGLang server?"
            )
        try:
            value = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ReplyMalformed(f"{where}: {error}; is this an SGLang server?") from error
        if not isinstance(value, dict):
            raise ReplyMalformed(f"{where}: not an object; is this an SGLang server?")
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

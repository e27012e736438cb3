"""Requests to an SGLang server's control endpoints: every bad answer has its error."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from rollout.engines.http import BUSY, Answer, error_words, retry_after_s
from rollout.engines.sglang.http import API_KEY_VARIABLE, SGLangHttp
from rollout.errors import (
    EngineBusy,
    EngineFailed,
    EngineRefused,
    ReplyMalformed,
    WeightVersionUnconfirmed,
)

ADMIN_API_KEY_VARIABLE = "SGLANG_ADMIN_API_KEY"


class ControlCalls:
    """What `SGLangControl` sends, after `open` and before `close`; bounded by `timeout_s` each."""

    def __init__(
        self, url: str, *, api_key: str | None, admin_api_key: str | None, timeout_s: float
    ) -> None:
        # the server closes a connection that is idle for seconds, and a trainer that computes
        # meanwhile would not notice before it sends into it
        self._http = SGLangHttp(url, api_key=api_key, keep_alive=False)
        admin_api_key = admin_api_key or os.environ.get(ADMIN_API_KEY_VARIABLE)
        self._admin = SGLangHttp(url, api_key=admin_api_key or api_key, keep_alive=False)
        self.url = self._http.url
        self._timeout_s = timeout_s

    def open(self) -> None:
        self._http.open()
        self._admin.open()

    async def close(self) -> None:
        await self._admin.close()
        await self._http.close()

    async def describe(self, path: str) -> dict[str, Any]:
        """The object at `path`, which everybody may read."""
        return await self._http.describe(path)

    async def weight_version(self) -> str:
        """What /model_info says; /get_weight_version is gone from 0.5.21 on."""
        version = (await self.describe("/model_info")).get("weight_version")
        if not isinstance(version, str):
            raise ReplyMalformed(
                f"{self.url}/model_info: wanted weight_version, got {version!r}; "
                "ask the server directly, not a router"
            )
        return version

    async def confirm(self, version: str, path: str) -> None:
        """Raise `WeightVersionUnconfirmed` where the server has another version after `path`."""
        got = await self.weight_version()
        if got != version:
            raise WeightVersionUnconfirmed(
                f"{self.url}/model_info: wanted weight_version {version!r} after {path}, got "
                f"{got!r}; collect nothing before it is known which weights these are (another "
                "client set it, a router asked another server, or --tokenizer-worker-num is not 1)"
            )

    async def set_weight_version(self, version: str, abort_all: bool) -> None:
        """`abort_all` is sent in any case: the server's own default is true."""
        path = "/update_weight_version"
        await self.change(path, {"new_version": version, "abort_all_requests": abort_all})
        await self.confirm(version, path)

    async def change(self, path: str, request: Mapping[str, Any]) -> None:
        """A request that answers with `success`."""
        where, body = f"{self.url}{path}", await self.post(path, request)
        try:
            value = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ReplyMalformed(f"{where}: {error}; is this an SGLang server?") from error
        success = value.get("success") if isinstance(value, dict) else None
        if success is False:
            raise EngineRefused(f"{where}: wanted success, got false: {error_words(body)}")
        if success is not True:
            raise ReplyMalformed(f"{where}: wanted success, got {body[:200]!r}; is this SGLang?")

    async def flush(self, timeout_s: float) -> None:
        """`EngineBusy` where it is refused, for which the server has HTTP 400."""
        answer = await self._admin.post(
            f"/flush_cache?timeout={timeout_s}", {}, self._timeout_s + timeout_s
        )
        if answer.status == 400:
            raise EngineBusy(
                f"{self.url}/flush_cache: wanted a server without running requests, got: "
                f"{error_words(answer.body).strip()} Give it a timeout_s, or pause it first: with "
                "mode abort, or (0.5.21 and newer) with mode retract and no timeout_s"
            )
        self._check("/flush_cache", answer)

    async def post(self, path: str, request: Mapping[str, Any]) -> bytes:
        """The body of an answer with HTTP 200."""
        answer = await self._admin.post(path, request, self._timeout_s)
        self._check(path, answer)
        return answer.body

    def _check(self, path: str, answer: Answer) -> None:
        """Raise the error that an answer other than 200 stands for."""
        status = answer.status
        if status == 200:
            return
        words = f"{self.url}{path}: HTTP {status}: {error_words(answer.body)}"
        if status in BUSY:
            busy = EngineBusy(words)
            busy.retry_after_s = retry_after_s(answer.headers.get("Retry-After"))
            raise busy
        if status in (401, 403):
            raise EngineRefused(
                f"{words}; control endpoints want the key of --admin-api-key where the server has "
                f"one, otherwise that of --api-key; set {ADMIN_API_KEY_VARIABLE} or "
                f"{API_KEY_VARIABLE}"
            )
        if status in (404, 405):
            raise EngineRefused(
                f"{words}; wanted SGLang's control endpoint, ask the Python server directly, not a "
                "router or the Rust front end"
            )
        if 400 <= status < 500:
            raise EngineRefused(words)
        raise EngineFailed(words)

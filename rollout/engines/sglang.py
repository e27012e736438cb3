"""SGLangEngine: a running SGLang server behind the engine seam."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from rollout.engines.base import Completion, EngineInfo
from rollout.engines.parse_process import ParseProcess
from rollout.engines.sglang_reply import error_words
from rollout.errors import (
    EngineError,
    EngineRefused,
    EngineUnreachable,
    IdOutsideVocabulary,
    NotReplayable,
    ReplyMalformed,
    RolloutError,
)
from rollout.sampling import SamplingParams

CONNECT_TIMEOUT_S = 10.0
DESCRIBE_TIMEOUT_S = 60.0

CAPTURED_SINCE = (0, 5, 20)
"""First version that returns the set it sampled from; before, it was rebuilt beside the sampler."""


class SGLangEngine:
    """One SGLang server over HTTP; an async context manager.

    Entering reads what the server is and asks for one token, so that a server that drops the
    sampling mask fails before any prompt is spent. `vocab_size` guards the server: a prompt id
    outside the vocabulary kills SGLang 0.5.23. A rollout times out after `queue_timeout_s` and the
    time that `max_new_tokens` take at `slowest_tokens_per_s`.
    """

    def __init__(
        self,
        url: str,
        *,
        vocab_size: int,
        queue_timeout_s: float = 600.0,
        slowest_tokens_per_s: float = 2.0,
    ) -> None:
        self.url = url.rstrip("/")
        self._vocab_size = vocab_size
        self._queue_timeout_s = queue_timeout_s
        self._slowest_tokens_per_s = slowest_tokens_per_s
        self._session: aiohttp.ClientSession | None = None
        self._parser = ParseProcess()
        self._server: dict[str, Any] = {}
        self._info: EngineInfo | None = None

    async def __aenter__(self) -> Self:
        # concurrency is bounded by the collector alone, and time by each request
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector)
        try:
            await self._read_server()
            await self.generate(
                np.array([1], np.int32), SamplingParams(temperature=0.0, max_new_tokens=1)
            )
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._parser.close()
        if self._session is not None:
            await self._session.close()

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "enter the engine first"
        return self._info

    def check(self, params: SamplingParams) -> None:
        """Raise `NotReplayable` for what the server would refuse, or answer beyond replay."""
        params.check_replayable(self.info.max_top_k)
        if params.logit_bias:
            raise NotReplayable(
                "sampling.logit_bias: a ban (-inf) has no form in JSON; "
                "SGLang bans tokens with its DisallowedTokens logit processor"
            )

    def meta(self, params: SamplingParams) -> dict[str, Any]:
        """How rollouts with `params` are sampled, as their `engine_meta` says it."""
        backend = self._server.get("sampling_backend")
        captured = _version(self.info.version) >= CAPTURED_SINCE
        keeps_ties = captured and backend == "flashinfer"
        return {
            "engine": "sglang",
            "version": self.info.version,
            "sampling_backend": backend,
            "filter_order": "sequential" if keeps_ties and params.min_p > 0 else "joint",
            "tie_policy": "keep" if keeps_ties else "cut",
            "fp32_head": self._server.get("enable_fp32_lm_head"),
            "deterministic": self._server.get("enable_deterministic_inference"),
            "support_source": "captured" if captured else "reconstructed",
            "endpoint": self.url,
        }

    async def generate(self, prompt_ids: NDArray[np.int32], params: SamplingParams) -> Completion:
        """One `/generate` request: one prompt, n = 1, not streamed."""
        outside = (prompt_ids < 0) | (prompt_ids >= self._vocab_size)
        if outside.any():
            raise IdOutsideVocabulary(
                f"prompt id {prompt_ids[outside][0]} is outside the vocabulary of "
                f"{self._vocab_size}; not sent, it would kill the server"
            )
        ids = prompt_ids.tolist()
        request = {
            "input_ids": ids,
            "sampling_params": params.to_request(),
            "stream": False,
            "return_logprob": True,
            "return_sampling_mask": True,
            "sampling_logprobs_mode": "support",
            "return_prompt_token_ids": True,
        }
        timeout_s = self._queue_timeout_s + params.max_new_tokens / self._slowest_tokens_per_s
        status, headers, body = await self._ask("/generate", timeout_s, request)
        try:
            completion = await self._parser.parse(status, body, ids)
        except RolloutError as error:
            error.body = body
            error.args = (f"{self.url}/generate: {error}",)
            if isinstance(error, EngineError):
                error.retry_after_s = retry_after_s(headers.get("Retry-After"))
            raise
        return replace(completion, engine_meta=self.meta(params))

    async def _read_server(self) -> None:
        self._server = await self._get("/server_info")
        model = await self._get("/model_info")
        cap = self._server.get("sampling_mask_max_tokens")
        self._info = EngineInfo(
            name="sglang",
            version=str(self._server.get("version", "unknown")),
            model=str(model.get("model_path", "unknown")),
            max_top_k=cap if isinstance(cap, int) else None,
            details={
                "weight_version": model.get("weight_version"),
                "sampling_backend": self._server.get("sampling_backend"),
                "dtype": self._server.get("dtype"),
            },
        )

    async def _get(self, path: str) -> dict[str, Any]:
        status, _, body = await self._ask(path, DESCRIBE_TIMEOUT_S)
        if status != 200:
            raise EngineRefused(
                f"{self.url}{path}: HTTP {status}: {error_words(body)}; is this an SGLang server?"
            )
        try:
            value = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ReplyMalformed(f"{self.url}{path}: {error}; is this an SGLang server?") from error
        if not isinstance(value, dict):
            raise ReplyMalformed(f"{self.url}{path}: not an object; is this an SGLang server?")
        return value

    async def _ask(
        self, path: str, timeout_s: float, request: dict[str, Any] | None = None
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body; a request makes it a POST."""
        assert self._session is not None, "enter the engine first"
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self._session.request(
                "GET" if request is None else "POST",
                self.url + path,
                data=None if request is None else msgspec.json.encode(request),
                headers={"Content-Type": "application/json"},
                timeout=timeout,
            ) as response:
                return response.status, response.headers, await response.read()
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


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])

"""SGLangEngine: a running SGLang server behind the engine seam."""

from __future__ import annotations

import re
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from rollout.engines.base import Completion, EngineInfo
from rollout.engines.sglang_reply import error_words, parse_reply
from rollout.errors import (
    EngineRefused,
    EngineUnreachable,
    IdOutsideVocabulary,
    NotReplayable,
    ReplyMalformed,
    RolloutError,
)
from rollout.sampling import SamplingParams

CAPTURED_SINCE = (0, 5, 20)
"""First version that returns the set it sampled from; before, it was rebuilt beside the sampler."""


class SGLangEngine:
    """One SGLang server over HTTP; an async context manager.

    Entering reads what the server is and asks for one token, so that a server that drops the
    sampling mask fails before any prompt is spent. `vocab_size` guards the server: a prompt id
    outside the vocabulary kills SGLang 0.5.23.
    """

    def __init__(self, url: str, *, vocab_size: int, timeout_s: float = 3600.0) -> None:
        self.url = url.rstrip("/")
        self._vocab_size = vocab_size
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=10)
        self._session: aiohttp.ClientSession | None = None
        self._server: dict[str, Any] = {}
        self._info: EngineInfo | None = None

    async def __aenter__(self) -> Self:
        # concurrency is bounded by the collector alone
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
        try:
            await self._read_server()
            await self.generate(
                np.array([1], np.int32), SamplingParams(temperature=0.0, max_new_tokens=1)
            )
        except RolloutError:
            await self._session.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
        status, body = await self._ask("POST", "/generate", msgspec.json.encode(request))
        try:
            return parse_reply(status, body, ids)
        except RolloutError as error:
            error.body = body
            error.args = (f"{self.url}/generate: {error}",)
            raise

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
        status, body = await self._ask("GET", path, None)
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

    async def _ask(self, method: str, path: str, data: bytes | None) -> tuple[int, bytes]:
        assert self._session is not None, "enter the engine first"
        headers = {"Content-Type": "application/json"} if data is not None else {}
        try:
            async with self._session.request(
                method, self.url + path, data=data, headers=headers
            ) as response:
                return response.status, await response.read()
        except aiohttp.InvalidURL as error:
            raise EngineUnreachable(f"{self.url}: not a URL; wanted http://host:port") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineUnreachable(
                f"{self.url}{path}: no answer ({error or type(error).__name__}); "
                "is the server up, and is engine.url right?"
            ) from error


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])

"""SGLangEngine: a running SGLang server behind the engine seam."""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rollout.engines.base import Completion, EngineInfo
from rollout.engines.parse_process import ParseProcess
from rollout.engines.sglang_http import SGLangHttp, retry_after_s
from rollout.engines.sglang_rules import ServerRules
from rollout.errors import EngineError, IdOutsideVocabulary, NotReplayable, RolloutError
from rollout.sampling import SamplingParams


class SGLangEngine:
    """One SGLang server over HTTP; an async context manager.

    Entering reads what the server is and asks for one token, so that a server that drops the
    sampling mask fails before any prompt is spent. `vocab_size` guards the server: a prompt id
    outside the vocabulary kills SGLang 0.5.23. With `support_logprobs` the logprob of every support
    id is asked for; releases before 0.5.21 send the sampled one alone. A rollout times out after
    `queue_timeout_s` and the time that `max_new_tokens` take at `slowest_tokens_per_s`.
    """

    def __init__(
        self,
        url: str,
        *,
        vocab_size: int,
        support_logprobs: bool = True,
        queue_timeout_s: float = 600.0,
        slowest_tokens_per_s: float = 2.0,
    ) -> None:
        self._http = SGLangHttp(url)
        self._vocab_size = vocab_size
        self._mode = "support" if support_logprobs else "selected"
        self._queue_timeout_s = queue_timeout_s
        self._slowest_tokens_per_s = slowest_tokens_per_s
        self._parser = ParseProcess()
        self._server: dict[str, Any] = {}
        self._rules: ServerRules | None = None
        self._info: EngineInfo | None = None

    async def __aenter__(self) -> Self:
        self._http.open()
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
        await self._http.close()

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "enter the engine first"
        return self._info

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """`params` with a number for `top_k: auto`."""
        return self._known_rules().resolve(params)

    def check(self, params: SamplingParams) -> None:
        """Raise `NotReplayable` or `EngineRefused` for what this server would refuse or distort."""
        self._known_rules().check(params)
        if params.logit_bias:
            raise NotReplayable(
                "sampling.logit_bias: a ban (-inf) has no form in JSON; "
                "SGLang bans tokens with its DisallowedTokens logit processor"
            )

    def meta(self, params: SamplingParams) -> dict[str, Any]:
        """How rollouts with `params` are sampled, as their `engine_meta` says it."""
        rules = self._known_rules()
        return {
            "engine": "sglang",
            "version": self.info.version,
            "sampling_backend": rules.sampling_backend,
            "filter_order": rules.filter_order(params.min_p),
            "tie_policy": "keep" if rules.keeps_ties else "cut",
            "fp32_head": self._server.get("enable_fp32_lm_head"),
            "deterministic": self._server.get("enable_deterministic_inference"),
            "support_source": "captured" if rules.captures else "reconstructed",
            "endpoint": self._http.url,
        }

    def _known_rules(self) -> ServerRules:
        assert self._rules is not None, "enter the engine first"
        return self._rules

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
            "sampling_logprobs_mode": self._mode,
            "return_prompt_token_ids": True,
        }
        timeout_s = self._queue_timeout_s + params.max_new_tokens / self._slowest_tokens_per_s
        answer = await self._http.post("/generate", request, timeout_s)
        try:
            completion = await self._parser.parse(answer.status, answer.body, ids)
        except RolloutError as error:
            error.body = answer.body
            error.args = (f"{self._http.url}/generate: {error}",)
            if isinstance(error, EngineError):
                error.retry_after_s = retry_after_s(answer.headers.get("Retry-After"))
            raise
        return replace(completion, engine_meta=self.meta(params))

    async def _read_server(self) -> None:
        self._server = await self._http.describe("/server_info")
        model = await self._http.describe("/model_info")
        self._rules = ServerRules.of(self._server)
        self._info = EngineInfo(
            name="sglang",
            version=str(self._server.get("version", "unknown")),
            model=str(model.get("model_path", "unknown")),
            max_top_k=self._rules.cap,
            details={
                "weight_version": model.get("weight_version"),
                "sampling_backend": self._server.get("sampling_backend"),
                "dtype": self._server.get("dtype"),
            },
        )

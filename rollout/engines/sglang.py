"""SGLangEngine: a running SGLang server behind the engine seam."""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np

from rollout.engines.base import Completion, EngineInfo
from rollout.engines.parse_process import ParseProcess
from rollout.engines.sglang_http import SGLangHttp, retry_after_s
from rollout.engines.sglang_routes import ROUTES, RouteName
from rollout.engines.sglang_rules import ServerRules
from rollout.errors import (
    EngineError,
    IdOutsideVocabulary,
    NotReplayable,
    RolloutError,
)
from rollout.prompts import Chat, Prompt
from rollout.sampling import SamplingParams

PROBE = Prompt("probe", np.array([1], np.int32), chat=Chat([{"role": "user", "content": "Hi"}]))


class SGLangEngine:
    """One SGLang server over HTTP; an async context manager.

    Entering reads what the server is and asks for one token, so that a server that drops the
    sampling mask fails before any prompt is spent. `vocab_size` guards the server: a prompt id
    outside the vocabulary kills SGLang 0.5.23. `route` chat sends `Prompt.chat` and takes the
    prompt ids from the server. With `support_logprobs` the logprob of every support id is asked
    for; releases before 0.5.21 send the sampled one alone. `shared` refuses settings whose meaning
    depends on others' requests. A rollout times out after `queue_timeout_s` and the time that
    `max_new_tokens` take at `slowest_tokens_per_s`.
    """

    def __init__(
        self,
        url: str,
        *,
        vocab_size: int,
        route: RouteName = "generate",
        support_logprobs: bool = True,
        shared: bool = False,
        api_key: str | None = None,
        queue_timeout_s: float = 600.0,
        slowest_tokens_per_s: float = 2.0,
    ) -> None:
        self._http = SGLangHttp(url, api_key=api_key)
        self._vocab_size = vocab_size
        self._route = ROUTES[route]
        self._mode = "support" if support_logprobs else "selected"
        self._shared = shared
        self._queue_timeout_s = queue_timeout_s
        self._slowest_tokens_per_s = slowest_tokens_per_s
        self._parser = ParseProcess()
        self._server: dict[str, Any] = {}
        self._rules: ServerRules | None = None
        self._info: EngineInfo | None = None
        self._weight_version: str | None = None  # the last one seen

    async def __aenter__(self) -> Self:
        self._http.open()
        try:
            await self._read_server()
            self._known_rules().check_route(self._route.name)
            await self.generate(PROBE, SamplingParams(temperature=0.0, max_new_tokens=1))
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
        self._known_rules().check(params, shared=self._shared)
        if params.logit_bias:
            raise NotReplayable(
                "sampling.logit_bias: a ban (-inf) has no form in JSON; "
                "set sampling.disallowed_token_ids"
            )
        if isinstance(params.top_k, int) and params.top_k >= self._vocab_size:
            raise NotReplayable(
                f"sampling.top_k: got {params.top_k}, must be below the vocabulary of "
                f"{self._vocab_size}: more truncates nothing"
            )
        self._route.check(params)

    def meta(self, params: SamplingParams) -> dict[str, Any]:
        """How rollouts with `params` are sampled, as their `engine_meta` says it."""
        rules = self._known_rules()
        meta = {
            "engine": "sglang",
            "version": self.info.version,
            "sampling_backend": rules.sampling_backend,
            "filter_order": rules.filter_order(params.min_p, shared=self._shared),
            "tie_policy": "keep" if rules.keeps_ties else "cut",
            "fp32_head": self._server.get("enable_fp32_lm_head"),
            "deterministic": self._server.get("enable_deterministic_inference"),
            "support_source": "captured" if rules.captures else "reconstructed",
            "endpoint": self._http.url,
            "route": self._route.name,
        }
        return {name: value for name, value in meta.items() if value is not None}

    def _known_rules(self) -> ServerRules:
        assert self._rules is not None, "enter the engine first"
        return self._rules

    async def generate(self, prompt: Prompt, params: SamplingParams) -> Completion:
        """One request: one prompt, n = 1, not streamed."""
        outside = (prompt.ids < 0) | (prompt.ids >= self._vocab_size)
        if outside.any():
            raise IdOutsideVocabulary(
                f"prompt id {prompt.ids[outside][0]} is outside the vocabulary of "
                f"{self._vocab_size}; not sent, it would kill the server"
            )
        route, before = self._route, self._weight_version
        request = route.request(prompt, params, self._mode)
        timeout_s = self._queue_timeout_s + params.max_new_tokens / self._slowest_tokens_per_s
        answer = await self._http.post(route.path, request, timeout_s)
        try:
            completion = await self._parser.parse(route.parse(prompt), answer.status, answer.body)
        except RolloutError as error:
            error.body = answer.body
            error.args = (f"{self._http.url}{route.path}: {error}",)
            if isinstance(error, EngineError):
                error.retry_after_s = retry_after_s(answer.headers.get("Retry-After"))
            raise
        return self._with_known_versions(replace(completion, engine_meta=self.meta(params)), before)

    def _with_known_versions(self, completion: Completion, before: str | None) -> Completion:
        """Before 0.5.19 a reply names one version, that of its end: it is that of all tokens only
        where it is also the one seen before the request."""
        if completion.weight_versions:
            self._weight_version = completion.weight_versions[-1].version
        if self._known_rules().has_spans or self._weight_version == before:
            return completion
        return replace(completion, weight_versions=())

    async def _read_server(self) -> None:
        self._server = await self._http.describe("/server_info")
        model = await self._http.describe("/model_info")
        self._rules = ServerRules.of(self._server)
        self._weight_version = model.get("weight_version")
        self._info = EngineInfo(
            name="sglang",
            version=str(self._server.get("version", "unknown")),
            model=str(model.get("model_path", "unknown")),
            max_top_k=self._rules.cap,
            details={
                "weight_version": self._weight_version,
                "sampling_backend": self._server.get("sampling_backend"),
                "dtype": self._server.get("dtype"),
                "preferred_sampling_params": self._rules.preferred or None,
            },
        )

"""SGLangEngine: a running SGLang server behind the engine seam."""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np

from rollout.engines.base import Completion, EngineInfo, check_prompt_ids, left_on_error
from rollout.engines.parse_process import ParseProcess
from rollout.engines.sglang.http import MODEL_PATHS, SERVER_PATHS, SGLangHttp
from rollout.engines.sglang.routes import ROUTES, RouteName
from rollout.engines.sglang.rules import ServerRules
from rollout.errors import (
    DataError,
    EngineRefused,
    NotReplayable,
    ReplyMalformed,
)
from rollout.prompts import Chat, Prompt
from rollout.sampling import SamplingParams

ROUTERS_DROP = ("stop_regex", "structural_tag", "spaces_between_special_tokens")
"""Keys of sampling_params that smg does not know and leaves out."""

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
        self._routed = False  # through a router
        self._served = "default"  # the model's name on the chat route

    async def __aenter__(self) -> Self:
        self._http.open()
        async with left_on_error(self):
            await self._read_server()
            self._known_rules().check_route(self._route.name)
            await self._probe()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._parser.close()
        await self._http.close()

    async def _probe(self) -> None:
        try:
            await self.generate(PROBE, SamplingParams(temperature=0.0, max_new_tokens=1))
        except DataError as error:
            raise ReplyMalformed(f"{error}; this server's replies cannot be recorded") from error

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "enter the engine first"
        return self._info

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """`params` with a number for `top_k: auto`, below the vocabulary."""
        resolved = self._known_rules().resolve(params)
        if params.top_k == "auto" and isinstance(resolved.top_k, int):
            top_k = max(1, min(resolved.top_k, self._vocab_size - 1))
            return resolved.model_copy(update={"top_k": top_k})
        return resolved

    def check(self, params: SamplingParams) -> None:
        """Raise `NotReplayable` or `EngineRefused` for what this server would refuse or distort."""
        self._known_rules().check(params, shared=self._shared)
        if params.logit_bias:
            raise NotReplayable(
                "sampling.logit_bias: a ban (-inf) has no form in JSON; "
                "set sampling.disallowed_token_ids"
            )
        if self._routed:
            self._check_router(params)
        if isinstance(params.top_k, int) and params.top_k >= self._vocab_size:
            raise NotReplayable(
                f"sampling.top_k: got {params.top_k}, must be below the vocabulary of "
                f"{self._vocab_size}: more truncates nothing"
            )
        self._route.check(params)

    def _check_router(self, params: SamplingParams) -> None:
        unset = SamplingParams()
        for name in ROUTERS_DROP:
            if getattr(params, name) != getattr(unset, name):
                raise EngineRefused(
                    f"sampling.{name}: {self._http.url} is a router, which drops it without a "
                    "word; remove it, or give the URL of the server behind it"
                )

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
        check_prompt_ids(prompt, self._vocab_size, ", it would kill the server")
        route, before = self._route, self._weight_version
        request = route.request(prompt, params, self._mode, self._served)
        timeout_s = self._queue_timeout_s + params.max_new_tokens / self._slowest_tokens_per_s
        completion = await self._http.complete(
            route.path, request, timeout_s, route.parse(prompt), self._parser
        )
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
        path, self._server = await self._http.describe_first(*SERVER_PATHS)
        if "router_manager" in self._server:
            raise EngineRefused(
                f"{self._http.url}: is sglang-router, which drops return_sampling_mask; give the "
                f"URL of the server behind it (rollout doctor {self._http.url} names it)"
            )
        self._routed = path != SERVER_PATHS[0]
        _, model = await self._http.describe_first(*MODEL_PATHS)
        self._served = str(model.get("served_model_name") or model.get("model_path") or "default")
        self._rules = ServerRules.of(self._server)
        self._weight_version = model.get("weight_version")
        self._info = EngineInfo(
            name="sglang",
            version=str(self._server.get("version", "unknown")),
            model=str(model.get("model_path", "unknown")),
            max_top_k=self._rules.cap,
            weight_version=self._weight_version,
            details={
                "sampling_backend": self._server.get("sampling_backend"),
                "dtype": self._server.get("dtype"),
                "preferred_sampling_params": self._rules.preferred or None,
            },
        )

"""VLLMEngine: a running vLLM server behind the engine seam.

What it does is read out of the documentation and source of vLLM 0.28; no live server has been
tried.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np

from rollout.engines.base import Completion, EngineInfo, check_prompt_ids, left_on_error
from rollout.engines.http import EngineHttp
from rollout.engines.parse_process import ParseProcess
from rollout.engines.vllm.reply import FLAGS, parse_reply
from rollout.engines.vllm.request import PATH, check, request
from rollout.errors import DataError, EngineRefused, ReplyMalformed
from rollout.prompts import Prompt
from rollout.sampling import AUTO_TOP_K, SamplingParams

OLDEST = (0, 28)  # the first that returns a mask
PROBE = Prompt("probe", np.array([1], np.int32))
PROBE_PARAMS = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)
PROBE_TOLERANCE = 1e-3  # nats


class VLLMHttp(EngineHttp):
    """Requests to a vLLM server, with VLLM_API_KEY of the environment."""

    api_key_variable = "VLLM_API_KEY"
    server = "a vLLM server"


class VLLMEngine:
    """One vLLM server over HTTP, 0.28 or newer; an async context manager.

    Entering reads what the server is and asks for four tokens, so that a server without sampling
    masks, or with logprobs over the whole vocabulary, fails before any prompt is spent. A prompt id
    outside `vocab_size` is not sent. A rollout times out after `queue_timeout_s` and the time that
    `max_new_tokens` take at `slowest_tokens_per_s`. Replies hold no text and no weight version.
    """

    def __init__(
        self,
        url: str,
        *,
        vocab_size: int,
        api_key: str | None = None,
        queue_timeout_s: float = 600.0,
        slowest_tokens_per_s: float = 2.0,
    ) -> None:
        self._http = VLLMHttp(url, api_key=api_key)
        self._vocab_size = vocab_size
        self._queue_timeout_s = queue_timeout_s
        self._slowest_tokens_per_s = slowest_tokens_per_s
        self._parser = ParseProcess()
        self._info: EngineInfo | None = None
        self._served = ""  # the model's name in requests

    async def __aenter__(self) -> Self:
        self._http.open()
        async with left_on_error(self):
            await self._read_server()
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

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "enter the engine first"
        return self._info

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """`params` with a number for `top_k: auto`, below the vocabulary."""
        if params.top_k != "auto":
            return params
        top_k = max(1, min(AUTO_TOP_K, self._vocab_size - 1))
        return params.model_copy(update={"top_k": top_k})

    def check(self, params: SamplingParams) -> None:
        """Raise `NotReplayable` or `ConfigError` for what vLLM would refuse, change or ignore."""
        check(params, self._vocab_size)

    @property
    def meta(self) -> dict[str, Any]:
        """How rollouts are sampled, as their `engine_meta` says it.

        Neither the filter order nor what becomes of ties is documented, and in 0.28 ties at top_k
        are kept or cut by the number of requests in a batch.
        """
        return {
            "engine": "vllm",
            "version": self.info.version,
            "support_source": "captured",
            "endpoint": self._http.url,
        }

    async def generate(self, prompt: Prompt, params: SamplingParams) -> Completion:
        """One request: one prompt, n = 1, not streamed."""
        check_prompt_ids(prompt, self._vocab_size)
        completion = await self._http.complete(
            PATH,
            request(prompt, params, self._served),
            self._queue_timeout_s + params.max_new_tokens / self._slowest_tokens_per_s,
            partial(parse_reply, num_prompt_tokens=len(prompt.ids)),
            self._parser,
        )
        return replace(completion, engine_meta=self.meta)

    async def _read_server(self) -> None:
        version = str((await self._http.describe("/version")).get("version", "unknown"))
        number = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if any(number) and number < OLDEST:  # a build from source names no release
            raise EngineRefused(
                f"{self._http.url}: vLLM {version} has no sampling masks; they came with 0.28, "
                "upgrade the server"
            )
        models = (await self._http.describe("/v1/models")).get("data")
        first = models[0] if isinstance(models, list) and models else None
        if not isinstance(first, dict) or not isinstance(first.get("id"), str):
            raise ReplyMalformed(f"{self._http.url}/v1/models: wanted a model's id, got {first!r}")
        self._served = first["id"]
        self._info = EngineInfo(
            name="vllm",
            version=version,
            model=str(first.get("root") or self._served),
            max_top_k=None,
        )

    async def _probe(self) -> None:
        try:
            found = await self.generate(PROBE, PROBE_PARAMS)
        except DataError as error:
            raise ReplyMalformed(f"{error}; this server's replies cannot be recorded") from error
        # with top_k 1 all that is left are ties, n ids of probability 1/n
        wanted = -np.log(found.support.counts)
        if len(at := np.flatnonzero(~(np.abs(found.sampling_logprobs - wanted) < PROBE_TOLERANCE))):
            raise EngineRefused(
                f"{self._http.url}{PATH}: a token with {found.support.counts[at[0]]} ids to choose "
                f"from has logprob {found.sampling_logprobs[at[0]]:.6g}, wanted "
                f"{wanted[at[0]]:.6g}: logprobs are not over the support; start the server with "
                f"{FLAGS}"
            )

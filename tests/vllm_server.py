"""A vLLM server of constructed replies, in the form that vLLM 0.28 documents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from aiohttp import web
from builders import make_prompt
from loopback import served

from rollout.engines.base import Completion
from rollout.engines.vllm.engine import VLLMEngine
from rollout.sampling import SamplingParams

PARAMS = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, max_new_tokens=2)
Asked = dict[str, Any]
Answer = Callable[[Asked], Any]


def reply(
    asked: Asked,
    ids: list[int],
    mask: list[list[int]] | None,
    logprobs: list[float | None],
    finish_reason: str = "length",
    **choice: Any,
) -> dict[str, Any]:
    """A body as `GenerateResponse.model_dump()` makes it."""
    prompt_tokens = len(asked["token_ids"])
    return {
        "request_id": "r",
        "model": asked["model"],
        "created": 1,
        "choices": [
            {
                "index": 0,
                "logprobs": {
                    "content": [
                        {
                            "token": f"token_id:{i}",
                            "logprob": logprob,
                            "bytes": None,
                            "top_logprobs": [
                                {"token": f"token_id:{i}", "logprob": logprob, "bytes": None}
                            ],
                        }
                        for i, logprob in zip(ids, logprobs, strict=False)
                    ]
                },
                "finish_reason": finish_reason,
                "token_ids": ids,
                "routed_experts": None,
                "sampling_mask": mask,
                **choice,
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(ids),
            "total_tokens": prompt_tokens + len(ids),
        },
        "prompt_logprobs": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


def good(asked: Asked) -> dict[str, Any]:
    """Singletons for the probe; ids 5 and 9, then 2 alone, for everything else."""
    if asked["sampling_params"]["top_k"] == 1:
        return reply(asked, [7, 7, 7, 7], [[7]] * 4, [0.0] * 4)
    return reply(asked, [9, 2], [[5, 9], [2]], [float(np.log(0.25)), 0.0])


def after_the_probe(answer: Answer) -> Answer:
    return lambda asked: (good if asked["sampling_params"]["top_k"] == 1 else answer)(asked)


@asynccontextmanager
async def server(
    answer: Answer = good, version: str = "0.28.0", key: str | None = None
) -> AsyncIterator[tuple[str, list[Asked]]]:
    """A vLLM whose token route is `answer`; yields its URL and the requests it got."""
    asked: list[Asked] = []

    def is_allowed(request: web.Request) -> bool:
        return key is None or request.headers.get("Authorization") == f"Bearer {key}"

    async def generate(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        made = answer(asked[-1])
        made = await made if asyncio.iscoroutine(made) else made
        return made if isinstance(made, web.Response) else web.json_response(made)

    async def models(request: web.Request) -> web.Response:
        if not is_allowed(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        card = {"id": "served", "object": "model", "root": "org/model", "max_model_len": 4096}
        return web.json_response({"object": "list", "data": [card]})

    async def told(request: web.Request) -> web.Response:
        return web.json_response({"version": version})

    app = web.Application()
    app.router.add_post("/inference/v1/generate", generate)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/version", told)
    async with served(app) as url:
        yield url, asked


def ask(
    answer: Answer = good, params: SamplingParams = PARAMS, **options: Any
) -> tuple[Completion, VLLMEngine, list[Asked]]:
    """Enter an engine, generate once: the completion, the engine, the requests it sent."""

    async def work() -> Any:
        async with (
            server(answer, **options) as (url, asked),
            VLLMEngine(url, vocab_size=100) as engine,
        ):
            return await engine.generate(make_prompt(5, 6), params), engine, asked

    return asyncio.run(work())


def spoiled(**choice: Any) -> Answer:
    """The good reply with other fields in its choice."""

    def answer(asked: Asked) -> dict[str, Any]:
        body = good(asked)
        body["choices"][0] |= choice
        return body

    return answer


def with_usage(**usage: int) -> Answer:
    return lambda asked: good(asked) | {"usage": usage}

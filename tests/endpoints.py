"""SGLang endpoints of every kind, in this process: what `rollout doctor` is tried on."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from builders import DATA
from loopback import served

from rollout.engines.sglang.doctor import Examination, examine

WIRE: dict[str, Any] = json.loads((DATA / "sglang_0.5.23_cpu_pytorch" / "wire.json").read_text())

# of a vocabulary of four, by exact arithmetic: what the sampler has after its temperature 2, the
# softmax of the same logits without one, and what is left of the first over the support {0, 1}
AFTER = {0: 1 / 2, 1: 1 / 4, 2: 1 / 8, 3: 1 / 8}
BEFORE = {0: 16 / 22, 1: 4 / 22, 2: 1 / 22, 3: 1 / 22}
OVER_SUPPORT = {0: 2 / 3, 1: 1 / 3}


def reply(
    asked: dict[str, Any], full: dict[int, float] = AFTER, support: tuple[int, ...] = (0, 1)
) -> dict[str, Any]:
    """What SGLang since 0.5.21 answers: tokens of the support, drawn by the bits of the seed."""
    params = asked["sampling_params"]
    count = 1 if "stop_regex" in params else params["max_new_tokens"]
    bits = params.get("sampling_seed", 1)
    ids = [support[(bits >> t) % len(support)] for t in range(count)]
    meta: dict[str, Any] = {
        "finish_reason": {"type": "stop", "matched": params["stop_regex"][0]}
        if "stop_regex" in params
        else {"type": "length", "length": count},
        "prompt_tokens": 1,
        "completion_tokens": count,
    }
    if asked.get("return_logprob"):
        meta["output_token_logprobs"] = [[math.log(full[i]), i, None] for i in ids]
    if asked.get("top_logprobs_num"):
        row = [[math.log(p), i, None] for i, p in full.items()]
        meta["output_top_logprobs"] = [row] * count
    if asked.get("return_sampling_mask"):
        logprobs = [math.log(OVER_SUPPORT[i]) for i in support] if len(support) > 1 else [0.0]
        meta["output_token_sampling_mask"] = [list(support)] * count
        meta["output_token_sampling_logprobs"] = [logprobs] * count
    return {"text": "a", "output_ids": ids, "prompt_token_ids": [1], "meta_info": meta}


def without_mask(asked: dict[str, Any]) -> dict[str, Any]:
    return reply(asked | {"return_sampling_mask": False})


def selected_alone(asked: dict[str, Any]) -> dict[str, Any]:
    """As before 0.5.21, which ignore `sampling_logprobs_mode`."""
    answer = reply(asked)
    if rows := answer["meta_info"].get("output_token_sampling_logprobs"):
        sampled = [row[i] for row, i in zip(rows, answer["output_ids"], strict=True)]
        answer["meta_info"]["output_token_sampling_logprobs"] = sampled
    return answer


def changed(**meta: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """`reply` with other meta_info keys."""

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        good = reply(asked)
        good["meta_info"] |= meta
        return good

    return answer


def chat_reply(meta_info: dict[str, Any] | None, ids: list[int] | None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "meta_info": meta_info, "response_token_ids": ids}]}


CHAT = chat_reply({"output_token_sampling_mask": [[5, 6]]}, [5])


def refused(message: str, status: int = 400) -> Callable[[dict[str, Any]], web.Response]:
    """SGLang's envelope, as recorded in `reject_*`."""
    assert set(WIRE["reject_top_p_only"]["response"]) == {"error"}
    return lambda asked: web.json_response({"error": {"message": message}}, status=status)


HANG_UP = object()
Answer = Callable[[dict[str, Any]], Any]


@asynccontextmanager
async def endpoint(
    generate: Answer = reply,
    chat: Answer = lambda asked: CHAT,
    pages: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
    **info: Any,
) -> AsyncIterator[str]:
    """The URL of a server with the recorded pages, changed by `info`; or with `pages` instead."""
    if pages is None:
        pages = {
            "/server_info": WIRE["get_server_info"]["response"] | info,
            "/model_info": WIRE["get_model_info"]["response"],
        }

    async def answer(request: web.Request) -> web.Response:
        if request.method == "GET":
            page = pages.get(request.path)
            return web.json_response(page, status=200 if page is not None else 404)
        found = (generate if request.path == "/generate" else chat)(await request.json())
        if found is HANG_UP and request.transport is not None:
            request.transport.close()
        if isinstance(found, web.Response):
            return found
        return web.json_response(None if found is HANG_UP else found, headers=headers)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with served(app) as url:
        yield url


def examined(*args: Any, **kwargs: Any) -> Examination:
    async def run() -> Examination:
        async with endpoint(*args, **kwargs) as url:
            return await examine(url)

    return asyncio.run(run())


def row(found: Examination, name: str) -> tuple[str, str, bool | None]:
    (probe,) = (probe for probe in found.probes if probe.name == name)
    return probe.value, probe.detail, probe.ok

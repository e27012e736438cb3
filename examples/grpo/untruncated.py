"""The control arm: sampled from the whole vocabulary, so that there is no support to record."""

import asyncio
from typing import Any

import aiohttp
import numpy as np

from replay import PackedBatch
from replay.batch import Parts, assemble, group
from rollout import Request


async def sample(url: str, requests: list[Request], new_tokens: int) -> Parts:
    """Rollouts at temperature 1 without a filter, with SGLang's logprobs over all of it."""

    async def one(session: aiohttp.ClientSession, request: Request) -> list[Any]:
        settings = {"temperature": 1.0, "max_new_tokens": new_tokens}
        body = {"input_ids": request.prompt.ids.tolist(), "sampling_params": settings}
        async with session.post(f"{url}/generate", json=body | {"return_logprob": True}) as reply:
            reply.raise_for_status()
            return (await reply.json())["meta_info"]["output_token_logprobs"]  # logprob, id, text

    async with aiohttp.ClientSession() as session:
        replies = await asyncio.gather(*(one(session, request) for request in requests))
    ids = [np.array([row[1] for row in rows], np.int32) for rows in replies]
    return Parts(
        rollout_ids=[request.rollout_id for request in requests],
        prompt_ids=[request.prompt.ids for request in requests],
        output_ids=ids,
        support_counts=[np.ones(len(i), np.int32) for i in ids],  # nobody reads them: the
        support_ids=ids,  # trainer normalises over the whole vocabulary
        sampling_logprobs=[np.array([row[0] for row in rows], np.float32) for rows in replies],
        loss_mask=[np.ones(len(i), np.int8) for i in ids],
        temperature=[1.0] * len(ids),
    )


def pack(parts: Parts, max_tokens: int) -> list[PackedBatch]:
    """Batches as `replay.batches` makes them of a run."""
    lengths = [len(a) + len(b) for a, b in zip(parts.prompt_ids, parts.output_ids, strict=True)]
    groups = group(range(len(lengths)), lengths.__getitem__, max_tokens)
    chosen = (Parts(*([column[i] for i in own] for column in parts)) for own in groups)
    return [assemble(part, number) for number, part in enumerate(chosen)]

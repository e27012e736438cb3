"""Collecting from a server in trouble, for the tests that cause it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from builders import write_lines
from chaos import (
    VOCAB_SIZE,
    FakeServer,
    fake_reply,
    running_abort,
)

from rollout.collect import Request
from rollout.config import CollectConfig
from rollout.files import read_lines
from rollout.job import collect_into, make_engine
from rollout.keeper import Progress
from rollout.prompts import Prompt
from rollout.reader import open_run
from rollout.record import Rollout
from rollout.writer import RunWriter

Asked = dict[str, Any]
LOG = logging.getLogger(__name__)
"""Numbers, shown with --log-cli-level=info."""


def config_for(url: str | list[str], **settings: Any) -> CollectConfig:
    plain = {
        "model": "none",
        "prompts": {"dataset": "none"},
        "sampling": {"top_k": 40, "max_new_tokens": 6},
        "engine": {"kind": "sglang", "url": url},
        "retry": {"attempts": 4, "first_pause_s": 0.0},
        "error_budget": 1000,
    }
    return CollectConfig.model_validate(plain | settings)


def collect(folder: Path, url: str | list[str], num_prompts: int, **settings: Any) -> Progress:
    """One rollout each for the prompts [0, 5], [1, 5], … into `folder`."""
    config = config_for(url, **settings)
    prompts = [Prompt(str(i), np.array([i, 5], np.int32), "") for i in range(num_prompts)]

    async def gather() -> Progress:
        async with make_engine(config, VOCAB_SIZE) as engine:
            with RunWriter(folder, {}, vocab_size=VOCAB_SIZE) as writer:
                return await collect_into(writer, engine, [Request(p, 0) for p in prompts], config)

    return asyncio.run(gather())


def stored(folder: Path) -> dict[str, Rollout]:
    rollouts = list(open_run(folder))
    assert len({r.rollout_id for r in rollouts}) == len(rollouts)
    return {rollout.rollout_id: rollout for rollout in rollouts}


def reasons(folder: Path, name: str) -> dict[str, str]:
    return {line["rollout_id"]: line["reason"] for line in read_lines(folder / name)}


def requests_for(server: FakeServer, prompt: int) -> list[float]:
    """When the requests for a prompt came."""
    pairs = zip(server.requests, server.times, strict=True)
    return [at for request, at in pairs if request["input_ids"][0] == prompt]


class Script:
    """Answers by prompt, one after another; the usual one where the script has no more."""

    def __init__(self, **answers: list[Callable[[Asked], Any]]) -> None:
        self.answers = {int(name.removeprefix("p")): iter(a) for name, a in answers.items()}

    def __call__(self, asked: Asked) -> Any:
        return next(self.answers.get(asked["input_ids"][0], iter([])), fake_reply)(asked)


def status(code: int, words: str = "no", **headers: str) -> Callable[[Asked], web.Response]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda asked: web.Response(status=code, text=words, headers=named)


def aborted_after_one(asked: Asked) -> Asked:
    return running_abort(fake_reply(asked), 1)


def settings_file(folder: Path, model: Path, url: str, num_prompts: int, **settings: Any) -> Path:
    """A config (JSON is YAML) for `num_prompts` prompts, each with the column `answer`."""
    rows = [{"prompt": f"The {n} statement", "answer": n} for n in range(num_prompts)]
    dataset = write_lines(folder / "p.jsonl", rows)
    plain = {
        "model": str(model),
        "prompts": {"dataset": str(dataset), "format": "text", "keep": ["answer"]},
        "sampling": {"top_k": 600, "max_new_tokens": 6},
        "engine": {"kind": "sglang", "url": url},
        "retry": {"first_pause_s": 0.01},
    }
    path = folder / "c.yaml"
    path.write_text(json.dumps(plain | settings))
    return path

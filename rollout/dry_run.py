"""dry_run(): is everything there for a run? One real rollout, and nothing written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollout.collect import Request, collect
from rollout.config import CollectConfig, SGLangConfig
from rollout.engines.sglang.doctor import Examination, examine
from rollout.inspection import view_rollout
from rollout.job import prepared
from rollout.keeper import OnNote, prompt_difference
from rollout.record import Rollout
from rollout.retry import RetryConfig


@dataclass(frozen=True, eq=False)
class DryRun:
    """What was found: the endpoints, and the first rollout, None where one is not usable."""

    endpoints: tuple[Examination, ...]  # SGLang's alone; entering examines the others
    rollout: Rollout | None

    def as_json(self) -> dict[str, Any]:
        """endpoints, as `rollout doctor` has them, and the facts of the rollout."""
        return {
            "endpoints": [endpoint.as_json() for endpoint in self.endpoints],
            "rollout": self.rollout and view_rollout(self.rollout, limit=0)["rollout"],
        }

    @property
    def usable(self) -> bool:
        return all(endpoint.usable for endpoint in self.endpoints)


async def dry_run(config: CollectConfig, on_note: OnNote = lambda note: None) -> DryRun:
    """Examine every endpoint, then collect the first rollout of `config`, which follows every rule.

    Raises what `collect_run` raises before it writes, and the error of that rollout.
    """
    urls = config.engine.urls if isinstance(config.engine, SGLangConfig) else []
    endpoints = tuple([await examine(url) for url in urls])
    if not all(endpoint.usable for endpoint in endpoints):
        return DryRun(endpoints, None)
    async with prepared(config, on_note=on_note) as (config, engine, prompts, reward):
        request = Request(prompts.prompts[0], 0)
        rollouts = collect(
            engine,
            [request],
            config.sampling,
            seed=config.seed,
            concurrency=1,
            retry=RetryConfig(attempts=1),
            on_overflow=config.on_overflow,
            reward=reward,
        )
        (rollout,) = [rollout async for rollout in rollouts]
    if difference := prompt_difference(request.prompt, rollout, config.model):
        on_note(difference)
    return DryRun(endpoints, rollout)

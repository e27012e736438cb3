"""Keeper: every outcome of a run into the shards, rejected.jsonl or errors.jsonl."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.collect import Outcome, Request
from rollout.config import CollectConfig, SGLangConfig
from rollout.errors import DataError, EngineDown, SupportOverflow
from rollout.prompts import Prompt
from rollout.record import Rollout, make_rollout_id
from rollout.writer import RunWriter

OnNote = Callable[[str], None]


@dataclass
class Progress:
    """How far a run is; rollouts of earlier commands are done from the start."""

    total: int
    done: int = 0
    failed: int = 0
    rejected: int = 0
    overflowed: int = 0  # skipped because of ties above the cap; not a failure of anything
    output_tokens: int = 0  # of this command
    retried: Counter[str] = field(default_factory=Counter)  # failures tried again, of this command
    prompts_differ: int = 0  # rollouts whose prompt the engine rendered otherwise, of this command

    @property
    def lost(self) -> int:
        """What counts against the error budget."""
        return self.failed + self.rejected

    @property
    def finished(self) -> int:
        return self.done + self.lost + self.overflowed


class Keeper:
    """Stores outcomes in a thread, so that neither checks nor disks hold up the event loop."""

    def __init__(
        self,
        writer: RunWriter,
        config: CollectConfig,
        progress: Progress,
        on_progress: Callable[[Progress], None],
        on_note: OnNote,
    ) -> None:
        self._on_note = on_note
        self._told_of_support_logprobs = False
        self._writer = writer
        self._config = config
        self._progress = progress
        self._on_progress = on_progress
        self._writing = asyncio.Lock()  # the writer is for one thread at a time

    async def keep(self, outcomes: Any) -> None:
        """Store until the outcomes end, the budget is spent, or the engine is down."""
        ticking = asyncio.create_task(self._commit_by_age())
        try:
            async for outcome in outcomes:
                if isinstance(outcome.error, EngineDown):
                    raise outcome.error
                async with self._writing:
                    await _in_thread(self._store, outcome)
                self._on_progress(self._progress)
                if ticking.done():
                    ticking.result()  # a disk that failed it will fail us
                if self._progress.lost > lost_allowed(self._config, self._progress.total):
                    return
        finally:
            ticking.cancel()
            await asyncio.wait({ticking})

    async def _commit_by_age(self) -> None:
        """Rollouts that came do not wait for the next one to become durable."""
        while True:
            await asyncio.sleep(1)
            async with self._writing:
                await _in_thread(self._writer.commit_if_old)

    def _store(self, outcome: Outcome) -> None:
        """Into the shards, rejected.jsonl or errors.jsonl: every outcome leaves a trace."""
        progress, request = self._progress, outcome.request
        about: dict[str, Any] = {"rollout_id": request.rollout_id, "attempts": outcome.attempts}
        if self._config.keep_aborted:
            self._store_aborted(outcome)
        error = outcome.error
        if outcome.rollout is not None:
            try:
                self._writer.write(outcome.rollout)
            except DataError as broken_rule:
                error = broken_rule
            else:
                progress.done += 1
                progress.output_tokens += outcome.rollout.num_output_tokens
                self._compare_prompt(request.prompt, outcome.rollout)
                self._look_for_support_logprobs(outcome.rollout)
                return
        assert error is not None, "an outcome is a rollout or an error"
        if isinstance(error, DataError):
            progress.rejected += 1
            self._writer.reject(error, outcome.body, **about)
        else:
            if isinstance(error, SupportOverflow):
                progress.overflowed += 1
            else:
                progress.failed += 1
            self._writer.fail(error, **about)

    def _compare_prompt(self, prompt: Prompt, rollout: Rollout) -> None:
        difference = prompt_difference(prompt, rollout, self._config.model)
        if difference is None:
            return
        self._progress.prompts_differ += 1
        if self._progress.prompts_differ == 1:
            self._on_note(difference)

    def _look_for_support_logprobs(self, rollout: Rollout) -> None:
        engine = self._config.engine
        wanted = isinstance(engine, SGLangConfig) and engine.support_logprobs
        if wanted and rollout.support_logprobs is None and not self._told_of_support_logprobs:
            self._told_of_support_logprobs = True
            self._on_note(
                "the server sends no logprobs of whole supports (SGLang does since 0.5.21): "
                "replay will not know support_kl; engine.support_logprobs=false asks for none"
            )

    def _store_aborted(self, outcome: Outcome) -> None:
        number = 0
        for rollout in outcome.aborted:
            while (rollout_id := _abort_id(outcome.request, number)) in self._writer.done:
                number += 1  # of an earlier command
            try:
                self._writer.write(replace(rollout, rollout_id=rollout_id))
            except DataError as broken_rule:
                self._writer.reject(broken_rule, None, rollout_id=rollout_id)


async def _in_thread(function: Callable[..., None], *args: Any) -> None:
    """Run it in a thread. A cancellation waits until it is done: leaving the writer's context in
    the middle of a commit would write the same bytes from two threads."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *args))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()


def prompt_difference(prompt: Prompt, rollout: Rollout, model: str) -> str | None:
    """What to say where an engine rendered `prompt` itself, and otherwise than we did."""
    if np.array_equal(prompt.ids, rollout.prompt_ids):
        return None
    return (
        f"prompt {prompt.prompt_id}: {_first_difference(prompt.ids, rollout.prompt_ids)}; the "
        f"engine's ids are recorded. Its chat template or tokenizer is not that of {model}"
    )


def _first_difference(ours: NDArray[np.int32], theirs: NDArray[np.int32]) -> str:
    both = min(len(ours), len(theirs))
    differs = np.flatnonzero(ours[:both] != theirs[:both])
    if len(differs):
        at = differs[0]
        return f"token {at} is {theirs[at]} at the engine and {ours[at]} as rendered here"
    lengths = f"{len(theirs)} tokens at the engine and {len(ours)} as rendered here"
    return f"{lengths}, alike until {both}"


def _abort_id(request: Request, number: int) -> str:
    return make_rollout_id(request.prompt.prompt_id, request.sample_index, number)


def lost_allowed(config: CollectConfig, total: int) -> float:
    """How many rollouts may be lost: `error_budget` is a count or a share."""
    budget = config.error_budget
    return budget if isinstance(budget, int) else budget * total

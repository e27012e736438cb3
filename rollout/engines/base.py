"""The seam between the collector and whatever samples: one prompt in, one completion out."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from rollout.errors import IdOutsideVocabulary
from rollout.prompts import Prompt
from rollout.record import Rollout, WeightSpan, make_rollout_id
from rollout.sampling import SamplingParams, canonical_json
from rollout.support import Support


@dataclass(frozen=True, eq=False, kw_only=True)
class Completion:
    """What an engine sampled for one prompt; arrays marked [R] have one entry per output token.

    `engine_meta` has the keys of docs/format.md: engine, version, sampling_backend, filter_order,
    tie_policy, fp32_head, deterministic, support_source, endpoint; what is not known is left out.
    """

    output_ids: NDArray[np.int32]  # [R], the matched stop token included
    support: Support  # R rows, the engine's order
    sampling_logprobs: NDArray[np.float32]  # [R] over the support, after temperature
    full_logprobs: NDArray[np.float32] | None  # [R] over the vocabulary, after temperature
    support_logprobs: NDArray[np.float32] | None  # aligned with support.ids
    finish_reason: str  # stop, length or abort
    stop_match: str | None = None
    prompt_ids: NDArray[np.int32] | None = None  # [P] where the engine rendered the prompt itself
    weight_versions: tuple[WeightSpan, ...] = ()
    text: str | None = None
    engine_meta: dict[str, Any] = field(default_factory=dict)  # how the engine samples
    raw: bytes | None = None  # the reply as it came, kept only until the rollout is stored

    def to_rollout(
        self,
        *,
        prompt_id: str,
        sample_index: int,
        prompt_ids: NDArray[np.int32],
        params: SamplingParams,
        abort: int = 0,
        **about: Any,
    ) -> Rollout:
        """The record of this completion; every token of it was sampled, so every token counts.

        An aborted one gets an id of its own, the abort-th of its rollout. `about` are further
        fields of `Rollout`: `sampling_params` and optional ones.
        """
        sampler = params.sampler
        return Rollout(
            rollout_id=make_rollout_id(
                prompt_id, sample_index, abort if self.finish_reason == "abort" else None
            ),
            prompt_id=prompt_id,
            sample_index=sample_index,
            prompt_ids=prompt_ids,
            output_ids=self.output_ids,
            loss_mask=np.ones(len(self.output_ids), np.int8),
            sampling_logprobs=self.sampling_logprobs,
            support=self.support,
            full_logprobs=self.full_logprobs,
            support_logprobs=self.support_logprobs,
            temperature=sampler.temperature,
            top_p=sampler.top_p,
            top_k=sampler.top_k,
            min_p=sampler.min_p,
            max_new_tokens=params.max_new_tokens,
            seed=params.sampling_seed,
            finish_reason=self.finish_reason,
            stop_match=self.stop_match,
            weight_versions=self.weight_versions,
            engine_meta=canonical_json(self.engine_meta),
            output_text=self.text,
            created_us=time.time_ns() // 1000,
            **about,
        )


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What a running engine says about itself."""

    name: str
    version: str
    model: str
    max_top_k: int | None  # largest top_k that still gets a support; None = no limit known
    details: dict[str, Any] = field(default_factory=dict)  # whatever else run.json should keep
    weight_version: str | None = None  # on entering; weights may move afterwards


class Engine(Protocol):
    """Anything that samples with supports. Entered before use, so that a dead one fails early.

    Implementations raise `EngineError` for what goes wrong at the other end of the seam; the own
    exceptions of an engine in this process pass unchanged.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    @property
    def info(self) -> EngineInfo:
        """Valid once entered."""
        ...

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """`params` with what only the engine knows filled in: a number for `top_k: auto`."""
        ...

    def check(self, params: SamplingParams) -> None:
        """Raise `NotReplayable`, `ConfigError` or `EngineRefused` for what cannot be served."""
        ...

    async def generate(self, prompt: Prompt, params: SamplingParams) -> Completion:
        """Sample one sequence after `prompt`, which has at least one token."""
        ...


@asynccontextmanager
async def left_on_error(entered: AbstractAsyncContextManager[Any]) -> AsyncIterator[None]:
    """For `__aenter__`: leaves `entered` where the block raises, so that it holds nothing open."""
    async with AsyncExitStack() as undo:
        undo.push_async_callback(entered.__aexit__, None, None, None)
        yield
        undo.pop_all()


def check_prompt_ids(prompt: Prompt, vocab_size: int, why: str = "") -> None:
    """Raise `IdOutsideVocabulary` for a prompt that must not be sent, with `why` not."""
    outside = (prompt.ids < 0) | (prompt.ids >= vocab_size)
    if outside.any():
        raise IdOutsideVocabulary(
            f"prompt id {prompt.ids[outside][0]} is outside the vocabulary of {vocab_size}; "
            f"not sent{why}"
        )

"""When to ask again, and how long to wait before."""

from __future__ import annotations

import random
from typing import Annotated, Literal

from pydantic import Field

from rollout.blocks import Block
from rollout.errors import EngineError, RolloutError

OnOverflow = Literal["skip", "lower_top_k"]

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RetryConfig(Block):
    """Retries of one rollout. Only what can get better is tried again: no answer, a busy server,
    a garbled reply, an aborted generation; a failed one once. A refusal never is."""

    attempts: Annotated[int, Field(ge=1)] = 6
    first_pause_s: Seconds = 0.5
    """Doubled after every attempt."""
    longest_pause_s: Seconds = 30.0
    budget_s: Seconds = 3600.0
    """No attempt starts later than this after the first."""


def pause_s(
    error: RolloutError, attempt: int, alike: int, elapsed_s: float, config: RetryConfig
) -> float | None:
    """Seconds to wait after the attempt-th attempt (from 1) failed with `error`, as `alike` of them
    did, this one included; None to give up.

    The pause is drawn from the whole range up to its bound, so that many clients do not come back
    at the same moment; a server's Retry-After is its least.
    """
    if not isinstance(error, EngineError):
        return None
    if attempt >= config.attempts:
        return None
    if error.max_attempts is not None and alike >= error.max_attempts:
        return None
    # the exponent has a bound too: a float cannot hold the doublings of a long night
    bound = min(config.longest_pause_s, config.first_pause_s * 2.0 ** min(attempt - 1, 64))
    pause = max(error.retry_after_s, random.uniform(0, bound))
    in_budget = elapsed_s + pause <= config.budget_s or not error.counts
    return pause if in_budget else None

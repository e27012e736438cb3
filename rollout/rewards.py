"""Rewards: a function of the user's that scores each rollout as it is collected."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from rollout.collect import Reward
from rollout.errors import ConfigError
from rollout.record import Rollout


def load_reward(path: str) -> Reward:
    """The function at "module:function", as something to await.

    It takes a `Rollout` (kept dataset columns are JSON in `extra`) and returns a number or None.
    A plain function runs in a thread, so that it does not hold up other rollouts.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"reward: got {path!r}, must look like module:function")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except ImportError as error:
        raise ConfigError(f"reward: module {module_name!r} cannot be imported: {error}") from error
    except AttributeError as error:
        raise ConfigError(f"reward: {module_name!r} has no {name!r}") from error
    if not callable(function):
        raise ConfigError(f"reward: {path} is {type(function).__name__}, must be a function")
    return function if inspect.iscoroutinefunction(function) else _in_thread(function)


def _in_thread(function: Callable[[Rollout], Any]) -> Reward:
    async def reward(rollout: Rollout) -> float | None:
        value: float | None = await asyncio.to_thread(function, rollout)
        return value

    return reward

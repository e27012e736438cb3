"""Rewards: a function of the user's that scores each rollout as it is collected."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
from collections.abc import Awaitable, Callable
from typing import Any

from rollout.collect import Reward
from rollout.errors import ConfigError
from rollout.record import Rollout


def load_reward(path: str) -> Reward:
    """The function at "module:function", as something to await.

    It takes a `Rollout` (kept dataset columns are JSON in `extra`) and returns a finite number or
    None. A plain function runs in a thread, so that it does not hold up other rollouts.
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
    asks = function if inspect.iscoroutinefunction(function) else _in_thread(function)

    async def reward(rollout: Rollout) -> float | None:
        value = await asks(rollout)
        return None if value is None else _number(value, f"{path}: for {rollout.rollout_id}")

    return reward


def _in_thread(function: Callable[[Rollout], Any]) -> Callable[[Rollout], Awaitable[Any]]:
    return lambda rollout: asyncio.to_thread(function, rollout)


def _number(value: Any, where: str) -> float:
    try:
        number = float(value)  # numpy's and torch's scalars are numbers too
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"reward {where} it returned {value!r}, must be a finite number or None")
    return number

"""Facts: what a caller says about a dump that does not say it itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout.errors import BadFacts, BadValue

SAMPLER = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens")
"""The settings that every rollout has."""

ALL_FACTS = (*SAMPLER, "finish_reason")
"""What every rollout says of its sampling."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """How the rollouts of one dump were sampled; None = not said.

    What the dump says itself need not be said here; said differently it is an error.
    """

    temperature: float | None = None
    top_p: float | None = None  # 1.0 = off
    top_k: int | None = None  # -1 = no limit
    min_p: float | None = None  # 0.0 = off
    max_new_tokens: int | None = None
    finish_reason: str | None = None  # stop, length or abort
    reward_key: str | None = None  # which of several rewards is the reward


def complete(
    said: Mapping[str, Any], facts: Facts, where: str, needed: tuple[str, ...] = SAMPLER
) -> dict[str, Any]:
    """The `needed` facts, from the dump or else from the caller.

    Raises `BadFacts` for those that neither says, and where the two disagree; `BadValue` for a
    number that no shard can hold.
    """
    values = {}
    for name in needed:
        dump, caller = said.get(name), getattr(facts, name)
        if dump is not None and caller is not None and not _same(dump, caller):
            raise BadFacts(
                f"{where}: {name} is {dump!r} there, and {caller!r} was given; give none, or "
                "import dumps of different settings one by one"
            )
        values[name] = caller if dump is None else dump
    if missing := [name for name, value in values.items() if value is None]:
        options = " ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise BadFacts(
            f"{where}: does not say {', '.join(missing)}, and that is never guessed; give what it "
            f"was sampled with: rollout import {options}, or Facts({missing[0]}=…)"
        )
    for name, value in values.items():
        if isinstance(value, int) and not -(2**31) <= value < 2**31:
            raise BadValue(f"{where}: {name} is {value}, must fit into 32 bits")
    return values


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return bool(np.float32(one) == np.float32(other))  # as a shard holds it
    return bool(one == other)

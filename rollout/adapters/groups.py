"""What trainers expect of many rollouts together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from rollout.errors import NotExpressible
from rollout.record import Rollout
from rollout.rules import check_content, check_format
from rollout.words import float32_in_words


def checked(rollouts: Iterable[Rollout]) -> Iterator[Rollout]:
    """The rollouts as they come; raises the `DataError` of the first rule that one breaks.

    A shard of other origin may hold what no trainer notices, such as a sampled id that is outside
    its support.
    """
    for rollout in rollouts:
        check_format(rollout)
        check_content(rollout)
        yield rollout


def grouped(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """The rollouts of a prompt side by side, prompts in the order of their first rollout.

    A run stores rollouts as they end; trainers cut a batch into groups by position.
    """
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.prompt_id, []).append(rollout)
    return [r for group in groups.values() for r in sorted(group, key=lambda r: r.sample_index)]


def check_finite_rewards(rollouts: Iterable[Rollout], trainer: str) -> None:
    """Raise `NotExpressible` for a reward that is NaN or infinite."""
    for rollout in rollouts:
        if rollout.reward is not None and not math.isfinite(rollout.reward):
            raise NotExpressible(
                f"{rollout.rollout_id}: reward is {rollout.reward}, must be finite: it would make "
                f"the loss of a whole batch of {trainer} so; score it anew, or leave it out"
            )


def check_one_temperature(rollouts: Sequence[Rollout], trainer: str) -> None:
    """Raise `NotExpressible` unless all rollouts have the temperature of the first."""
    for rollout in rollouts:
        if rollout.temperature != rollouts[0].temperature:
            first, other = (float32_in_words(r.temperature) for r in (rollouts[0], rollout))
            raise NotExpressible(
                f"{rollout.rollout_id}: temperature {other}, but {first} in "
                f"{rollouts[0].rollout_id}; {trainer} has one temperature for all, so choose one: "
                f"rollout export --temperature {first}, or run.where(sampled_at({first}))"
            )

"""The fields of a `Sample` of slime or miles, each read with its meaning there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollout.adapters.arrays import flags, float32, plain
from rollout.adapters.carried import Int32
from rollout.adapters.facts import Facts
from rollout.errors import BadFacts, BadValue, LengthMismatch, NullValue
from rollout.record import WeightSpan

STATUS = {"stop": "completed", "length": "truncated", "abort": "aborted"}
FINISH_REASON = {status: reason for reason, status in STATUS.items()}


class _Span(msgspec.Struct):
    version: str | int
    abs_start: Int32  # in the whole sequence
    abs_end: Int32


def need(sample: Mapping[str, Any], key: str, where: str) -> Any:
    if sample.get(key) is None:
        raise NullValue(f"{where}: no {key}, which every sample needs")
    return sample[key]


def response_length(sample: Mapping[str, Any], total: int, where: str) -> int:
    length = need(sample, "response_length", where)
    if not isinstance(length, int) or not 0 <= length <= total:
        raise LengthMismatch(
            f"{where}: response_length is {length!r}, must be in [0, {total}], the number of tokens"
        )
    return length


def loss_mask(sample: Mapping[str, Any], length: int, where: str) -> NDArray[np.int8]:
    """As the trainer uses it: none is all ones, and a removed sample is all zeros."""
    removed = sample.get("remove_sample", False)
    if not isinstance(removed, bool):
        raise BadValue(f"{where}: remove_sample must be true or false, got {removed!r}")
    if removed:
        return np.zeros(length, np.int8)
    if sample.get("loss_mask") is None:
        return np.ones(length, np.int8)
    return flags(sample["loss_mask"], f"{where}: loss_mask")


def logprobs(sample: Mapping[str, Any], length: int, where: str) -> NDArray[np.float32]:
    values = sample.get("rollout_log_probs")
    if values is None and length:
        raise NullValue(
            f"{where}: no rollout_log_probs; without the engine's logprobs there is nothing to "
            "compare a replay with"
        )
    return float32([] if values is None else values, f"{where}: rollout_log_probs")


def finish_reason(sample: Mapping[str, Any], where: str) -> str:
    status = need(sample, "status", where)
    if not isinstance(status, str) or status not in FINISH_REASON:
        raise BadValue(
            f"{where}: status is {status!r}, must be one of {tuple(FINISH_REASON)}; "
            "others hold no finished sampling"
        )
    return FINISH_REASON[status]


def reward(sample: Mapping[str, Any], facts: Facts, where: str) -> float | None:
    reward = sample.get("reward")
    if isinstance(reward, Mapping):
        if facts.reward_key is None:
            raise BadFacts(
                f"{where}: has the rewards {sorted(reward)}; say which one is the reward: "
                "rollout import --reward-key NAME, or Facts(reward_key=…)"
            )
        reward = need(reward, facts.reward_key, f"{where}, reward")
    if reward is not None and not isinstance(reward, (int, float)):
        raise BadValue(f"{where}: reward must be a number, got {reward!r}")
    return None if reward is None else float(reward)


def spans(
    sample: Mapping[str, Any], prompt: int, length: int, where: str
) -> tuple[tuple[WeightSpan, ...], list[str] | None]:
    """Spans of weight versions; and the versions, where it is not known which token has which.

    slime, and miles at first, append a version for every call; later miles a list of spans, in
    positions of the whole sequence.
    """
    try:
        calls = msgspec.convert(
            plain(sample.get("weight_versions")), list[str | int | list[_Span]] | None
        )
    except msgspec.ValidationError as error:
        raise BadValue(f"{where}: weight_versions must be names or spans: {error}") from error
    calls = calls or []
    versions = [str(call) for call in calls if not isinstance(call, list)]
    if len(set(versions)) > 1 or (versions and len(versions) < len(calls)):
        return (), versions
    if versions:
        return (WeightSpan(versions[0], 0, length),), None
    spans = [span for call in calls if isinstance(call, list) for span in call]
    return tuple(
        WeightSpan(str(s.version), s.abs_start - prompt, s.abs_end - prompt) for s in spans
    ), None


def text(sample: Mapping[str, Any], key: str, where: str) -> str | None:
    """A text, None if it is empty: then the trainer knew none."""
    value = sample.get(key)
    if value is not None and not isinstance(value, str):
        raise BadValue(f"{where}: {key} must be a text, got {type(value).__name__}")
    return value or None

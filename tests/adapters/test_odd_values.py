"""Any field of a dump may hold anything: that is a reason to reject it, never a crash."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from builders import make_two_turns

from rollout.adapters.arrays import plain
from rollout.adapters.facts import Facts
from rollout.adapters.miles import from_miles, to_miles
from rollout.adapters.slime import from_slime, to_slime
from rollout.adapters.vllm import from_vllm
from rollout.errors import RolloutError
from rollout.record import Rollout
from rollout.schema import to_batch

FACTS = Facts(temperature=0.5, top_p=0.875, top_k=2, min_p=0.0, max_new_tokens=8)
JSON_VALUES = [None, True, -1, 0, 3, 2**31, 2**40, 2**70, 1.5, float("nan"), float("inf"), "", "x"]
JSON_LISTS = [[], [1], [[1]], [None], ["a"], [1, "a"], [2**70], [1.5, None], {}, {"a": 1}]
OTHERS = [b"z", (1, 2), torch.tensor([1.5]), torch.zeros(2, 2), np.zeros(3), np.array(["a"])]


def paths(value: Any) -> Iterator[tuple[Any, ...]]:
    """Where there is something in `value`: of a list, the first place."""
    keys = (
        value
        if isinstance(value, dict)
        else range(min(len(value), 1))
        if isinstance(value, list)
        else ()
    )
    for key in keys:
        yield (key,)
        yield from ((key, *rest) for rest in paths(value[key]))


def with_value(sample: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(sample)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


def of_the_trainer(sample: dict[str, Any]) -> dict[str, Any]:
    absent = {"metadata": {}, "multimodal_inputs": None, "remove_sample": False, "label": None}
    return sample | absent


def is_stored_or_rejected(read: Callable[[list[Any]], Iterator[Rollout]], sample: Any) -> bool:
    """Whether it is a rollout that a shard can hold; anything but a `RolloutError` fails."""
    json.dumps(plain(sample))  # as rejected.jsonl keeps it
    try:
        rollouts = list(read([sample]))
    except RolloutError:
        return False
    to_batch(rollouts)
    return True


@pytest.mark.parametrize("own", [True, False], ids=["of the trainer", "exported"])
@pytest.mark.parametrize(
    ("write", "read"),
    [
        pytest.param(to_slime, from_slime, id="slime"),
        pytest.param(to_miles, from_miles, id="miles"),
    ],
)
def test_a_sample_with_an_odd_value_is_stored_or_rejected(
    write: Callable[..., Any], read: Callable[..., Iterator[Rollout]], own: bool
) -> None:
    (sample,) = write([make_two_turns()])
    if own:
        sample = of_the_trainer(sample)
    facts = FACTS if own else None
    outcomes = [
        is_stored_or_rejected(lambda s: read(s, facts), with_value(sample, path, value))
        for path in paths(sample)
        for value in [*JSON_VALUES, *JSON_LISTS, *OTHERS]
    ]
    assert {*outcomes} == {True, False}


def test_an_answer_of_vllm_with_an_odd_value_is_stored_or_rejected() -> None:
    answer = {
        "id": "q",
        "request": {
            "token_ids": [1, 3],
            "sampling_params": {
                "temperature": 0.7,
                "top_p": 0.9,
                "top_k": 20,
                "min_p": 0.0,
                "max_tokens": 8,
                "seed": 5,
                "stop": ["a"],
                "n": 1,
            },
        },
        "response": {
            "choices": [
                {
                    "index": 0,
                    "token_ids": [9],
                    "sampling_mask": [[5, 9]],
                    "sampling_mask_logprobs": [[-0.28768208, -1.3862944]],
                    "logprobs": {"content": [{"logprob": -1.3862944}]},
                    "finish_reason": "stop",
                    "stop_reason": None,
                    "text": "ok",
                }
            ]
        },
    }
    outcomes = [
        is_stored_or_rejected(from_vllm, with_value(answer, path, value))
        for path in paths(answer)
        for value in [*JSON_VALUES, *JSON_LISTS]
    ]
    assert {*outcomes} == {True, False}

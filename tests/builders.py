"""Rollouts and engines made by hand, for tests that need one exactly so."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from rollout.adapters.sglang_jsonl import parse_line
from rollout.engines.base import Completion, EngineInfo
from rollout.prompts import Prompt
from rollout.record import Rollout, WeightSpan
from rollout.sampling import SamplingParams
from rollout.support import Support

DATA = Path(__file__).parent / "data"
RECORDED = sorted(path.name for path in DATA.glob("sglang_*"))


def make_prompt(*ids: int, **changes: Any) -> Prompt:
    return Prompt("7", np.array(ids, np.int32), **changes)


def make_rollout(prompt_id: str = "7", sample_index: int = 0, **changes: Any) -> Rollout:
    """Three output tokens: two ids to choose from, a forced token, a singleton."""
    support = Support.from_rows([[5, 9], [], [2]])
    plain = Rollout(
        rollout_id=f"{prompt_id}:{sample_index}",
        prompt_id=prompt_id,
        sample_index=sample_index,
        prompt_ids=np.array([1, 3], np.int32),
        output_ids=np.array([9, 8, 2], np.int32),
        loss_mask=np.array([1, 0, 1], np.int8),
        sampling_logprobs=np.log(np.array([0.25, 1, 1], np.float32)),
        support=support,
        full_logprobs=np.log(np.array([0.2, 1, 0.9], np.float32)),
        support_logprobs=np.log(np.array([0.75, 0.25, 1], np.float32)),
        temperature=0.5,
        top_p=0.875,
        top_k=2,
        min_p=0.0,
        max_new_tokens=3,
        seed=11,
        sampling_params='{"temperature":0.5}',
        finish_reason="stop",
        stop_match="2",
        weight_versions=(WeightSpan("v1", 0, 3),),
        engine_meta='{"engine":"test"}',
        prompt_text="why",
        output_text="because",
        created_us=1_700_000_000_000_000,
        latency_ms=2.5,
    )
    return replace(plain, **changes)


def make_two_turns(prompt_id: str = "7", sample_index: int = 0, **changes: Any) -> Rollout:
    """A turn of three tokens, two forced ones, a turn of two after the weights moved.

    The last token of the first turn is sampled and not trained on, and had no alternative.
    """
    turns: dict[str, Any] = {
        "output_ids": np.array([9, 5, 2, 40, 41, 7, 2], np.int32),
        "loss_mask": np.array([1, 1, 0, 0, 0, 1, 1], np.int8),
        "sampling_logprobs": np.log(np.array([0.25, 0.5, 1, 1, 1, 0.125, 1], np.float32)),
        "support": Support.from_rows([[5, 9], [5, 6], [2], [], [], [8, 7, 1], [2]]),
        "full_logprobs": np.log(np.array([0.2, 0.4, 0.9, 0.5, 0.5, 0.1, 0.7], np.float32)),
        "support_logprobs": np.log(
            np.array([0.75, 0.25, 0.5, 0.5, 1, 0.5, 0.125, 0.375, 1], np.float32)
        ),
        "max_new_tokens": 8,
        "weight_versions": (WeightSpan("v1", 0, 3), WeightSpan("v2", 5, 7)),
        "reward": 0.5,
    }
    return make_rollout(prompt_id, sample_index, **(turns | changes))


def assert_same_rollout(got: Rollout, wanted: Rollout) -> None:
    """Field by field, with values and dtypes."""
    for name, value in vars(wanted).items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(getattr(got, name), value, err_msg=name, strict=True)
        elif isinstance(value, Support):
            np.testing.assert_array_equal(got.support.ids, value.ids, strict=True)
            np.testing.assert_array_equal(got.support.offsets, value.offsets, strict=True)
        else:
            assert getattr(got, name) == value, name


def recorded_lines(name: str) -> list[dict[str, Any]]:
    """The rollouts recorded from a real server, one dict per line."""
    with gzip.open(DATA / name / "rollouts.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def recorded_rollouts(name: str) -> list[Rollout]:
    """The same lines as rollouts: twelve at each of the temperatures 1.0, 0.7 and 1.3."""
    return [parse_line(json.dumps(line).encode(), "unused") for line in recorded_lines(name)]


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


class ScriptedEngine:
    """An engine that answers from a list; an exception in it is raised."""

    def __init__(self, *answers: Completion | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[list[int], SamplingParams]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(name="scripted", version="1", model="none", max_top_k=None)

    def resolve(self, params: SamplingParams) -> SamplingParams:
        return params

    def check(self, params: SamplingParams) -> None:
        params.check_replayable()

    async def generate(self, prompt: Prompt, params: SamplingParams) -> Completion:
        self.asked.append((prompt.ids.tolist(), params))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def make_completion(**changes: Any) -> Completion:
    """Two output tokens: two ids to choose from, then a singleton."""
    plain = Completion(
        output_ids=np.array([9, 2], np.int32),
        support=Support.from_rows([[5, 9], [2]]),
        sampling_logprobs=np.log(np.array([0.25, 1], np.float32)),
        full_logprobs=None,
        support_logprobs=None,
        finish_reason="stop",
        text="ok",
        engine_meta={"engine": "scripted"},
    )
    return replace(plain, **changes)

"""RolloutBuilder: laws of any sequence of appends, and a real engine that a policy agrees with."""

from __future__ import annotations

import asyncio
import json
import runpy
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from builders import assert_same_rollout
from hypothesis import given, settings
from hypothesis import strategies as st

from replay import Policy, ReplayConfig, make_report, verify
from rollout import RolloutBuilder, open_run
from rollout.config import EmbeddedConfig
from rollout.engines.base import Completion
from rollout.engines.embedded import EmbeddedEngine
from rollout.record import Rollout, WeightSpan
from rollout.rules import check_content, check_format
from rollout.sampling import SamplingParams
from rollout.support import Support
from rollout.writer import RunWriter

PARAMS = SamplingParams(temperature=0.5, top_k=2, max_new_tokens=4)


@st.composite
def completions(draw: st.DrawFn, columns: bool) -> Completion:
    """An honest completion of up to five tokens, with every optional column or none."""
    length = draw(st.integers(0, 5))
    rows, outputs, selected, per_id = [], [], [], []
    for _ in range(length):
        row = draw(st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True))
        weights = np.array(draw(st.lists(st.integers(1, 9), min_size=4, max_size=4))[: len(row)])
        logprobs = np.log(weights / weights.sum())
        choice = draw(st.integers(0, len(row) - 1))
        rows.append(row)
        outputs.append(row[choice])
        selected.append(logprobs[choice])
        per_id += logprobs.tolist()
    return Completion(
        output_ids=np.array(outputs, np.int32),
        support=Support.from_rows(rows),
        sampling_logprobs=np.array(selected, np.float32),
        full_logprobs=np.array(selected, np.float32) if columns else None,
        support_logprobs=np.array(per_id, np.float32) if columns else None,
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        weight_versions=(WeightSpan(draw(st.sampled_from("ab")), 0, length),) if columns else (),
        engine_meta={"engine": "test"},
    )


@st.composite
def built(draw: st.DrawFn) -> tuple[RolloutBuilder, Sequence[Completion | list[int]]]:
    """A builder after any sequence of appends, and what was appended."""
    columns = draw(st.booleans())
    forced = st.lists(st.integers(0, 99), max_size=4)
    parts = draw(st.lists(st.one_of(completions(columns), forced), max_size=6))
    parts.append(draw(completions(columns)))
    builder = RolloutBuilder("7", draw(st.lists(st.integers(0, 99), min_size=1, max_size=3)))
    for part in parts:
        if isinstance(part, Completion):
            builder.append_sampled(part, PARAMS)
        else:
            builder.append_forced(part)
    return builder, parts


@given(built())
def test_any_sequence_of_appends_stays_aligned(
    made: tuple[RolloutBuilder, Sequence[Completion | list[int]]],
) -> None:
    builder, parts = made
    got = builder.build()
    check_format(got)
    check_content(got, vocab_size=100)
    assert np.array_equal(builder.prompt_ids, np.concatenate([got.prompt_ids, got.output_ids]))
    t = 0
    for part in parts:
        ids = part.output_ids.tolist() if isinstance(part, Completion) else part
        here = slice(t, t + len(ids))
        assert got.output_ids[here].tolist() == ids
        assert got.is_forced[here].tolist() == [not isinstance(part, Completion)] * len(ids)
        if isinstance(part, Completion):
            assert [got.support[t + i].tolist() for i in range(len(ids))] == [
                part.support[i].tolist() for i in range(len(ids))
            ]
            assert np.array_equal(got.sampling_logprobs[here], part.sampling_logprobs)
        t += len(ids)
    assert t == got.num_output_tokens == builder.num_output_tokens


@settings(max_examples=25)
@given(built())
def test_what_is_built_is_read_back_equal(
    made: tuple[RolloutBuilder, Sequence[Completion | list[int]]],
) -> None:
    wanted = made[0].build()
    with tempfile.TemporaryDirectory() as folder:
        with RunWriter(Path(folder), {}) as writer:
            writer.write(wanted)
        (got,) = open_run(Path(folder))
        assert_same_rollout(got, wanted)


async def two_turns(model: str) -> Rollout:
    params = SamplingParams(temperature=0.7, top_k=20, max_new_tokens=12, ignore_eos=True)
    async with EmbeddedEngine(model, EmbeddedConfig()) as engine:
        builder = RolloutBuilder("0", [0, 20, 30])
        for seed, tool in [(1, [40, 41, 42]), (2, [50])]:
            asked = params.model_copy(update={"sampling_seed": seed})
            builder.append_sampled(await engine.generate(builder.prompt, asked), asked)
            builder.append_forced(tool)
        return builder.build()


def test_two_turns_of_the_embedded_engine_replay_to_what_it_recorded(tiny_model_path: Path) -> None:
    got = asyncio.run(two_turns(str(tiny_model_path)))
    assert got.num_output_tokens == 12 + 3 + 12 + 1
    config = ReplayConfig(dtype="float32", device="cpu")
    policy = Policy.load(str(tiny_model_path), dtype="float32", device="cpu")
    verified = verify([got], policy, config)
    report = make_report(verified, config.gates, {})
    assert report.as_dict()["scored_tokens"] == 24
    assert verified.tokens.position.tolist() == [*range(12), *range(15, 27)]
    assert np.abs(verified.tokens.log_ratio).max() <= 1e-4
    assert report.as_dict()["verdict"] == "consistent"


def test_the_example_stores_a_conversation(tiny_model_path: Path, tmp_path: Path) -> None:
    example = Path(__file__).parent.parent / "examples" / "multi_turn.py"
    runpy.run_path(str(example))["main"](str(tiny_model_path), str(tmp_path / "run"))
    (got,) = open_run(tmp_path / "run")
    first, second = json.loads(got.extra)["turns"]
    assert (first["start"], second["end"]) == (0, got.num_output_tokens)
    assert got.is_forced.sum() == second["start"] - first["end"] > 0

"""prime-rl: training samples, packed micro batches, and their files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from builders import RECORDED, assert_same_rollout, make_rollout, make_two_turns, recorded_rollouts

from rollout import errors
from rollout.adapters.facts import Facts
from rollout.adapters.prime_rl import READER, from_prime_rl, to_prime_rl, write
from rollout.adapters.prime_rl_types import Filler, MicroBatch, SamplingMask
from rollout.record import Rollout

FACTS = Facts(top_p=0.875, top_k=2, min_p=0.0, max_new_tokens=8, finish_reason="stop")


def int32(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def facts_of(rollout: Rollout) -> Facts:
    names = ("top_p", "top_k", "min_p", "max_new_tokens", "finish_reason")
    return Facts(**{name: getattr(rollout, name) for name in names})


def as_it_can_be_said(rollout: Rollout, back: Rollout) -> Rollout:
    """`rollout` without what a `TrainingSample` has no place for."""
    unsaid = {
        "full_logprobs": None,
        "seed": None,
        "stop_match": None,
        "weight_versions": (),
        "prompt_text": None,
        "output_text": None,
        "reward": None,
        "extra": "{}",
        "latency_ms": 0.0,
        "engine_meta": '{"engine":"vllm","source":"import"}',
        "created_us": back.created_us,
        "sampling_params": back.sampling_params,
    }
    return replace(rollout, **unsaid)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_sets_come_back_as_far_as_a_sample_can_say_it(name: str, tmp_path: Path) -> None:
    rollouts = recorded_rollouts(name)
    write(rollouts, tmp_path / "samples.bin")
    items = list(READER.items(tmp_path / "samples.bin"))
    assert len(items) == 36
    for (number, item), wanted in zip(items, rollouts, strict=True):
        got = READER.parse(item, number, facts_of(wanted))
        assert_same_rollout(got, as_it_can_be_said(wanted, got))


def test_two_turns_with_forced_tokens_come_back_as_far_as_a_sample_can_say_it() -> None:
    wanted = make_two_turns()
    (got,) = from_prime_rl(to_prime_rl([wanted]), facts_of(wanted))
    assert_same_rollout(got, as_it_can_be_said(wanted, got))


def test_a_sample_has_the_fields_of_the_source_over_the_whole_sequence() -> None:
    (sample,) = to_prime_rl([make_two_turns()], env_name="math")
    assert msgspec.structs.asdict(sample) == {
        "token_ids": [1, 3, 9, 5, 2, 40, 41, 7, 2],
        "mask": [False, False, True, True, False, False, False, True, True],
        "logprobs": [
            0,
            0,
            -1.3862943649291992,
            -0.6931471824645996,
            0,
            0,
            0,
            -2.0794415473937988,
            0,
        ],
        "temperatures": [0.5] * 9,
        "env_name": "math",
        **dict.fromkeys(("ref_logprobs", "mm_refs", "routed_experts", "mm_token_type_ids")),
        **dict.fromkeys(("rl_weights", "ce_weights", "ref_kl_weights", "advantages")),
        "sampling_mask": SamplingMask(
            ids=int32(5, 9, 5, 6, 2, 8, 7, 1, 2),
            counts=int32(0, 0, 2, 2, 1, 0, 0, 3, 1),
            logprobs=make_two_turns().support_logprobs.tobytes(),
        ),
        "trace_id": "7:0",
        "branch_index": 0,
    }
    assert all(type(flag) is bool for flag in sample.mask)


def test_a_file_is_a_msgpack_list_of_arrays_with_one_element_per_field(tmp_path: Path) -> None:
    notes = write([make_rollout()], tmp_path / "samples.bin")
    ((*said, mask, trace_id, branch_index),) = msgspec.msgpack.decode(
        (tmp_path / "samples.bin").read_bytes()
    )
    assert (len(said), trace_id, branch_index) == (13, "7:0", 0)
    assert said[:2] == [[1, 3, 9, 8, 2], [False, False, True, False, True]]
    assert said[5:] == [None] * 8
    assert mask[:2] == [int32(5, 9, 2), int32(0, 0, 2, 0, 1)]
    advantages, left = notes
    assert advantages == "the samples have no advantages: set them before prime-rl trains on these"
    assert left.startswith(
        "why each rollout ended, rewards, weight versions and texts have no place"
    )


def test_a_release_with_more_fields_is_read(tmp_path: Path) -> None:
    write([make_rollout()], tmp_path / "a.bin")
    (fields,) = msgspec.msgpack.decode((tmp_path / "a.bin").read_bytes())
    (tmp_path / "b.bin").write_bytes(msgspec.msgpack.encode([[*fields, {"new": 1}]]))
    ((_, sample),) = READER.items(tmp_path / "b.bin")
    assert sample.trace_id == "7:0"


def test_structs_of_prime_rl_itself_are_read() -> None:
    ours = msgspec.structs.asdict(to_prime_rl([make_rollout()])[0])
    theirs = msgspec.defstruct("TrainingSample", list(ours), array_like=True)(**ours)
    (rollout,) = from_prime_rl([theirs], FACTS)
    assert rollout.support.counts.tolist() == [2, 0, 1]
    with pytest.raises(errors.BadValue, match="^sample 0: must be a TrainingSample"):
        list(from_prime_rl([3], FACTS))


def test_a_trace_of_prime_rls_own_gives_the_id() -> None:
    (sample,) = to_prime_rl([make_rollout()])
    named = [
        msgspec.structs.replace(sample, trace_id=trace_id, branch_index=branch)
        for trace_id, branch in (("ab12", 2), ("ab12", None), (None, None))
    ]
    ids = [r.rollout_id for r in from_prime_rl(named, FACTS)]
    assert ids == ["ab12:2", "ab12:0", "sample-000002:0"]


def test_temperatures_of_tokens_that_were_not_sampled_mean_nothing() -> None:
    (sample,) = to_prime_rl([make_rollout()])
    sample.temperatures = [1.0, 1.0, 0.5, 1.0, 0.5]
    (rollout,) = from_prime_rl([sample], FACTS)
    assert rollout.temperature == 0.5


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        pytest.param({"mask": [True]}, errors.LengthMismatch, "1 mask for 5", id="mask short"),
        pytest.param(
            {"temperatures": [0.5, 0.5, 0.5, 0.5, 0.7]},
            errors.BadValue,
            r"temperatures \[0.5, 0.7\]",
            id="two temperatures",
        ),
        pytest.param({"mm_refs": []}, errors.NotReplayable, "images", id="images"),
        pytest.param({"sampling_mask": None}, errors.MissingSupport, "no sampling_mask", id="none"),
        pytest.param(
            {"mask": [False, False, True, True, True]},
            errors.MissingSupport,
            "output token 1 has loss_mask 1",
            id="full vocabulary amid the output",
        ),
        pytest.param(
            {"mask": [False, True, True, False, True]},
            errors.MissingSupport,
            "token 1 is trained on and has a count of 0, which prime-rl reads as the whole",
            id="full vocabulary at the start",
        ),
        pytest.param(
            {"sampling_mask": SamplingMask(int32(5, 9), int32(0, 0, 2))},
            errors.LengthMismatch,
            "3 counts for 5",
            id="counts short",
        ),
        pytest.param(
            {"sampling_mask": SamplingMask(int32(5), int32(0, 0, 2, 0, 1))},
            errors.BadOffsets,
            "end at 3",
            id="ids short",
        ),
        pytest.param(
            {"sampling_mask": SamplingMask(b"123", int32(0, 0, 2, 0, 1))},
            errors.BadOffsets,
            "3 bytes of ids",
            id="ids cut",
        ),
        pytest.param(
            {"sampling_mask": SamplingMask(int32(5, 9, 2), int32(0, 0, 2, 0, 1), b"1234")},
            errors.LengthMismatch,
            "4 bytes of logprobs for 12 of ids",
            id="logprobs short",
        ),
        pytest.param(
            {"sampling_mask": SamplingMask(b"", int32(0, 0, 0, 0, 0)), "mask": [False] * 5},
            errors.MissingSupport,
            "nothing was sampled",
            id="nothing sampled",
        ),
        pytest.param(
            {"sampling_mask": SamplingMask(int32(1, 5, 9, 2), int32(1, 0, 2, 0, 1))},
            errors.EmptyPrompt,
            "no prompt",
            id="no prompt",
        ),
    ],
)
def test_a_broken_sample_says_what_is_wrong(
    change: dict[str, Any], error: type[errors.RolloutError], words: str
) -> None:
    (sample,) = to_prime_rl([make_rollout()])
    with pytest.raises(error, match=words):
        list(from_prime_rl([msgspec.structs.replace(sample, **change)], FACTS))


def test_what_a_sample_does_not_say_must_be_said() -> None:
    samples = to_prime_rl([make_rollout()])
    with pytest.raises(errors.BadFacts, match="does not say top_p, top_k, .*--finish-reason"):
        list(from_prime_rl(samples))
    with pytest.raises(errors.BadFacts, match="temperature is 0.5 there, and 0.7 was given"):
        list(from_prime_rl(samples, replace(FACTS, temperature=0.7)))


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        pytest.param(
            make_rollout(rollout_id="7:0#abort0", finish_reason="abort"),
            "^7:0#abort0: aborted, .*--without-aborted",
            id="aborted",
        ),
        pytest.param(
            make_rollout(
                support=make_rollout().support.take(np.array([1, 1, 1])),
                support_logprobs=None,
                loss_mask=np.zeros(3, np.int8),
            ),
            "^7:0: no token of it was sampled",
            id="nothing sampled",
        ),
    ],
)
def test_what_a_sample_cannot_say_is_not_exported(rollout: Rollout, words: str) -> None:
    with pytest.raises(errors.NotExpressible, match=words):
        to_prime_rl([rollout])


def test_forced_tokens_before_the_first_sampled_one_become_prompt_and_the_writer_says_so(
    tmp_path: Path,
) -> None:
    order = np.array([1, 0, 2])
    plain = make_rollout()
    late = replace(
        plain,
        output_ids=plain.output_ids[order],
        loss_mask=plain.loss_mask[order],
        sampling_logprobs=plain.sampling_logprobs[order],
        support=plain.support.take(order),
    )
    (back,) = from_prime_rl(to_prime_rl([late]), FACTS)
    assert (back.prompt_ids.tolist(), back.output_ids.tolist()) == ([1, 3, 8], [9, 2])
    *_, note = write([late, make_rollout("8")], tmp_path / "s")
    assert note.startswith("1 rollouts start with forced tokens")


def packed(**changes: Any) -> MicroBatch:
    """Two sequences, the second with two tokens of padding, as prime-rl packs them."""
    batch = MicroBatch(
        input_ids=[1, 3, 9, 8, 2, 6, 5, 4, 1, 1],
        loss_mask=[False, False, True, False, True, False, True, True, False, False],
        advantages=[0.0, 0.0, 1.0, 0.0, 1.0, 0.0, -1.0, -1.0, 0.0, 0.0],
        inference_logprobs=[0, 0, -1.3862944, 0, 0, 0, -0.6931472, 0, 0, 0],
        position_ids=[0, 1, 2, 3, 4, 0, 1, 2, 0, 1],
        sequence_lengths=[5, 5],
        temperatures=[0.5] * 5 + [0.7] * 3 + [1.0] * 2,
        env_names=["math"] * 5 + ["code"] * 3 + [""] * 2,
        seq_lens=[5, 5],
        sampling_mask=SamplingMask(int32(5, 9, 2, 5, 7, 4), int32(0, 0, 2, 0, 1, 0, 2, 1, 0, 0)),
        trace_ids=["aa", "bb"],
        branch_indices=[0, 3],
    )
    return msgspec.structs.replace(batch, **changes)


def test_a_micro_batch_is_unpacked_and_its_padding_is_not_data(tmp_path: Path) -> None:
    file = tmp_path / "rank_0.bin"
    file.write_bytes(msgspec.msgpack.encode([packed(), packed(trace_ids=["cc", "dd"])]))
    samples = [item for _, item in READER.items(file)]
    first, second, *_ = from_prime_rl(samples, FACTS)
    assert [s.trace_id for s in samples] == ["aa", "bb", "cc", "dd"]
    assert (first.prompt_ids.tolist(), first.output_ids.tolist()) == ([1, 3], [9, 8, 2])
    assert (second.prompt_ids.tolist(), second.output_ids.tolist()) == ([6], [5, 4])
    assert (first.temperature, second.temperature) == (0.5, 0.7)
    assert second.support.ids.tolist() == [5, 7, 4]
    assert (second.rollout_id, second.extra) == ("bb:3", '{"env_name":"code"}')


def test_a_sequence_that_nothing_is_trained_on_is_filler_and_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rank_0.bin"
    file.write_bytes(msgspec.msgpack.encode([packed(loss_mask=[False] * 10)]))
    samples = [item for _, item in READER.items(file)]
    assert all(isinstance(sample, Filler) for sample in samples)
    with pytest.raises(errors.BadValue, match="fills batches with copies"):
        READER.parse(samples[0], 0, FACTS)
    assert json.loads(READER.body(samples[0]))["sample"][0] == [1, 3, 9, 8, 2]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        pytest.param(
            {"sequence_lengths": [5, 4]}, errors.LengthMismatch, "of 9 tokens", id="lengths"
        ),
        pytest.param(
            {"sequence_lengths": [11, -1]}, errors.BadValue, "not be negative", id="negative"
        ),
        pytest.param(
            {"trace_ids": ["aa"]},
            errors.LengthMismatch,
            "1 trace_ids for 2 sequences",
            id="traces",
        ),
        pytest.param(
            {"env_names": []}, errors.LengthMismatch, "env_names are of 0", id="env_names"
        ),
        pytest.param(
            {"sampling_mask": SamplingMask(b"", int32(0))},
            errors.LengthMismatch,
            "sampling_mask.counts are of 1",
            id="counts",
        ),
        pytest.param(
            {"sampling_mask": SamplingMask(int32(1), int32(*[0] * 10))},
            errors.BadOffsets,
            "add up to 0, but there are 1 ids",
            id="ids",
        ),
        pytest.param(
            {"sampling_mask": SamplingMask(b"", b"123")}, errors.BadOffsets, "3 bytes", id="cut"
        ),
    ],
)
def test_a_micro_batch_whose_lengths_do_not_add_up_is_refused(
    tmp_path: Path, change: dict[str, Any], error: type[errors.RolloutError], words: str
) -> None:
    file = tmp_path / "rank_0.bin"
    file.write_bytes(msgspec.msgpack.encode([packed(**change)]))
    with pytest.raises(error, match=words):
        READER.items(file)


def test_a_micro_batch_without_supports_gives_samples_without() -> None:
    from rollout.adapters.prime_rl_types import unpack

    assert [s.sampling_mask for s in unpack(packed(sampling_mask=None), "")] == [None, None]


def test_another_file_is_refused_with_what_it_is_not(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"\x93\x01\x02\x03")
    with pytest.raises(errors.FormatError, match=r"neither a list of TrainingSample .* MicroBatch"):
        READER.items(tmp_path / "f")
    with pytest.raises(errors.ConfigError, match="cannot be read"):
        READER.items(tmp_path / "nowhere")

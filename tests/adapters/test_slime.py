"""slime: samples and its debug dump, to and fro."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import RECORDED, assert_same_rollout, make_rollout, make_two_turns, recorded_rollouts

from rollout import errors
from rollout.adapters.facts import Facts
from rollout.adapters.slime import LAYOUT, from_slime, to_slime
from rollout.record import Rollout, WeightSpan

FACTS = Facts(temperature=0.5, top_p=0.875, top_k=-1, min_p=0.0, max_new_tokens=8)


def written_by_slime(**changes: Any) -> dict[str, Any]:
    """What `Sample.to_dict()` gives of two turns, without anything of ours."""
    (sample,) = to_slime([make_two_turns()])
    plain = {
        "metadata": {"source": "math"},
        "group_index": 4,
        "weight_versions": ["3"],
        "multimodal_inputs": None,
        "label": "42",
        "remove_sample": False,
        "spec_info": {"spec_accept_token_num": 0},
    }
    return sample | plain | changes


def by_temperature(rollouts: list[Rollout]) -> list[list[Rollout]]:
    found: dict[float, list[Rollout]] = {}
    for rollout in rollouts:
        found.setdefault(rollout.temperature, []).append(rollout)
    return list(found.values())


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_sets_come_back_as_they_were(name: str, tmp_path: Path) -> None:
    for rollouts in by_temperature(recorded_rollouts(name)):
        LAYOUT.write(rollouts, tmp_path / "0.pt")
        back = [
            LAYOUT.parse(item, n, Facts()) for n, item in LAYOUT.reader().items(tmp_path / "0.pt")
        ]
        assert len(back) == 12
        for got, wanted in zip(back, rollouts, strict=True):
            assert_same_rollout(got, wanted)


def test_two_turns_with_forced_tokens_come_back_as_they_were() -> None:
    (back,) = from_slime(to_slime([make_two_turns()]))
    assert_same_rollout(back, make_two_turns())


@pytest.mark.parametrize(
    "rollout",
    [
        pytest.param(make_rollout(prompt_text=None, output_text=None), id="no text"),
        pytest.param(make_rollout(full_logprobs=None, support_logprobs=None), id="no logprobs"),
        pytest.param(make_rollout(seed=None, stop_match=None, reward=-1.5), id="nulls, a reward"),
        pytest.param(
            make_rollout(rollout_id="7:0#abort2", finish_reason="abort", weight_versions=()),
            id="aborted",
        ),
    ],
)
def test_what_may_be_null_comes_back_as_null(rollout: Rollout) -> None:
    (back,) = from_slime(to_slime([rollout]))
    assert_same_rollout(back, rollout)


def test_a_sample_has_the_fields_of_the_source() -> None:
    (sample,) = to_slime([make_two_turns()])
    ids, offsets = (
        sample.pop("rollout_top_p_token_ids"),
        sample.pop("rollout_top_p_token_offsets"),
    )
    carried = sample.pop("metadata")["rollout"]
    arrays = carried.pop("full_logprobs"), carried.pop("support_logprobs")
    assert [len(base64.b64decode(array)) for array in arrays] == [4 * 7, 4 * 9]
    assert (ids.dtype, ids.tolist()) == (torch.int32, [5, 9, 5, 6, 2, 8, 7, 1, 2])
    assert (offsets.dtype, offsets.tolist()) == (torch.int32, [0, 2, 4, 5, 5, 5, 8, 9])
    assert sample == {
        "group_index": 0,
        "index": 0,
        "rollout_id": 0,
        "prompt": "why",
        "tokens": [1, 3, 9, 5, 2, 40, 41, 7, 2],
        "response": "because",
        "response_length": 7,
        "reward": 0.5,
        "loss_mask": [1, 1, 0, 0, 0, 1, 1],
        "weight_versions": ["v1", "v2"],
        "rollout_log_probs": [
            -1.3862943649291992,
            -0.6931471824645996,
            0,
            0,
            0,
            -2.0794415473937988,
            0,
        ],
        "status": "completed",
    }
    assert json.loads(json.dumps(carried)) == {
        "schema_version": 1,
        "rollout_id": "7:0",
        "prompt_id": "7",
        "sample_index": 0,
        "temperature": 0.5,
        "top_p": 0.875,
        "top_k": 2,
        "min_p": 0.0,
        "max_new_tokens": 8,
        "seed": 11,
        "sampling_params": '{"temperature":0.5}',
        "stop_match": "2",
        "weight_versions": [["v1", 0, 3], ["v2", 5, 7]],
        "engine_meta": '{"engine":"test"}',
        "prompt_text": "why",
        "output_text": "because",
        "created_us": 1_700_000_000_000_000,
        "latency_ms": 2.5,
        "attempts": 1,
        "extra": "{}",
        "forced": None,
    }


def test_carried_arrays_are_the_base64_of_little_endian_float32() -> None:
    (sample,) = to_slime([make_rollout(full_logprobs=np.array([-1, -0.5, 0], np.float32))])
    # -1 is BF800000, -0.5 is BF000000
    assert sample["metadata"]["rollout"]["full_logprobs"] == "AACAvwAAAL8AAAAA"


def test_samples_of_a_prompt_stand_together_and_are_numbered_alike() -> None:
    stored = [make_rollout(p, i) for p, i in (("b", 1), ("a", 0), ("b", 0), ("a", 1))]
    samples = to_slime(stored)
    ids = [s["metadata"]["rollout"]["rollout_id"] for s in samples]
    assert ids == ["b:0", "b:1", "a:0", "a:1"]
    assert [s["group_index"] for s in samples] == [0, 0, 1, 1]
    assert [s["index"] for s in samples] == [s["rollout_id"] for s in samples] == [0, 1, 2, 3]


def test_the_dump_is_what_slime_loads(tmp_path: Path) -> None:
    LAYOUT.write([make_rollout()], tmp_path / "0.pt")
    dump = torch.load(tmp_path / "0.pt", weights_only=True)
    assert list(dump) == ["rollout_id", "samples"]
    assert dump["rollout_id"] == 0
    assert dump["samples"][0]["status"] == "completed"


def test_the_writer_says_what_to_start_the_trainer_with(tmp_path: Path) -> None:
    rollouts = [make_rollout("a", 0, reward=1.0), make_rollout("b", 0), make_rollout("b", 1)]
    start, rewards, groups = LAYOUT.write(rollouts, tmp_path / "0.pt")
    assert start.startswith(
        "start slime with --rollout-temperature 0.5 and a --rollout-top-p below"
    )
    assert rewards.startswith("2 of 3 samples have no reward")
    assert groups.startswith("prompts have 1 to 2 samples")


def test_a_reward_that_would_poison_a_batch_is_refused() -> None:
    with pytest.raises(
        errors.NotExpressible, match=r"^7:0: reward is nan, must be finite: .*slime"
    ):
        to_slime([make_rollout(reward=float("nan"))])


def test_two_temperatures_do_not_fit_into_one_dump() -> None:
    with pytest.raises(
        errors.NotExpressible, match=r"^8:0: temperature 1, but 0.5 in 7:0; slime has"
    ):
        to_slime([make_rollout(), make_rollout("8", temperature=1.0)])


def test_a_sample_of_slimes_own_becomes_a_rollout() -> None:
    (rollout,) = from_slime([written_by_slime()], FACTS)
    assert (rollout.rollout_id, rollout.prompt_id, rollout.sample_index) == ("4:0", "4", 0)
    assert (rollout.temperature, rollout.top_p, rollout.top_k) == (0.5, 0.875, -1)
    assert rollout.support.counts.tolist() == [2, 2, 1, 0, 0, 3, 1]
    assert rollout.is_forced.tolist() == [False, False, False, True, True, False, False]
    assert rollout.weight_versions == (WeightSpan("3", 0, 7),)
    assert json.loads(rollout.extra) == {"label": "42", "metadata": {"source": "math"}}
    assert json.loads(rollout.engine_meta) == {"engine": "sglang", "source": "import"}
    assert (rollout.full_logprobs, rollout.support_logprobs) == (None, None)
    assert (rollout.prompt_text, rollout.output_text, rollout.reward) == ("why", "because", 0.5)


def test_messages_stand_in_extra() -> None:
    messages = [{"role": "user", "content": "why"}]
    (rollout,) = from_slime([written_by_slime(prompt=messages, response="")], FACTS)
    assert (rollout.prompt_text, rollout.output_text) == (None, None)
    assert json.loads(rollout.extra)["messages"] == messages


def test_samples_of_a_group_are_numbered_in_their_order() -> None:
    samples = [written_by_slime(group_index=g) for g in (1, 2, 1, None)]
    ids = [r.rollout_id for r in from_slime(samples, FACTS)]
    assert ids == ["1:0", "2:0", "1:1", "sample-000003:0"]


def test_lists_are_read_as_tensors_are() -> None:
    sample = written_by_slime()
    for key in ("rollout_top_p_token_ids", "rollout_top_p_token_offsets"):
        sample[key] = sample[key].tolist()
    (rollout,) = from_slime([sample], FACTS)
    assert rollout.support[5].tolist() == [8, 7, 1]


def test_no_loss_mask_is_all_ones_and_a_removed_sample_all_zeros() -> None:
    plain = to_slime(
        [
            make_rollout(
                "8",
                support=make_rollout().support.take(np.array([0, 2, 2])),
                output_ids=np.array([9, 2, 2], np.int32),
                support_logprobs=None,
            )
        ]
    )[0]
    (rollout,) = from_slime([plain | {"loss_mask": None}])
    assert rollout.loss_mask.tolist() == [1, 1, 1]
    (rollout,) = from_slime([plain | {"remove_sample": True}])
    assert rollout.loss_mask.tolist() == [0, 0, 0]


def test_versions_that_no_token_can_be_given_stand_in_extra() -> None:
    (rollout,) = from_slime([written_by_slime(weight_versions=["3", "4"], metadata={})], FACTS)
    assert rollout.weight_versions == ()
    assert json.loads(rollout.extra) == {"label": "42", "weight_versions": ["3", "4"]}


def test_one_of_several_rewards_is_chosen_by_name() -> None:
    sample = written_by_slime(reward={"format": 0.25, "answer": 1})
    (rollout,) = from_slime([sample], Facts(**{**vars(FACTS), "reward_key": "answer"}))
    assert rollout.reward == 1.0
    with pytest.raises(errors.BadFacts, match=r"rewards \['answer', 'format'\]; .*--reward-key"):
        list(from_slime([sample], FACTS))


def test_what_a_dump_does_not_say_must_be_said() -> None:
    with pytest.raises(
        errors.BadFacts,
        match=r"^sample 0: does not say top_k, min_p, .* rollout import --top-k --min-p, or Facts",
    ):
        list(from_slime([written_by_slime()], Facts(temperature=1, top_p=0.9, max_new_tokens=8)))


def test_what_an_exported_dump_says_need_not_be_said_and_cannot_be_denied() -> None:
    samples = to_slime([make_rollout()])
    assert len(list(from_slime(samples, Facts(temperature=0.5)))) == 1
    with pytest.raises(errors.BadFacts, match=r"^sample 0: temperature is 0.5 there, and 1.0 was"):
        list(from_slime(samples, Facts(temperature=1.0)))
    with pytest.raises(errors.BadFacts, match=r"finish_reason is 'stop' there, and 'length' was"):
        list(from_slime(samples, Facts(finish_reason="length")))


def test_a_number_that_no_shard_holds_is_refused() -> None:
    facts = Facts(**{**vars(FACTS), "max_new_tokens": 2**31})
    with pytest.raises(errors.BadValue, match="max_new_tokens is 2147483648, must fit into 32"):
        list(from_slime([written_by_slime()], facts))
    (sample,) = to_slime([make_rollout()])
    sample["metadata"]["rollout"]["attempts"] = 2**31
    with pytest.raises(errors.BadValue, match=r"not what an export left: .*attempts"):
        list(from_slime([sample]))


def test_greedy_is_stored_as_the_sampler_ran() -> None:
    sample = written_by_slime(
        rollout_top_p_token_ids=[9, 5, 2, 7, 2],
        rollout_top_p_token_offsets=[0, 1, 2, 3, 3, 3, 4, 5],
        rollout_log_probs=[0.0] * 7,
    )
    (rollout,) = from_slime([sample], Facts(**{**vars(FACTS), "temperature": 0.0}))
    assert (rollout.temperature, rollout.top_k) == (1.0, 1)
    assert json.loads(rollout.sampling_params)["temperature"] == 0.0


BROKEN = [
    pytest.param({"tokens": None}, errors.NullValue, "no tokens", id="no tokens"),
    pytest.param({"tokens": [1.5]}, errors.BadValue, "tokens: must be integers", id="not ids"),
    pytest.param({"tokens": [2**31]}, errors.BadValue, "32 bits", id="id too large"),
    pytest.param({"tokens": [[1]]}, errors.BadValue, "one flat row", id="nested ids"),
    pytest.param({"response_length": 10}, errors.LengthMismatch, "in .0, 9.", id="length"),
    pytest.param({"response_length": 9}, errors.EmptyPrompt, "at least one", id="no prompt"),
    pytest.param({"loss_mask": [1]}, errors.LengthMismatch, "1 loss_mask for 7", id="mask short"),
    pytest.param({"loss_mask": [2] * 7}, errors.BadValue, "only 0 and 1", id="mask of twos"),
    pytest.param({"loss_mask": None}, errors.MissingSupport, "token 3", id="forced and trained"),
    pytest.param({"rollout_log_probs": None}, errors.NullValue, "no rollout_log_probs", id="no lp"),
    pytest.param({"rollout_log_probs": [None] * 7}, errors.BadValue, "numbers", id="null lp"),
    pytest.param(
        {"rollout_top_p_token_ids": None}, errors.MissingSupport, "--rollout-top-p", id="no ids"
    ),
    pytest.param(
        {"rollout_top_p_token_offsets": [1, 9]}, errors.BadOffsets, "start at 0", id="offsets"
    ),
    pytest.param(
        {"rollout_top_p_token_ids": [5, 6, 5, 6, 2, 8, 7, 1, 2]},
        errors.SampledOutsideSupport,
        "sampled id 9",
        id="outside",
    ),
    pytest.param({"status": "failed"}, errors.BadValue, "status is 'failed'", id="failed"),
    pytest.param({"status": []}, errors.BadValue, "status is \\[\\]", id="status of no type"),
    pytest.param({"status": "aborted"}, None, "", id="aborted is no error"),
    pytest.param({"loss_mask": [True] * 3 + [False] * 2 + [True] * 2}, None, "", id="flags"),
    pytest.param({"loss_mask": [[1]]}, errors.BadValue, "one flat row", id="nested mask"),
    pytest.param({"response": 3}, errors.BadValue, "response must be a text", id="no text"),
    pytest.param({"reward": "good"}, errors.BadValue, "must be a number", id="reward"),
    pytest.param({"multimodal_inputs": {}}, errors.NotReplayable, "token ids alone", id="images"),
    pytest.param({"weight_versions": [[]]}, None, "", id="a call without spans is no error"),
    pytest.param({"weight_versions": 3}, errors.BadValue, "names or spans", id="no versions"),
    pytest.param({"weight_versions": [[1]]}, errors.BadValue, "names or spans", id="versions"),
    pytest.param({"metadata": {"rollout": 1}}, errors.BadValue, "export left", id="carried"),
]


@pytest.mark.parametrize(("change", "error", "words"), BROKEN)
def test_a_broken_sample_says_what_is_wrong(
    change: dict[str, Any], error: type[errors.RolloutError] | None, words: str
) -> None:
    samples = [written_by_slime(**change)]
    if error is None:
        assert len(list(from_slime(samples, FACTS))) == 1
        return
    with pytest.raises(error, match=words):
        list(from_slime(samples, FACTS))


def test_what_is_no_sample_at_all_is_refused() -> None:
    with pytest.raises(errors.BadValue, match="sample 0: must be the dict of a Sample, got list"):
        list(from_slime([[]]))


def test_an_export_of_a_later_schema_is_refused() -> None:
    (sample,) = to_slime([make_rollout()])
    sample["metadata"]["rollout"]["schema_version"] = 2
    with pytest.raises(errors.SchemaVersionUnknown, match="schema version 2"):
        list(from_slime([sample]))


def test_carried_bytes_that_are_no_numbers_are_refused() -> None:
    (sample,) = to_slime([make_rollout()])
    sample["metadata"]["rollout"]["full_logprobs"] = "AAA="
    with pytest.raises(errors.BadValue, match="carried full_logprobs: 2 bytes"):
        list(from_slime([sample]))


def test_an_aborted_sample_without_tokens_is_a_rollout() -> None:
    sample = written_by_slime(
        status="aborted",
        tokens=[1, 3],
        response_length=0,
        loss_mask=None,
        rollout_log_probs=None,
        rollout_top_p_token_ids=None,
        rollout_top_p_token_offsets=None,
    )
    (rollout,) = from_slime([sample], FACTS)
    assert (rollout.rollout_id, rollout.num_output_tokens) == ("4:0#abort0", 0)


def test_a_rollout_that_breaks_a_rule_is_not_handed_on() -> None:
    odd = make_rollout(output_ids=np.array([7, 8, 2], np.int32))
    with pytest.raises(errors.SampledOutsideSupport, match="^7:0: output token 0: sampled id 7"):
        to_slime([odd])

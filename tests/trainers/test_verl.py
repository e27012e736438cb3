"""verl's own classes and functions on what `to_verl` makes."""

from __future__ import annotations

import asyncio
import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from adapters.layouts import recorded
from builders import RECORDED

from rollout.adapters.verl import load_verl, to_verl, write_verl
from rollout.record import Rollout

verl = pytest.importorskip("verl")
import torch  # noqa: E402
from trainers.tiny_rollouts import replayed, sample, with_tool_output  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402
from verl import DataProto  # noqa: E402
from verl.experimental.agent_loop.agent_loop import (  # noqa: E402
    AgentLoopMetrics,
    AgentLoopOutput,
    AgentLoopWorker,
)
from verl.protocol import pad_dataproto_to_divisor, unpad_dataproto  # noqa: E402
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage  # noqa: E402
from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics  # noqa: E402

pytestmark = pytest.mark.trainers


def assert_same_data(got: DataProto, wanted: DataProto) -> None:
    assert got.batch.keys() == wanted.batch.keys()
    for name in wanted.batch.keys():  # noqa: SIM118 - a TensorDict
        torch.testing.assert_close(got.batch[name], wanted.batch[name], rtol=0, atol=0)
    assert got.non_tensor_batch.keys() == wanted.non_tensor_batch.keys()
    for name, column in wanted.non_tensor_batch.items():
        for one, other in zip(got.non_tensor_batch[name], column, strict=True):
            np.testing.assert_array_equal(one, other, strict=True)
    assert got.meta_info == wanted.meta_info


@pytest.mark.parametrize("name", RECORDED)
def test_a_dataproto_is_cut_joined_and_sent(name: str) -> None:
    for rollouts in recorded(name):
        data = DataProto.from_dict(**to_verl(rollouts, pad_id=0))
        data.check_consistency()
        assert len(data) == len(rollouts)
        half = len(data) // 2
        assert_same_data(DataProto.concat([data[:half], data[half:]]), data)
        even, padding = pad_dataproto_to_divisor(data, 7)
        assert len(even) % 7 == 0
        assert_same_data(DataProto.concat(even.chunk(7))[: len(data)], data)
        assert_same_data(unpad_dataproto(even, padding), data)
        assert_same_data(pickle.loads(pickle.dumps(data)), data)  # what ray does with it
        order = torch.randperm(len(data))
        assert data[order].non_tensor_batch["rollout_id"].tolist() == [
            rollouts[i].rollout_id for i in order
        ]


def test_a_dataproto_takes_more_columns(tiny_model_path: Path) -> None:
    rollouts = sample(tiny_model_path)
    data = DataProto.from_dict(**to_verl(rollouts, pad_id=0))
    twice = data.repeat(2, interleave=True)
    assert twice.non_tensor_batch["uid"].tolist() == list("00001111")
    more = DataProto.from_dict(tensors={"values": torch.ones(len(data), 3)})
    assert data.union(more).batch["values"].shape == (4, 3)
    assert_same_data(data.union(DataProto.from_dict(**to_verl(rollouts, pad_id=0))), data)


def test_a_file_becomes_the_same_dataproto(tiny_model_path: Path, tmp_path: Path) -> None:
    rollouts = sample(tiny_model_path)
    write_verl(rollouts, tmp_path / "out.pt", 0)
    assert_same_data(
        DataProto.from_dict(**load_verl(tmp_path / "out.pt")),
        DataProto.from_dict(**to_verl(rollouts, pad_id=0)),
    )


def agent_loop_batch(rollouts: list[Rollout], model: Path, lengths: dict[str, int]) -> DataProto:
    """What verl's agent loop worker makes of the same tokens."""
    worker: Any = object.__new__(AgentLoopWorker)
    worker.tokenizer = AutoTokenizer.from_pretrained(model)
    worker.processor = None
    worker.mm_processor_kwargs = {}
    worker.distillation_enabled = False
    worker.reward_loop_worker_handles = None
    worker.rollout_config = SimpleNamespace(**lengths)

    async def padded(r: Rollout) -> Any:
        output = AgentLoopOutput(
            prompt_ids=r.prompt_ids.tolist(),
            response_ids=r.output_ids.tolist(),
            response_mask=r.loss_mask.tolist(),
            response_logprobs=r.sampling_logprobs.tolist(),
            reward_score=r.reward,
            metrics=AgentLoopMetrics(),
        )
        return await worker._agent_loop_postprocess(output, False, raw_prompt=None)

    return worker._postprocess([asyncio.run(padded(r)) for r in rollouts])


def test_every_tensor_is_the_one_of_verls_agent_loop(tiny_model_path: Path) -> None:
    rollouts = sample(tiny_model_path)
    rollouts[1] = with_tool_output(rollouts[1])
    lengths = {"prompt_length": 6, "response_length": 20}
    wanted = agent_loop_batch(rollouts, tiny_model_path, lengths).batch
    pad_id = AutoTokenizer.from_pretrained(tiny_model_path).pad_token_id
    got = DataProto.from_dict(**to_verl(rollouts, pad_id=pad_id, **lengths)).batch
    assert got.keys() == wanted.keys()
    for name in wanted.keys():  # noqa: SIM118 - a TensorDict
        torch.testing.assert_close(got[name], wanted[name], rtol=0, atol=0, msg=name)


def test_grpo_groups_by_prompt(tiny_model_path: Path) -> None:
    rollouts = sample(tiny_model_path)  # rewards 0 and 1 for a prompt, 2 and 3 for the other
    data = DataProto.from_dict(**to_verl(rollouts, pad_id=0))
    mask = data.batch["response_mask"]
    advantages, _ = compute_grpo_outcome_advantage(
        data.batch["rm_scores"], mask, data.non_tensor_batch["uid"], norm_adv_by_std_in_grpo=False
    )
    wanted = torch.tensor([[-0.5], [0.5], [-0.5], [0.5]]) * mask
    torch.testing.assert_close(advantages, wanted)


def test_verls_mismatch_is_ours(tiny_model_path: Path) -> None:
    rollouts = sample(tiny_model_path)
    batch = to_verl(rollouts, pad_id=0)["tensors"]
    scores = replayed(tiny_model_path, rollouts)
    old = copy.deepcopy(batch["rollout_log_probs"])
    for line, score in zip(old, scores, strict=True):
        line[: len(score)] = torch.from_numpy(score)
    metrics = compute_offpolicy_metrics(old, batch["rollout_log_probs"], batch["response_mask"])
    ratios = np.concatenate(
        [s - r.sampling_logprobs for s, r in zip(scores, rollouts, strict=True)]
    ).astype(np.float64)
    assert metrics["kl"] == pytest.approx(-ratios.mean(), abs=1e-7)
    assert abs(metrics["k3_kl"]) < 1e-7
    assert metrics["ppl_ratio"] == pytest.approx(1, abs=1e-5)

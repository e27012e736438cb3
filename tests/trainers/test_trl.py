"""A GRPOTrainer of TRL that trains on what `to_trl` makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.adapters.trl import to_trl
from rollout.record import Rollout
from rollout.support import Support

trl = pytest.importorskip("trl")
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from trainers.tiny_rollouts import TEMPERATURE, sample, with_tool_output  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

pytestmark = pytest.mark.trainers


class Recorder:
    """What the trainer asks for, and what it gives to a reward function."""

    def __init__(self, rollouts: list[Rollout]) -> None:
        self.rollouts = rollouts
        self.asked: list[list[str]] = []
        self.given: list[dict[str, Any]] = []

    def rollout_func(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        self.asked.append(prompts)
        return to_trl(self.rollouts)

    def recorded_reward(self, reward: list[float | None], **columns: Any) -> list[float | None]:
        self.given.append(columns | {"reward": reward})
        return reward


class Trainer(trl.GRPOTrainer):
    """Keeps the batches that it trains on."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        self.batches = [*getattr(self, "batches", []), batch]
        return batch


def make_trainer(model: Path, out: Path, recorder: Recorder, **settings: Any) -> Trainer:
    """One prompt with as many generations as there are rollouts, two steps, on the CPU."""
    count = len(recorder.rollouts)
    config = trl.GRPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=count,
        num_generations=count,
        max_completion_length=32,
        temperature=TEMPERATURE,
        max_steps=2,
        learning_rate=1e-3,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        **settings,
    )
    return Trainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=recorder.recorded_reward,
        rollout_func=recorder.rollout_func,
        train_dataset=Dataset.from_dict({"prompt": ["first", "second"]}),
        args=config,
    )


@pytest.fixture
def rollouts(tiny_model_path: Path) -> list[Rollout]:
    """Four of one length but for the last, which has forced tokens."""
    one, two, three, four = sample(tiny_model_path)
    return [one, two, three, with_tool_output(four)]


def test_two_steps_of_training(
    rollouts: list[Rollout], tiny_model_path: Path, tmp_path: Path
) -> None:
    recorder = Recorder(rollouts)
    trainer = make_trainer(tiny_model_path, tmp_path, recorder)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.state.global_step == 2
    assert len(recorder.asked) == 2 and len(recorder.asked[0]) == 4
    assert all(np.isfinite(line["loss"]) for line in trainer.state.log_history if "loss" in line)
    assert any(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


def test_the_batch_that_is_trained_on_is_what_was_recorded(
    rollouts: list[Rollout], tiny_model_path: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(tiny_model_path, tmp_path, Recorder(rollouts), shuffle_dataset=False)
    trainer.train()
    batch = trainer.batches[0]
    for i, r in enumerate(rollouts):
        prompt, length = len(r.prompt_ids), r.num_output_tokens
        row = {
            name: batch[name][i]
            for name in batch
            if torch.is_tensor(batch[name]) and batch[name].ndim
        }
        assert row["prompt_ids"][-prompt:].tolist() == r.prompt_ids.tolist()
        assert row["prompt_mask"].sum() == prompt
        assert row["completion_ids"][:length].tolist() == r.output_ids.tolist()
        assert row["completion_mask"].tolist() == [1] * length + [0] * (
            len(row["completion_mask"]) - length
        )
        assert row["tool_mask"][:length].tolist() == r.loss_mask.tolist()
        logprobs = row["sampling_per_token_logps"]
        np.testing.assert_array_equal(logprobs[:length].numpy(), r.sampling_logprobs)
        assert not logprobs[length:].any()
    assert batch["num_items_in_batch"] == sum(int(r.loss_mask.sum()) for r in rollouts)
    rewards = torch.tensor([r.reward for r in rollouts])
    torch.testing.assert_close(
        batch["advantages"], (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    )


def test_reward_functions_get_the_supports(
    rollouts: list[Rollout], tiny_model_path: Path, tmp_path: Path
) -> None:
    recorder = Recorder(rollouts)
    make_trainer(tiny_model_path, tmp_path, recorder).train()
    given = recorder.given[0]
    for i, r in enumerate(rollouts):
        support = Support.from_counts(
            np.array(given["sampling_mask_ids"][i], np.int32),
            np.array(given["sampling_mask_counts"][i]),
        )
        np.testing.assert_array_equal(support.ids, r.support.ids)
        np.testing.assert_array_equal(support.offsets, r.support.offsets)
    assert given["reward"] == [0.0, 1.0, 2.0, 3.0]


def test_a_rollout_without_reward_gets_no_advantage(
    rollouts: list[Rollout], tiny_model_path: Path, tmp_path: Path
) -> None:
    from dataclasses import replace

    rollouts[1] = replace(rollouts[1], reward=None)
    trainer = make_trainer(tiny_model_path, tmp_path, Recorder(rollouts))
    trainer.train()
    advantages = trainer.batches[0]["advantages"]
    assert advantages[1] == 0
    assert torch.count_nonzero(advantages) == 3

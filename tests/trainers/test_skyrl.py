"""SkyRL's own checks, batches and scores over supports on what `to_skyrl` makes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from adapters.layouts import recorded
from builders import RECORDED, assert_same_rollout

from rollout.adapters.skyrl import from_skyrl, load_skyrl, to_skyrl, write_skyrl
from rollout.record import Rollout

skyrl = pytest.importorskip("skyrl")
import torch  # noqa: E402
from skyrl.backends.skyrl_train.distributed.megatron.token_metadata import (  # noqa: E402
    canonical_token_metadata_layout,
)
from skyrl.backends.skyrl_train.utils.sample_support import validate_sample_support  # noqa: E402
from skyrl.backends.skyrl_train.utils.sample_support_replay import (  # noqa: E402
    compute_sample_support_scores,
)
from skyrl.train.generators.utils import concatenate_generator_outputs  # noqa: E402
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402
from skyrl.train.utils.trainer_utils import validate_generator_output  # noqa: E402
from trainers.tiny_rollouts import (  # noqa: E402
    TEMPERATURE,
    hidden_and_head,
    replayed,
    sample,
    with_tool_output,
)

pytestmark = pytest.mark.trainers


@pytest.mark.parametrize("name", RECORDED)
def test_an_output_of_a_recorded_set_is_valid_and_joins(name: str) -> None:
    for rollouts in recorded(name):
        width = max(int(r.support.counts.max()) for r in rollouts)
        halves = [to_skyrl(half, width=width) for half in (rollouts[::2], rollouts[1::2])]
        joined = concatenate_generator_outputs(halves)  # validates the result
        for table in joined["rollout_sample_support"]:
            validate_sample_support(table)
        for got, wanted in zip(from_skyrl(joined), rollouts[::2] + rollouts[1::2], strict=True):
            assert_same_rollout(got, wanted)


def test_a_file_becomes_a_valid_output(tiny_model_path: Path, tmp_path: Path) -> None:
    write_skyrl(sample(tiny_model_path), tmp_path / "out.pt")
    validate_generator_output(4, load_skyrl(tmp_path / "out.pt"))


def training_batch(rollouts: list[Rollout]) -> Any:
    """What SkyRL's trainer makes of a generator's output."""
    groups = len({r.prompt_id for r in rollouts})
    trainer: Any = object.__new__(RayPPOTrainer)
    trainer.all_metrics = {}
    trainer.tokenizer = SimpleNamespace(pad_token_id=0)
    trainer.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: 1)
    correction = SimpleNamespace(tis_ratio_type="token", sequence_mask_metric=None)
    algorithm = SimpleNamespace(
        max_seq_len=64, off_policy_correction=correction, zero_variance_filter=False
    )
    trainer.cfg = SimpleNamespace(
        trainer=SimpleNamespace(
            algorithm=algorithm,
            train_batch_size=groups,
            policy_mini_batch_size=groups,
            critic=SimpleNamespace(model=SimpleNamespace(path=None)),
        ),
        generator=SimpleNamespace(
            n_samples_per_prompt=len(rollouts) // groups,
            step_wise_trajectories=False,
            merge_stepwise_output=False,
        ),
    )
    output = to_skyrl(rollouts)
    validate_generator_output(len(rollouts), output)
    output, uids = trainer.postprocess_generator_output(output, output["uids"])
    return trainer.convert_to_training_input(output, uids)


def test_the_training_batch_is_what_was_recorded(tiny_model_path: Path) -> None:
    rollouts = sample(tiny_model_path)
    rollouts[1] = with_tool_output(rollouts[1])
    batch = training_batch(rollouts)
    support = batch["rollout_sample_support"]
    tables = support.values.split(support.sequence_lengths.tolist())
    for i, r in enumerate(rollouts):
        prompt, length = len(r.prompt_ids), r.num_output_tokens
        tokens = batch["sequences"][i][batch["attention_mask"][i] == 1]
        assert tokens.tolist() == [*r.prompt_ids.tolist(), *r.output_ids.tolist()]
        assert len(tokens) == prompt + length
        assert batch["response_mask"][i].sum() == length
        assert batch["loss_mask"][i][-length:].tolist() == r.loss_mask.tolist()
        np.testing.assert_array_equal(
            batch["rollout_logprobs"][i][-length:].numpy(), r.sampling_logprobs
        )
        assert batch["rewards"][i].sum() == batch["rewards"][i][-1] == r.reward
        assert [row[row >= 0].tolist() for row in tables[i]] == [
            r.support[t].tolist() for t in range(length)
        ]


def skyrl_logprobs(batch: Any, model: Path, *, project: bool) -> torch.Tensor:
    """[B, R] As SkyRL's support replay scores a batch: from logits, or from the head's rows."""
    hidden, weight = hidden_and_head(model, batch["sequences"], batch["attention_mask"])
    width = batch["response_mask"].shape[1]
    scores = compute_sample_support_scores(
        hidden if project else hidden @ weight.T / TEMPERATURE,
        batch["sequences"],
        batch["loss_mask"],
        batch["rollout_sample_support"],
        width,
        packed=False,
        metadata_layout=canonical_token_metadata_layout(batch["attention_mask"]),
        vocab_start_index=0,
        vocab_end_index=len(weight),
        tp_group=None,
        lm_head_weight=weight if project else None,
        temperature=TEMPERATURE,
        chunk_size=7,
    )
    logprobs: torch.Tensor = scores.logprobs[:, -width:]
    return logprobs


@pytest.mark.parametrize(
    "project", [pytest.param(False, id="logits"), pytest.param(True, id="head rows")]
)
def test_skyrls_scores_over_supports_are_ours(tiny_model_path: Path, project: bool) -> None:
    rollouts = sample(tiny_model_path)
    rollouts[1] = with_tool_output(rollouts[1])
    scores = skyrl_logprobs(training_batch(rollouts), tiny_model_path, project=project)
    for row, r, ours in zip(scores, rollouts, replayed(tiny_model_path, rollouts), strict=True):
        theirs = row[-r.num_output_tokens :].numpy()
        np.testing.assert_allclose(theirs, ours, rtol=0, atol=2e-5)
        assert not theirs[r.is_forced].any()
    engine = rollouts[0].sampling_logprobs
    np.testing.assert_allclose(scores[0, -len(engine) :].numpy(), engine, rtol=0, atol=2e-5)


def test_skyrl_refuses_to_train_on_a_token_without_support(tiny_model_path: Path) -> None:
    rollouts = sample(tiny_model_path)
    rollouts[1] = with_tool_output(rollouts[1])
    batch = training_batch(rollouts)
    batch["loss_mask"] = batch["response_mask"].float()  # the forced tokens too
    with pytest.raises(ValueError, match="requires captured support for every loss-active token"):
        skyrl_logprobs(batch, tiny_model_path, project=False)


def test_skyrl_has_no_reward_for_a_rollout_without_output(tiny_model_path: Path) -> None:
    """Why `to_skyrl` refuses one."""
    rollouts = sample(tiny_model_path)
    output = to_skyrl(rollouts)
    output["response_ids"][0] = []
    trainer: Any = object.__new__(RayPPOTrainer)
    trainer.cfg = SimpleNamespace(
        trainer=SimpleNamespace(algorithm=SimpleNamespace(zero_variance_filter=False)),
        generator=SimpleNamespace(step_wise_trajectories=False, merge_stepwise_output=False),
    )
    with pytest.raises(IndexError):
        trainer.postprocess_generator_output(output, output["uids"])

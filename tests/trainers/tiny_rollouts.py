"""Rollouts of the tiny model, sampled in this process, and the policy's scores of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from replay import Policy, pack, score_support
from rollout.config import EmbeddedConfig
from rollout.engines.embedded import EmbeddedEngine
from rollout.prompts import Prompt
from rollout.record import Rollout
from rollout.sampling import SamplingParams, canonical_json
from rollout.support import Support

TEMPERATURE = 0.8
PROMPTS = ([1, 50, 60, 70], [1, 80, 90])


def sample(model: Path, *, each: int = 2, max_new_tokens: int = 12) -> list[Rollout]:
    """`each` rollouts of two prompts, side by side; the i-th has the reward i."""

    async def collect() -> list[Rollout]:
        rollouts = []
        async with EmbeddedEngine(str(model), EmbeddedConfig()) as engine:
            for prompt, ids in enumerate(PROMPTS):
                for index in range(each):
                    params = SamplingParams(
                        temperature=TEMPERATURE,
                        top_p=0.9,
                        top_k=20,
                        max_new_tokens=max_new_tokens + index,
                        sampling_seed=10 * prompt + index,
                    )
                    asked = Prompt(str(prompt), np.array(ids, np.int32))
                    completion = await engine.generate(asked, params)
                    rollouts.append(
                        completion.to_rollout(
                            prompt_id=asked.prompt_id,
                            sample_index=index,
                            prompt_ids=asked.ids,
                            params=params,
                            sampling_params=canonical_json({}),
                            reward=float(len(rollouts)),
                        )
                    )
        return rollouts

    return asyncio.run(collect())


def with_tool_output(rollout: Rollout) -> Rollout:
    """`rollout` with three forced tokens behind its fourth; what follows has other logprobs now."""
    rows = [rollout.support[t].tolist() for t in range(len(rollout.support))]
    tool = np.array([7, 8, 9], np.int32)

    def around(values: np.ndarray, between: np.ndarray) -> np.ndarray:
        return np.concatenate([values[:4], between.astype(values.dtype), values[4:]])

    return replace(
        rollout,
        output_ids=around(rollout.output_ids, tool),
        loss_mask=around(rollout.loss_mask, np.zeros(3)),
        sampling_logprobs=around(rollout.sampling_logprobs, np.zeros(3)),
        support=Support.from_rows([*rows[:4], [], [], [], *rows[4:]]),
        full_logprobs=None,
        support_logprobs=None,
        weight_versions=(),
    )


def replayed(model: Path, rollouts: list[Rollout]) -> list[np.ndarray]:
    """[R] for each rollout: its tokens under the policy, over their supports; 0 where forced."""
    policy = Policy.load(str(model), dtype="float32", device="cpu")
    (batch,) = pack(rollouts, max_tokens=1 << 20)
    hidden = policy.hidden(batch.input_ids, batch.position_ids)
    scores = score_support(
        hidden[batch.hidden_rows],
        policy.weight,
        batch.targets,
        batch.support_ids,
        batch.support_offsets,
        temperature=batch.temperature,
    ).logprob.split([int((~r.is_forced).sum()) for r in rollouts])
    rows = []
    for rollout, scored in zip(rollouts, scores, strict=True):
        row = np.zeros(rollout.num_output_tokens, np.float32)
        row[~rollout.is_forced] = scored.numpy()
        rows.append(row)
    return rows


@torch.no_grad()
def hidden_and_head(
    model: Path, input_ids: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, T, D] and [V, D], from padded rows as a trainer has them."""
    from rollout.engines.hf import load_model

    loaded = load_model(str(model), dtype="float32", device="cpu", trust_remote_code=False)
    positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    hidden = loaded.base_model(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=positions
    ).last_hidden_state
    return hidden, loaded.get_output_embeddings().weight.detach()

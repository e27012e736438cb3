"""Policy: hidden states and head of real architectures; packed = alone; the unknown is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from builders import make_rollout

from replay.batch import pack
from replay.full import score_full
from replay.policy import Policy, _check_head, _check_packing
from rollout.errors import ConfigError, PolicyError
from rollout.record import Rollout
from rollout.support import Support

SMALL = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA_LIKE = SMALL | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", LLAMA_LIKE),
    "qwen3": ("Qwen3ForCausalLM", LLAMA_LIKE),
    "gemma2 (softcap)": ("Gemma2ForCausalLM", LLAMA_LIKE | {"query_pre_attn_scalar": 8}),
    "granite (logits divided)": ("GraniteForCausalLM", LLAMA_LIKE | {"logits_scaling": 8.0}),
    "cohere (logits multiplied)": ("CohereForCausalLM", LLAMA_LIKE | {"logit_scale": 0.25}),
    "gpt2 (learned positions)": (
        "GPT2LMHeadModel",
        SMALL | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    ),
    "phi (bias in the head)": ("PhiForCausalLM", LLAMA_LIKE),
}


@pytest.fixture(params=list(ARCHITECTURES))
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A small random checkpoint of every way to shape logits or positions."""
    name, options = ARCHITECTURES[request.param]
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    config = model_class.config_class(**options)
    model = model_class(config)
    if model.get_output_embeddings().bias is not None:
        torch.nn.init.normal_(model.get_output_embeddings().bias)
    model.save_pretrained(tmp_path)
    return tmp_path


def sequence(ids: list[int], num_prompt: int) -> Rollout:
    return make_rollout(
        str(ids[0]),
        prompt_ids=np.array(ids[:num_prompt], np.int32),
        output_ids=np.array(ids[num_prompt:], np.int32),
        support=Support.from_rows([[y] for y in ids[num_prompt:]]),
        sampling_logprobs=np.zeros(len(ids) - num_prompt, np.float32),
        loss_mask=np.ones(len(ids) - num_prompt, np.int8),
        temperature=1.0,
    )


def logprobs(policy: Policy, rollouts: list[Rollout], max_tokens: int) -> torch.Tensor:
    parts = []
    for batch in pack(rollouts, max_tokens):
        hidden = policy.hidden(batch.input_ids, batch.position_ids)[batch.hidden_rows]
        scores = score_full(
            hidden,
            policy.weight,
            batch.targets,
            bias=policy.bias,
            logit_scale=policy.logit_scale,
            softcap=policy.softcap,
        )
        parts.append(scores.logprob)
    return torch.cat(parts)


def test_packed_rollouts_score_as_each_does_alone_and_as_the_model_says(checkpoint: Path) -> None:
    policy = Policy.load(str(checkpoint), dtype="float32", device="cpu")
    ids = [[5, 6, 7, 8], [50, 51, 52, 53, 54, 55, 56], [9, 10, 11]]
    rollouts = [sequence(row, 2) for row in ids]
    packed = logprobs(policy, rollouts, max_tokens=1000)
    alone = logprobs(policy, rollouts, max_tokens=1)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    own = [
        model(torch.tensor([row])).logits[0].log_softmax(-1)[range(1, len(row) - 1), row[2:]]
        for row in ids
    ]
    torch.testing.assert_close(packed, torch.cat(own).detach(), atol=1e-5, rtol=0)


def test_packing_that_a_model_ignores_is_refused(tiny_model_path: Path) -> None:
    """With a cache, transformers takes two packed rollouts for one sequence, without a word."""
    policy = Policy.load(str(tiny_model_path), dtype="float32", device="cpu")
    body = policy.body

    def with_cache(**arguments: Any) -> Any:
        return body(**(arguments | {"use_cache": True}))

    leaky = Policy(**(vars(policy) | {"body": with_cache}))
    with pytest.raises(PolicyError, match="packed rollouts see each other.*--max-tokens 1"):
        _check_packing(leaky, "m")
    _check_packing(policy, "m")


def test_logits_shaped_in_an_unknown_way_are_refused(tiny_model_path: Path) -> None:
    policy = Policy.load(str(tiny_model_path), dtype="float32", device="cpu")
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    doubled = Policy(**(vars(policy) | {"logit_scale": 2.0}))
    with torch.no_grad(), pytest.raises(PolicyError, match="in a way that is not known here"):
        _check_head(doubled, model, "m")


def test_a_model_that_gives_no_numbers_is_refused(tiny_model_path: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_path)
    torch.nn.init.constant_(model.model.norm.weight, torch.nan)
    model.save_pretrained(tmp_path)
    with pytest.raises(PolicyError, match="differ from head x hidden state by nan"):
        Policy.load(str(tmp_path), dtype="float32", device="cpu")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_bodies_pass_their_own_checks(tiny_model_path: Path, dtype: str) -> None:
    policy = Policy.load(str(tiny_model_path), dtype=dtype, device="cpu")
    assert policy.weight.dtype == getattr(torch, dtype)
    assert policy.description == {
        "model": str(tiny_model_path),
        "dtype": dtype,
        "device": "cpu",
    }


def test_a_model_that_is_not_there_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model could be loaded"):
        Policy.load(str(tmp_path), dtype="float32", device="cpu")

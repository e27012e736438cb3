"""What `rollout collect` can be told: one block per concern, read from YAML (configs/)."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from rollout.blocks import Block
from rollout.retry import RetryConfig
from rollout.sampling import SamplingParams

PathOrId = Annotated[str, AfterValidator(os.path.expanduser)]
"""A hub id, or a path in which a leading ~ is the home folder."""

Positive = Annotated[int, Field(ge=1)]


class PromptsConfig(Block):
    """Where prompts come from and how they become token ids."""

    dataset: PathOrId
    """Hub id or folder for `datasets.load_dataset`, or a .jsonl, .json or .parquet file."""
    name: str | None = None
    """The dataset's configuration, where it has several."""
    split: str = "train"
    column: str = "prompt"
    format: Literal["chat", "text"] = "chat"
    """chat: a string (one user message) or a list of messages, through the model's chat template;
    text: a string as it is, with the special tokens that the tokenizer itself adds."""
    keep: list[str] = []
    """Columns that travel with each rollout, in `extra`: an answer for the reward, say."""
    limit: Positive | None = None
    rollouts_per_prompt: Positive = 1


class EmbeddedConfig(Block):
    """A transformers model inside this process: for quick starts, tests and debugging."""

    kind: Literal["embedded"] = "embedded"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "cpu"
    batch_size: Positive = 16
    trust_remote_code: bool = False


class SGLangConfig(Block):
    """One or more running SGLang servers with the same model."""

    kind: Literal["sglang"] = "sglang"
    url: str | Annotated[list[str], Field(min_length=1)]
    """One endpoint, or several to spread over: least in flight first."""
    support_logprobs: bool = True
    """Record the logprob of every support id, not only the sampled one: replay then knows the exact
    KL over the support, for 4 bytes more per id."""
    prefix_affinity: bool = False
    """Send prompts that begin alike to the same endpoint, for its prefix cache."""
    queue_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """What a rollout may wait before its first token..."""
    slowest_tokens_per_s: Annotated[float, Field(gt=0)] = 2.0
    """... and the pace after which a server counts as stuck: both give a rollout's timeout."""
    down_after_s: Annotated[float, Field(gt=0)] = 600.0
    """The run stops when no endpoint has answered for so long."""


EngineConfig = Annotated[EmbeddedConfig | SGLangConfig, Field(discriminator="kind")]


class ShardsConfig(Block):
    """When rows reach the disk, and in what form."""

    batch_rows: Positive = 64
    batch_bytes: Positive = 4 * 2**20
    batch_age_s: Annotated[float, Field(gt=0)] = 10.0
    shard_bytes: Positive = 128 * 2**20
    compression: Literal["none", "zstd", "lz4"] = "none"
    """none keeps reading zero-copy; zstd is for archives."""


class CollectConfig(Block):
    """Everything `rollout collect` needs."""

    model: PathOrId
    """Hub id or folder: the tokenizer always, the weights for the embedded engine."""
    prompts: PromptsConfig
    sampling: SamplingParams
    engine: EngineConfig
    shards: ShardsConfig = ShardsConfig()
    seed: int | None = 0
    """Every rollout gets a seed of its own derived from this; null sends none."""
    concurrency: Positive = 64
    """Rollouts in flight."""
    retry: RetryConfig = RetryConfig()
    keep_aborted: bool = False
    """Store attempts that the server broke off, beside the rollout, as {rollout_id}#abort{n}."""
    reward: str | None = None
    """module:function that scores each rollout as it is collected."""
    error_budget: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Rollouts that may fail or be rejected before the run ends with exit code 5: a count (3), or
    a share (0.01)."""

    @model_validator(mode="after")
    def _one_seed_per_rollout(self) -> CollectConfig:
        if self.sampling.sampling_seed is not None:
            raise ValueError(
                "sampling.sampling_seed would give every rollout the same seed; set seed instead"
            )
        return self

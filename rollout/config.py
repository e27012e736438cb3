"""What `rollout collect` can be told: one block per concern, read from YAML (configs/)."""

from __future__ import annotations

import os
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from rollout.blocks import Block
from rollout.retry import OnOverflow, RetryConfig
from rollout.sampling import SamplingParams

PathOrId = Annotated[str, AfterValidator(os.path.expanduser)]
"""A hub id, or a path in which a leading ~ is the home folder."""

TEMPLATE_KWARGS_TAKEN = {
    "tools",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "return_dict",
    "return_tensors",
    "chat_template",
}

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
    tools: str | None = None
    """Column with the tools of each conversation, for the chat template."""
    template_kwargs: dict[str, Any] = {}
    """Further arguments of the chat template: {enable_thinking: false}, say."""
    keep: list[str] = []
    """Columns that travel with each rollout, in `extra`: an answer for the reward, say."""
    limit: Positive | None = None
    rollouts_per_prompt: Positive = 1

    @model_validator(mode="after")
    def _template_kwargs_are_the_templates(self) -> PromptsConfig:
        if taken := sorted(self.template_kwargs.keys() & TEMPLATE_KWARGS_TAKEN):
            raise ValueError(f"template_kwargs: {', '.join(taken)} cannot be set here")
        return self


class EmbeddedConfig(Block):
    """A transformers model inside this process: for quick starts, tests and debugging."""

    kind: Literal["embedded"] = "embedded"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "cpu"
    batch_size: Positive = 16
    trust_remote_code: bool = False


def holds_credentials(url: str) -> bool:
    """Whether a user name or a password stands in the URL, and so would wherever it is written."""
    return "@" in urlsplit(url).netloc


class ServerConfig(Block):
    """What is alike for every kind of running server."""

    kind: str
    url: str | Annotated[list[str], Field(min_length=1)]
    """One endpoint, or several to spread over: least in flight first."""
    prefix_affinity: bool = False
    """Send prompts that begin alike to the same endpoint, for its prefix cache."""
    queue_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """What a rollout may wait before its first token..."""
    slowest_tokens_per_s: Annotated[float, Field(gt=0)] = 2.0
    """... and the pace after which a server counts as stuck: both give a rollout's timeout."""
    down_after_s: Annotated[float, Field(gt=0)] = 600.0
    """The run stops when no endpoint has answered for so long."""

    api_key_variable: ClassVar[str]

    @property
    def urls(self) -> list[str]:
        return [self.url] if isinstance(self.url, str) else self.url

    @model_validator(mode="after")
    def _no_credentials(self) -> Self:
        if any(map(holds_credentials, self.urls)):
            raise ValueError(
                "url: holds a user name or password, which would stand in run.json; "
                f"give an API key in the environment variable {self.api_key_variable} instead"
            )
        return self


class SGLangConfig(ServerConfig):
    """One or more running SGLang servers with the same model."""

    kind: Literal["sglang"] = "sglang"
    route: Literal["generate", "chat"] = "generate"
    """generate sends token ids to /generate. chat sends messages and tools to
    /v1/chat/completions (0.5.18 and newer), and the server renders them."""
    shared: bool = False
    """Whether others send requests to these servers at the same time: refuses settings whose
    meaning then depends on the neighbours in a batch."""
    support_logprobs: bool = True
    """Record the logprob of every support id, not only the sampled one: replay then knows the exact
    KL over the support, for 4 bytes more per id."""

    api_key_variable = "SGLANG_API_KEY"


class VLLMConfig(ServerConfig):
    """One or more running vLLM servers (0.28 and newer) with the same model, started with
    --return-sampling-mask --logprobs-mode processed_logprobs: docs/vllm.md."""

    kind: Literal["vllm"] = "vllm"

    api_key_variable = "VLLM_API_KEY"


EngineConfig = Annotated[EmbeddedConfig | SGLangConfig | VLLMConfig, Field(discriminator="kind")]


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
    on_overflow: OnOverflow = "skip"
    """Where ties at a cut-off made a support larger than the server's cap: skip the rollout, or
    ask for it again with half the top_k, which is then what its record says."""
    keep_aborted: bool = False
    """Store attempts that the server broke off, beside the rollout, as {rollout_id}#abort{n}."""
    single_weight_version: bool = False
    """Refuse a rollout that the weights changed under: it is asked for again, like an aborted
    one."""
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

    @model_validator(mode="after")
    def _chat_needs_messages(self) -> CollectConfig:
        is_chat = isinstance(self.engine, SGLangConfig) and self.engine.route == "chat"
        if is_chat and self.prompts.format != "chat":
            raise ValueError(
                "engine.route: chat sends messages; set prompts.format=chat, or "
                "engine.route=generate for text"
            )
        return self

    @model_validator(mode="after")
    def _versions_are_told(self) -> CollectConfig:
        if self.single_weight_version and isinstance(self.engine, VLLMConfig):
            raise ValueError(
                "single_weight_version: a vLLM server does not say which weights sampled a "
                "rollout; remove it, and move weights only while no rollout runs"
            )
        return self

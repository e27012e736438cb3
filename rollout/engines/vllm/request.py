"""What vLLM's `/inference/v1/generate` is asked, and which settings it cannot serve."""

from __future__ import annotations

from typing import Any

from rollout.errors import ConfigError, NotReplayable
from rollout.prompts import Prompt
from rollout.sampling import SamplingParams

PATH = "/inference/v1/generate"

# a lower one is raised to it without a word (`vllm/sampling_params.py`)
LOWEST_TEMPERATURE = 0.01
HIGHEST_TEMPERATURE = 2.0

GRAMMARS = {
    "regex": "regex",
    "json_schema": "json",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}
"""Our names, which are SGLang's, and those of vLLM's `structured_outputs`."""

UNSUPPORTED = {
    "stop_regex": "vLLM has no such stop: use sampling.stop or sampling.stop_token_ids",
    "disallowed_token_ids": "vLLM has no ban of ids that leaves the others as they are: remove it, "
    "or use an SGLang server",
}


def request(prompt: Prompt, params: SamplingParams, model: str) -> dict[str, Any]:
    """One prompt as token ids, n = 1, not streamed, with the sampled id's logprob."""
    return {
        "model": model,
        "token_ids": prompt.ids.tolist(),
        "sampling_params": sampling_params(params),
        "stream": False,
    }


def sampling_params(params: SamplingParams) -> dict[str, Any]:
    """`params` in vLLM's words; a greedy one as what it is, temperature 1 with top_k 1: a server
    that returns masks refuses temperature 0."""
    sampler = params.sampler
    sent: dict[str, Any] = {
        **sampler._asdict(),
        "max_tokens": params.max_new_tokens,
        "min_tokens": params.min_new_tokens,
        "logprobs": 0,  # of the sampled id alone
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "repetition_penalty": params.repetition_penalty,
        "stop": params.stop,
        "stop_token_ids": params.stop_token_ids,
        "ignore_eos": params.ignore_eos,
        # stop strings are looked for in the text
        "skip_special_tokens": params.skip_special_tokens,
        "spaces_between_special_tokens": params.spaces_between_special_tokens,
        "include_stop_str_in_output": params.no_stop_trim,
    }
    if params.sampling_seed is not None:
        sent["seed"] = params.sampling_seed
    for ours, theirs in GRAMMARS.items():
        if grammar := getattr(params, ours):
            sent["structured_outputs"] = {theirs: grammar}
    return sent


def check(params: SamplingParams, vocab_size: int) -> None:
    """Raise `NotReplayable` or `ConfigError` for what vLLM would refuse, change or ignore."""
    params.check_replayable()
    if params.logit_bias:
        raise NotReplayable("sampling.logit_bias: a ban (-inf) has no form in JSON: remove it")
    for name, why in UNSUPPORTED.items():
        if getattr(params, name):
            raise ConfigError(f"sampling.{name}: {why}")
    if not params.is_greedy and params.temperature < LOWEST_TEMPERATURE:
        raise NotReplayable(
            f"sampling.temperature: got {params.temperature}, wanted 0 or at least "
            f"{LOWEST_TEMPERATURE}; vLLM samples at {LOWEST_TEMPERATURE} instead, and does not say"
        )
    if params.temperature > HIGHEST_TEMPERATURE:
        raise ConfigError(
            f"sampling.temperature: got {params.temperature}, vLLM allows at most "
            f"{HIGHEST_TEMPERATURE:g}; lower it"
        )
    if isinstance(params.top_k, int) and params.top_k >= vocab_size:
        raise NotReplayable(
            f"sampling.top_k: got {params.top_k}, must be below the vocabulary of {vocab_size}: "
            "more truncates nothing"
        )

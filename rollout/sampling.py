"""SamplingParams: how one rollout is sampled, and whether a trainer can replay it."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from rollout.blocks import Block
from rollout.errors import NotReplayable

GREEDY_BELOW = 1e-6
"""SGLang samples a temperature below this as temperature 1, top_k 1."""

AUTO_TOP_K = 512
"""What `top_k: auto` becomes, where the engine allows as much."""

UNREPLAYABLE = {
    "watermark": "a watermark moves the logits that survive, and a support does not record by how "
    "much: remove it",
    "beam_width": "a beam search does not sample, so there is nothing to replay: remove it",
    "custom_logit_processor": "what a processor does to the logits that survive is not recorded; "
    "to ban tokens, which a support does record, set sampling.disallowed_token_ids",
    "custom_params": "they are for a custom logit processor; to ban tokens set "
    "sampling.disallowed_token_ids",
}


class Sampler(NamedTuple):
    """What the sampler did, after the greedy rule."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float


class SamplingParams(Block):
    """How one rollout is sampled; the names and the meaning are SGLang's.

    The first block of fields shapes the support. Stops, grammars, `min_new_tokens` and
    `disallowed_token_ids` only exclude ids, so a support records them exactly. What stands in the
    last block is known here so that `check_replayable` can refuse it by name.
    """

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: int | Literal["auto"] | None = None
    """auto: a number that leaves room for ties below the engine's cap, for those who think in
    top_p; the engine's `resolve` fills it in."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    max_new_tokens: int = 128
    sampling_seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None

    stop: list[str] = []
    stop_token_ids: list[int] = []
    stop_regex: list[str] = []
    ignore_eos: bool = False
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    regex: str | None = None
    json_schema: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    disallowed_token_ids: list[int] | None = None
    """Ids that are never sampled; SGLang wants --enable-custom-logit-processor for it."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    """Like the one above, of the text alone."""
    no_stop_trim: bool = False

    n: int = 1
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] | None = None
    watermark: Any = None
    beam_width: int | None = None
    custom_logit_processor: str | None = None
    custom_params: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_grammar(self) -> SamplingParams:
        named = [g for g in ("regex", "json_schema", "ebnf", "structural_tag") if getattr(self, g)]
        if len(named) > 1:
            raise ValueError(f"only one grammar at a time, got {' and '.join(named)}")
        return self

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def top_p_is_off(self) -> bool:
        """Whether a top_p below 1 cuts nothing: engines hold it as float32, which may be 1."""
        return self.top_p < 1 and bool(np.float32(self.top_p) >= 1)

    @property
    def sampler(self) -> Sampler:
        """The settings as the sampler applies them; call `check_replayable` first."""
        if self.is_greedy:
            return Sampler(1.0, self.top_p, 1, self.min_p)
        top_k = -1 if self.top_k is None else self.top_k
        assert top_k != "auto", "an engine has not resolved top_k yet"
        return Sampler(self.temperature, self.top_p, top_k, self.min_p)

    def check_replayable(self, max_top_k: int | None = None) -> None:
        """Raise `NotReplayable` if the reply could not be replayed from its supports.

        `max_top_k` is the server's cap (`--sampling-mask-max-tokens`), where one is known.
        """
        if not self.is_greedy:
            self._check_top_k(max_top_k)
        if self.n != 1:
            raise NotReplayable(
                f"sampling.n: got {self.n}, must be 1; SGLang fails on n > 1 with a sampling mask: "
                "set prompts.rollouts_per_prompt instead"
            )
        if self.max_new_tokens < 1:
            raise NotReplayable(
                f"sampling.max_new_tokens: got {self.max_new_tokens}, must be at least 1; "
                "without an output token there is no support"
            )
        neutral = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
        for name, value in neutral.items():
            if (got := getattr(self, name)) != value:
                raise NotReplayable(
                    f"sampling.{name}: got {got}, must be {value:g}; a penalty moves the logits "
                    "that survive, and a support does not record by how much: remove it"
                )
        for name, why in UNREPLAYABLE.items():
            if getattr(self, name) is not None:
                raise NotReplayable(f"sampling.{name}: {why}")
        if finite := {k: v for k, v in (self.logit_bias or {}).items() if v != float("-inf")}:
            token, bias = next(iter(finite.items()))
            raise NotReplayable(
                f"sampling.logit_bias: got {bias:+g} for token {token}; a finite bias moves the "
                "logits that survive, and a support does not record by how much: remove it"
            )

    def _check_top_k(self, max_top_k: int | None) -> None:
        if self.top_k == "auto":
            return  # the engine that resolves it knows its cap
        if self.top_k is None or self.top_k == -1:
            raise NotReplayable(
                f"sampling.top_k: got {self.top_k}, must be finite; top_p bounds probability mass, "
                "not the number of ids, so a support of a top_p-only request has no bound. "
                "Set sampling.top_k, for example to 512 next to top_p 0.97"
            )
        if self.top_k < 1:
            raise NotReplayable(f"sampling.top_k: got {self.top_k}, must be at least 1")
        if max_top_k is not None and self.top_k > max_top_k:
            raise NotReplayable(
                f"sampling.top_k: got {self.top_k}, the engine allows at most {max_top_k}; "
                "lower it (SGLang: or raise --sampling-mask-max-tokens on the server)"
            )

    def to_request(self) -> dict[str, Any]:
        """`sampling_params` of a request: the sampler's knobs always, the others where set."""
        always = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 1 if self.is_greedy else self.top_k,
            "min_p": self.min_p,
            "max_new_tokens": self.max_new_tokens,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
        }
        elsewhere = set(always) | {"n", "disallowed_token_ids"}
        request = always | self.model_dump(exclude_defaults=True, exclude=elsewhere)
        if self.disallowed_token_ids:
            request["custom_params"] = {"token_ids": self.disallowed_token_ids}
        return request


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces, so that equal values are equal strings."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

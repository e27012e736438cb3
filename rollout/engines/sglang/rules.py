"""What each SGLang release does with a sampling mask, 0.5.16 to 0.5.23, as data.

What a server would refuse, ignore or get wrong is known before anything is sent. A release newer
than the table is taken to be like the newest in it. That 0.5.18 alone admits an unbounded top_k is
no use: a support without a bound is refused here for every release.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from rollout.errors import (
    EngineError,
    EngineRefused,
    NotReplayable,
    ReplyMalformed,
    SupportOverflow,
)
from rollout.sampling import AUTO_TOP_K, SamplingParams

NEWEST = (0, 5, 23)  # in this table
OLDEST = (0, 5, 16)  # the first that returns a mask
CHAT_SINCE = (0, 5, 18)  # before, the chat endpoint ignores the field
SPANS_SINCE = (0, 5, 19)  # weight versions by token; before, the one at the end
CAPTURED_SINCE = (0, 5, 20)  # the set it sampled from; before, rebuilt beside the sampler
SUPPORT_MODE_SINCE = (0, 5, 21)  # logprobs of every support id; before, ignored without a word
SPECULATIVE_SINCE = (0, 5, 22)

CAP_FIELD = "sampling_mask_max_tokens"
DEFAULT_CAP = 4096
MASKED_SPECULATION = ("DFLASH", "DSPARK")
WATERMARKS = ("watermark_default_enabled", "watermark_enforce_all")
DISTORTING = {"logit_bias", "watermark", "custom_params", "beam_width", "n"}
"""Settings that a request of ours does not name, so that the server's own would hold."""

OVERFLOW_WORDS = "Sampling support exceeds --sampling-mask-max-tokens"


@dataclass(frozen=True)
class ServerRules:
    """What one server does; made from its `/server_info`."""

    version: tuple[int, ...]
    sampling_backend: str | None
    cap: int | None  # largest top_k, and largest support, with a mask; None = no limit
    speculative: str | None
    deterministic: bool  # honours seeds, with the pytorch sampler
    bans: bool | None  # takes custom logit processors, so can ban tokens; None = it does not say
    frontend: str | None  # None = it does not say (before 0.5.21)
    watermarks: bool  # every request, unasked
    preferred: Mapping[str, Any]  # sampling settings it adds to those of a request

    @classmethod
    def of(cls, server_info: Mapping[str, Any]) -> ServerRules:
        """Raises `EngineError` for a release without sampling masks."""
        text = str(server_info.get("version", ""))
        version = _version(text, server_info)
        if version < OLDEST:
            raise EngineError(
                f"SGLang {text} has no sampling masks; they came with 0.5.16, upgrade the server"
            )
        cap = server_info.get(CAP_FIELD) or DEFAULT_CAP
        return cls(
            version=version,
            sampling_backend=server_info.get("sampling_backend"),
            cap=int(cap) if version >= CAPTURED_SINCE else None,
            speculative=server_info.get("speculative_algorithm"),
            deterministic=bool(server_info.get("enable_deterministic_inference")),
            bans=server_info.get("enable_custom_logit_processor"),
            frontend=server_info.get("frontend"),
            watermarks=any(server_info.get(name) for name in WATERMARKS),
            preferred=_preferred(server_info.get("preferred_sampling_params")),
        )

    @property
    def captures(self) -> bool:
        """Whether a mask is the set that was sampled from, not a reconstruction."""
        return self.version >= CAPTURED_SINCE

    @property
    def keeps_ties(self) -> bool:
        """Speculative verification cuts by rank whatever the backend."""
        return self.captures and self.sampling_backend == "flashinfer" and not self.speculative

    @property
    def has_support_mode(self) -> bool:
        return self.version >= SUPPORT_MODE_SINCE

    @property
    def has_spans(self) -> bool:
        """Whether a reply says which weights sampled which tokens."""
        return self.version >= SPANS_SINCE

    def filter_order(self, min_p: float, *, shared: bool = False) -> str | None:
        """FlashInfer filters a whole batch one filter after another as soon as one request in it
        uses min_p: on a shared server, nobody knows."""
        if self.speculative:
            return "sequential"  # verification renormalises what top_k left before top_p
        if not self.keeps_ties:
            return "joint"
        if shared:
            return None
        return "sequential" if min_p > 0 else "joint"

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """`params` with a number for `top_k: auto`: room for ties below the server's cap."""
        if params.top_k != "auto":
            return params
        cap = self.cap or DEFAULT_CAP
        top_k = max(1, min(AUTO_TOP_K, cap - max(64, cap // 8)))
        return params.model_copy(update={"top_k": top_k})

    def check_route(self, route: str) -> None:
        """Raise `EngineRefused` where a mask cannot come back by this route."""
        if route == "chat" and self.version < CHAT_SINCE:
            raise EngineRefused(
                f"SGLang {'.'.join(map(str, self.version))} ignores return_sampling_mask on "
                "/v1/chat/completions, which knows it since 0.5.18; set engine.route=generate or "
                "upgrade the server"
            )
        if self.frontend not in (None, "python"):
            raise EngineRefused(
                f"the server's {self.frontend} front end leaves the sampling mask out of its "
                "replies; start it without SGLANG_RUST_SERVER"
            )

    def check(self, params: SamplingParams, *, shared: bool = False) -> None:
        """Raise `NotReplayable` or `EngineRefused` for what this server would refuse or get wrong;
        `shared` where others use it at the same time."""
        params.check_replayable(self.cap)
        if self.sampling_backend == "ascend":
            raise EngineRefused("the ascend sampling backend returns no sampling mask")
        if self.speculative:
            self._check_speculative(params)
        self._check_unasked()
        if params.disallowed_token_ids:
            self._check_bans(shared)
        if params.min_p > 0:
            self._check_min_p(shared)

    def _check_unasked(self) -> None:
        """What the server does to logits although nobody asked."""
        if self.watermarks:
            raise EngineRefused(
                "the server watermarks every request, which moves the logits that survive, and a "
                "support does not record by how much; start it without"
            )
        if distorting := sorted(self.preferred.keys() & DISTORTING):
            raise EngineRefused(
                f"the server adds {', '.join(distorting)} to every request, which moves logits "
                "in a way that a support does not record; remove it from its "
                "--preferred-sampling-params"
            )

    def _check_bans(self, shared: bool) -> None:
        if self.bans is False:
            raise EngineRefused(
                "sampling.disallowed_token_ids: the server takes no logit processors; "
                "start it with --enable-custom-logit-processor"
            )
        if shared:
            raise NotReplayable(
                "sampling.disallowed_token_ids: not on a shared server; SGLang stops when two "
                "requests of a batch ban different tokens: use a server of your own"
            )

    def _check_min_p(self, shared: bool) -> None:
        if shared:
            raise NotReplayable(
                "sampling.min_p: not on a shared server; one request with min_p changes the order "
                "of filters for its whole batch, so supports would depend on the neighbours: "
                "remove it, or use a server of your own (engine.shared=false)"
            )
        if self.deterministic:
            raise NotReplayable(
                "sampling.min_p: a deterministic server gives every request a seed, and its "
                "sampler stops on min_p with a seed; remove it, or start the server without "
                "--enable-deterministic-inference"
            )

    def _check_speculative(self, params: SamplingParams) -> None:
        name = str(self.speculative).upper()
        if self.version < SPECULATIVE_SINCE or name not in MASKED_SPECULATION:
            raise EngineRefused(
                f"the server decodes speculatively ({self.speculative}) and then returns no "
                "sampling mask; start it without, or (0.5.22 and newer) with DFlash"
            )
        if params.min_p > 0:
            raise NotReplayable("sampling.min_p: not with speculative decoding, remove it")


def _version(text: str, server_info: Mapping[str, Any]) -> tuple[int, ...]:
    """A build from source names no release; one that has a cap is like the newest."""
    version = tuple(int(part) for part in re.findall(r"\d+", text)[:3])
    if any(version):
        return version
    if CAP_FIELD in server_info:
        return NEWEST
    raise ReplyMalformed(
        f"/server_info: version is {text!r} and there is no {CAP_FIELD}: what this server does "
        "with a sampling mask is not known; ask the Python server directly, not a router"
    )


def _preferred(given: str | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """--preferred-sampling-params, which some releases report as the JSON they were given."""
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given)
        except msgspec.DecodeError as error:
            raise ReplyMalformed(f"/server_info: preferred_sampling_params: {error}") from error
    return given if isinstance(given, Mapping) else {}


def refusal(message: str) -> EngineRefused:
    """The error for an HTTP 4xx with the server's words."""
    if OVERFLOW_WORDS in message:
        return SupportOverflow(
            f"{message} (lower sampling.top_k, or raise --sampling-mask-max-tokens)"
        )
    return EngineRefused(message)

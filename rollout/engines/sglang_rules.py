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

from rollout.errors import EngineError, EngineRefused, NotReplayable, SupportOverflow
from rollout.sampling import SamplingParams

OLDEST = (0, 5, 16)  # the first that returns a mask
CAPTURED_SINCE = (0, 5, 20)  # the set it sampled from; before, rebuilt beside the sampler
SPECULATIVE_SINCE = (0, 5, 22)

DEFAULT_CAP = 4096
AUTO_TOP_K = 512
MASKED_SPECULATION = ("DFLASH", "DSPARK")

OVERFLOW_WORDS = "Sampling support exceeds --sampling-mask-max-tokens"


@dataclass(frozen=True)
class ServerRules:
    """What one server does; made from its `/server_info`."""

    version: tuple[int, ...]
    sampling_backend: str | None
    cap: int | None  # largest top_k, and largest support, with a mask; None = no limit
    speculative: str | None

    @classmethod
    def of(cls, server_info: Mapping[str, Any]) -> ServerRules:
        """Raises `EngineError` for a release without sampling masks."""
        text = str(server_info.get("version", ""))
        version = tuple(int(part) for part in re.findall(r"\d+", text)[:3])
        if version and version < OLDEST:
            raise EngineError(
                f"SGLang {text} has no sampling masks; they came with 0.5.16, upgrade the server"
            )
        cap = server_info.get("sampling_mask_max_tokens", DEFAULT_CAP)
        return cls(
            version=version,
            sampling_backend=server_info.get("sampling_backend"),
            cap=int(cap) if version >= CAPTURED_SINCE else None,
            speculative=server_info.get("speculative_algorithm"),
        )

    @property
    def captures(self) -> bool:
        """Whether a mask is the set that was sampled from, not a reconstruction."""
        return self.version >= CAPTURED_SINCE

    @property
    def keeps_ties(self) -> bool:
        return self.captures and self.sampling_backend == "flashinfer"

    def filter_order(self, min_p: float) -> str:
        """FlashInfer filters one after another as soon as min_p is used."""
        return "sequential" if self.keeps_ties and min_p > 0 else "joint"

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """`params` with a number for `top_k: auto`: room for ties below the server's cap."""
        if params.top_k != "auto":
            return params
        cap = self.cap or DEFAULT_CAP
        top_k = max(1, min(AUTO_TOP_K, cap - max(64, cap // 8)))
        return params.model_copy(update={"top_k": top_k})

    def check(self, params: SamplingParams) -> None:
        """Raise `NotReplayable` or `EngineRefused` for what this server would refuse."""
        params.check_replayable(self.cap)
        if self.sampling_backend == "ascend":
            raise EngineRefused("the ascend sampling backend returns no sampling mask")
        if self.speculative:
            self._check_speculative(params)

    def _check_speculative(self, params: SamplingParams) -> None:
        name = str(self.speculative).upper()
        if self.version < SPECULATIVE_SINCE or name not in MASKED_SPECULATION:
            raise EngineRefused(
                f"the server decodes speculatively ({self.speculative}) and then returns no "
                "sampling mask; start it without, or (0.5.22 and newer) with DFlash"
            )
        if params.min_p > 0:
            raise NotReplayable("sampling.min_p: not with speculative decoding, remove it")


def refusal(message: str) -> EngineRefused:
    """The error for an HTTP 4xx with the server's words."""
    if OVERFLOW_WORDS in message:
        return SupportOverflow(
            f"{message} (lower sampling.top_k, or raise --sampling-mask-max-tokens)"
        )
    return EngineRefused(message)

"""What `rollout replay` can be told, and the gates of its verdict."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollout.blocks import Block

Limit = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class GatesConfig(Block):
    """Upper limits; a run that exceeds one is inconsistent. Never on a maximum alone: one
    token in bf16 says nothing."""

    log_ratio_abs_mean: Limit = 0.06
    log_ratio_abs_p99: Limit = 0.30
    mismatch_kl: Limit = 5e-3
    support_kl: Limit = 5e-3
    audit_inconsistent: Limit = 0.01


class ReplayConfig(Block):
    """How the policy is run. The head is in float32 unless an engine is to be mirrored."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    head_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    """auto: the GPU if there is one."""
    max_tokens: Annotated[int, Field(ge=1)] = 4096
    audit_tokens: Annotated[int, Field(ge=0)] = 512
    """Sampled tokens whose supports are audited, drawn with a fixed seed; 0 = none."""
    trust_remote_code: bool = False
    gates: GatesConfig = GatesConfig()

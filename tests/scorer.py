"""Evidence for many faulty versions of the same rollouts, without running the policy each time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from replay import Policy, pack, score_support
from replay.evidence import Evidence, make_evidence
from replay.reference import shape_logits
from rollout.record import Rollout


class Scorer:
    """What `verify` computes for `diagnose`. Hidden states are kept by input ids, the policy's
    whole-vocabulary sums by input ids and temperature; `head` changes share the hidden states."""

    def __init__(self, policy: Policy, head_dtype: torch.dtype = torch.float32) -> None:
        self.policy, self.head_dtype = policy, head_dtype
        self._hidden: dict[bytes, torch.Tensor] = {}
        self._full: dict[tuple[bytes, float], torch.Tensor] = {}

    def with_policy(self, policy: Policy) -> Scorer:
        """The same body with another head, scale or softcap."""
        other = Scorer(policy, self.head_dtype)
        other._hidden = self._hidden
        return other

    def evidence(self, rollouts: Sequence[Rollout]) -> Evidence:
        return Evidence.concatenate([self._one(r) for r in rollouts if len(r.support.ids)])

    @torch.inference_mode()
    def _one(self, rollout: Rollout) -> Evidence:
        (batch,) = pack([rollout], 1)
        key = batch.input_ids.numpy().tobytes()
        if key not in self._hidden:
            self._hidden[key] = self.policy.hidden(batch.input_ids, batch.position_ids).clone()
        hidden, policy = self._hidden[key][batch.hidden_rows], self.policy
        head: dict[str, Any] = {
            "temperature": batch.temperature,
            "softcap": policy.softcap,
            "logit_scale": policy.logit_scale,
        }
        other = torch.bfloat16 if self.head_dtype == torch.float32 else torch.float32
        masked, rounded = (
            score_support(
                hidden,
                policy.weight,
                batch.targets,
                batch.support_ids,
                batch.support_offsets,
                return_support_logprobs=True,
                head_dtype=dtype,
                **head,
            )
            for dtype in (self.head_dtype, other)
        )
        if (key, rollout.temperature) not in self._full:
            z = hidden.float() @ policy.weight.float().T
            z = shape_logits(z, policy.logit_scale, policy.softcap, self.head_dtype)
            self._full[key, rollout.temperature] = (z / rollout.temperature).logsumexp(1)
        full = masked.logprob + masked.logsumexp - self._full[key, rollout.temperature]
        assert masked.support_logprobs is not None and rounded.support_logprobs is not None
        return make_evidence(
            [rollout],
            masked.support_logprobs.numpy(),
            rounded.support_logprobs.numpy(),
            np.asarray(full),
            masked.logsumexp.numpy(),
            policy.softcap,
        )

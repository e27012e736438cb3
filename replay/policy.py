"""Policy: the trainer-side model, split into hidden states and head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from replay.batch import PackedBatch
from replay.facts import Head
from replay.memory import LESS_EACH, memory_for
from replay.precision import InPrecision
from replay.reference import SupportScores, shape_logits
from replay.score import score_support
from replay.support_plan import plan
from rollout.errors import PolicyError

# relative error that rounding explains; a leak across packed rollouts is far above it
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}


@dataclass(frozen=True, eq=False)
class Policy:
    """A causal language model whose head is applied by the scoring functions, not by the model."""

    body: Any  # maps input_ids, position_ids to hidden states
    weight: Tensor  # [V, D] of the head
    bias: Tensor | None  # [V]
    logit_scale: float | None
    softcap: float | None
    device: torch.device
    description: dict[str, str]  # for the report

    @classmethod
    def load(
        cls,
        path: str,
        *,
        dtype: str,
        device: str,
        trust_remote_code: bool = False,
        packed: bool = True,
    ) -> Policy:
        """Load a Hugging Face checkpoint and check that it can be split and, if asked, packed.

        Raises `PolicyError` where the model computes its logits in a way that is not known here,
        or attends across packed rollouts, `PolicyOutOfMemory` where it does not fit on the device.
        """
        from rollout.engines.hf import load_model  # transformers takes seconds to import

        with memory_for(f"{path} in {dtype} on {device}", LESS_EACH):
            model = load_model(
                path, dtype=dtype, device=device, trust_remote_code=trust_remote_code
            )
            return cls.of(model.requires_grad_(False), name=path, packed=packed)

    @classmethod
    def of(cls, model: Any, *, name: str, packed: bool = True) -> Policy:
        """A transformers model that is loaded already, checked like one that `load` loads.

        The policy shares the model's weights and follows their changes; gradients reach them
        through `forward` and `weight`. Raises `PolicyError`.
        """
        head = model.get_output_embeddings()
        if head is None:
            raise PolicyError(f"{name}: has no output embeddings, so no next-token logits")
        config = model.config.get_text_config()
        policy = cls(
            body=model.base_model,
            weight=head.weight,
            bias=getattr(head, "bias", None),
            logit_scale=_logit_scale(config),
            softcap=getattr(config, "final_logit_softcapping", None),
            device=head.weight.device,
            description={
                "model": name,
                "dtype": str(head.weight.dtype).removeprefix("torch."),
                "device": head.weight.device.type,
            },
        )
        _check_head(policy, model, name)
        if packed:
            _check_packing(policy, name)
        return policy

    def in_precision(self, dtype: torch.dtype) -> Policy:
        """The policy as if its weights had been loaded in `dtype`; shares them, see `InPrecision`.

        A head that `dtype` holds exactly is kept: scoring functions widen the rows that they read.
        """

        def body(**arguments: Any) -> Any:
            with InPrecision(dtype):
                return self.body(**arguments)

        exact = torch.promote_types(self.weight.dtype, dtype) == dtype
        weight = self.weight if exact else self.weight.detach().to(dtype)
        bias = self.bias if exact or self.bias is None else self.bias.detach().to(dtype)
        return replace(self, body=body, weight=weight, bias=bias)

    def head(self, head_dtype: torch.dtype) -> Head:
        """What makes logits of hidden states, rounded to `head_dtype`."""
        return Head(self.weight, self.bias, self.logit_scale, self.softcap, head_dtype)

    def over_supports(
        self, hidden: Tensor, batch: PackedBatch, head_dtype: torch.dtype
    ) -> SupportScores:
        """All that `score_support` can say of the scored tokens of `batch` from `hidden` [T, D].

        An id that stands twice in a support is no error: a content rule finds it.
        """
        return score_support(
            hidden,
            targets=batch.targets,
            support_ids=batch.support_ids,
            support_offsets=batch.support_offsets,
            temperature=batch.temperature,
            plan=plan(batch.support_ids, batch.support_offsets, check=False),
            return_logsumexp=True,
            return_support_logprobs=True,
            **self.head(head_dtype)._asdict(),
        )

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    @torch.inference_mode()
    def hidden(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """What `forward` returns, without gradients."""
        return self.forward(input_ids, position_ids)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """[N, D] Last hidden states of packed rollouts, whose positions restart at 0.

        Without `use_cache=False` transformers takes packed rollouts for one sequence, silently.
        """
        output = self.body(
            input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden


def _logit_scale(config: Any) -> float | None:
    """Cohere multiplies logits by `logit_scale`, Granite divides them by `logits_scaling`."""
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        return 1.0 / float(divisor)
    scale = getattr(config, "logit_scale", None)
    return None if scale is None else float(scale)


def _sequence(policy: Policy, length: int) -> tuple[Tensor, Tensor]:
    ids = torch.arange(7, 7 + 13 * length, 13, device=policy.device) % policy.vocab_size
    return ids, torch.arange(length, device=policy.device)


@torch.inference_mode()
def _check_head(policy: Policy, model: Any, path: str) -> None:
    """The model's own logits must be what the scoring functions compute."""
    ids, positions = _sequence(policy, 8)
    own = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
    z = policy.hidden(ids, positions).float() @ policy.weight.float().T
    if policy.bias is not None:
        z = z + policy.bias.float()
    z = shape_logits(z, policy.logit_scale, policy.softcap, torch.float32)
    error = _relative_error(z, own)
    if not error <= TOLERANCE[policy.weight.dtype]:  # NaN too
        raise PolicyError(
            f"{path}: its logits differ from head x hidden state by {error:.1%}; this model shapes "
            "its logits in a way that is not known here"
        )


def _check_packing(policy: Policy, path: str) -> None:
    """Two sequences in one pack must give what each gives alone."""
    parts = [_sequence(policy, 6), _sequence(policy, 9)]
    packed = policy.hidden(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
    alone = torch.cat([policy.hidden(*part) for part in parts])
    error = _relative_error(packed, alone)
    if not error <= TOLERANCE[policy.weight.dtype]:
        raise PolicyError(
            f"{path}: packed rollouts see each other (hidden states change by {error:.1%}); this "
            "model does not restart at position 0: replay one rollout at a time with --max-tokens 1"
        )


def _relative_error(got: Tensor, wanted: Tensor) -> float:
    wanted = wanted.float()
    return float((got.float() - wanted).norm() / wanted.norm())

"""The scores a trainer asks for over recorded supports: checks, and the choice of what computes."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from replay import dense, reference, sparse, sparse_cpu
from replay.problem import Backend, Problem
from replay.reference import SupportScores, no_autocast
from replay.support_plan import SupportPlan, plan_for
from replay.vocab_parallel import VocabShard, plain_head

Impl = Literal["auto", "reference", "cpu", "triton", "dense"]
DENSE_FROM = 0.011  # of the vocabulary in the mean support: there a matmul takes over
DENSE_MEAN = 256
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def score_support(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    support_ids: Tensor,
    support_offsets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    logit_scale: float | None = None,
    softcap: float | None = None,
    head_dtype: torch.dtype = torch.float32,
    plan: SupportPlan | None = None,
    impl: Impl = "auto",
    return_logsumexp: bool = False,
    return_support_logprobs: bool = False,
    entropy_grad: bool = False,
    main_grad: Tensor | None = None,
    sparse_grad: bool = False,
    shard: VocabShard | None = None,
    check: bool = True,
) -> SupportScores:
    """Score each target under the policy, renormalised over its recorded support.

    Equal to the following, but gathers only the head rows that the supports name::

        logits = (hidden.float() @ weight.float().T + bias) * logit_scale      # [T, V]
        logits = softcap * tanh(logits / softcap) / temperature
        logprob[t] = logits[t, targets[t]] - logsumexp(logits[t, S_t])

    hidden [T, D] and weight [V, D] in any float dtype and with any strides; targets [T] and
    support_ids [E] integers; support_offsets [T + 1] integers, half-open, starting at 0;
    temperature a number or [T]; bias [V]. Sums are in fp32 (float64 for float64 inputs), whatever
    the caller's autocast. `head_dtype` bfloat16 rounds each logit to bf16 first, as an engine with
    a bf16 head does.

    A target outside its support scores -inf with zero gradient and is counted in `outside`; so
    does an empty support. A support of one id that is the target scores exactly 0, costs nothing
    and has no gradient. Select before arithmetic: ``loss = (x * logprob)[logprob > -inf].sum()``.

    Gradients reach hidden, weight and bias through `logprob`, `entropy` and `support_logprobs`
    ([E], with `return_support_logprobs`); `logsumexp` ([T], with `return_logsumexp`) has none.
    `entropy_grad` tells that the loss uses the entropy, so that nothing is kept for the gradient of
    the logprob alone ([T', D], of the tokens whose support is larger than one). The head's gradient
    is a dense [V, D] in its dtype, or is added to `main_grad` ([V, D], fp32) in backward, or with
    `sparse_grad` is a sparse tensor of the rows that occur. Two runs agree bitwise; with "cpu"
    and "triton" a row alone scores as it does in a batch.

    With `shard` the head is spread over ranks that score the same tokens: weight and bias are this
    rank's rows, hidden gets the whole gradient on every rank. A DTensor without `shard` (FSDP2) is
    gathered, and its gradient averaged over the ranks.

    `plan` is what `replay.plan(support_ids, support_offsets)` made of these supports; with it
    nothing waits for the device. Without it, `check=False` leaves out the search for ids that occur
    twice in one support. `impl` is "triton" (the default on CUDA), "cpu" (the default elsewhere),
    "dense" (matmuls over the whole vocabulary, the default on CUDA for supports of hundreds of ids
    each, where it is faster) or "reference", the definition, which keeps [E, D] for backward.

    Raises `ValueError` for shapes that do not fit, with both numbers, and what `plan` raises.
    """
    weight = plain_head(weight, shard)
    bias = None if bias is None else plain_head(bias, shard)
    check_rows(hidden, weight, targets)
    if shard is not None:
        shard.check(len(weight))
    _check_rest(temperature, bias, main_grad, hidden, weight)
    vocab_size = len(weight) if shard is None else shard.vocab_size
    made = plan_for(plan, len(hidden), support_ids, support_offsets, vocab_size, check=check)
    chosen = _choose(impl, made, hidden, weight, head_dtype)
    if shard is not None and (return_support_logprobs or chosen == "reference"):
        raise ValueError(
            "shard goes with impl cpu, dense or triton, and without return_support_logprobs"
        )
    if chosen == "reference":
        scores = reference.score_support(
            hidden,
            weight,
            targets,
            support_ids,
            support_offsets,
            temperature=temperature,
            bias=bias,
            logit_scale=logit_scale,
            softcap=softcap,
            head_dtype=head_dtype,
        )
        return _requested(scores, return_logsumexp, return_support_logprobs)
    if shard is not None:
        made, targets = made.part(shard.start, len(weight)), targets - shard.start
    problem = Problem(
        hidden=hidden,
        weight=weight,
        bias=bias,
        targets=targets.contiguous(),
        temperature=temperature if isinstance(temperature, Tensor) else float(temperature),
        logit_scale=None if logit_scale is None else float(logit_scale),
        softcap=None if softcap is None else float(softcap),
        head_dtype=head_dtype,
        plan=made,
        work=made.all_work if return_logsumexp else made.work,
    )
    outputs = sparse.Outputs(
        logsumexp=return_logsumexp,
        support_logprobs=return_support_logprobs,
        save=not entropy_grad,
        main_grad=main_grad,
        sparse_grad=sparse_grad,
        shard=shard,
    )
    with no_autocast(hidden), torch.cuda.device_of(hidden):
        return sparse.score(problem, _backend(chosen), outputs)


def _requested(scores: SupportScores, logsumexp: bool, support_logprobs: bool) -> SupportScores:
    return scores._replace(
        logsumexp=scores.logsumexp if logsumexp else None,
        support_logprobs=scores.support_logprobs if support_logprobs else None,
    )


def _choose(
    impl: Impl, made: SupportPlan, hidden: Tensor, weight: Tensor, head_dtype: torch.dtype
) -> str:
    if impl not in get_args(Impl):
        raise ValueError(f"impl is {impl!r}, must be one of {', '.join(get_args(Impl))}")
    if impl != "auto":
        return impl
    if not hidden.is_cuda:
        return "cpu"
    if not triton_fits(hidden, weight, head_dtype):
        return "reference"
    mean = made.num_entries / max(1, made.num_tokens)
    return "dense" if mean > max(DENSE_MEAN, DENSE_FROM * len(weight)) else "triton"


def triton_fits(hidden: Tensor, weight: Tensor, head_dtype: torch.dtype) -> bool:
    dtypes = (hidden.dtype, weight.dtype, head_dtype)
    return (
        hidden.is_cuda
        and all(dtype in TRITON_DTYPES for dtype in dtypes)
        and importlib.util.find_spec("triton") is not None
    )


def _backend(name: str) -> Backend:
    if name == "cpu":
        return sparse_cpu
    if name == "dense":
        return dense
    from replay.kernels import launch  # triton takes a second to import

    return launch


def check_rows(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {list(hidden.shape)} and weight {list(weight.shape)} must be [T, D] and [V, D]"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"{list(targets.shape)} targets for {len(hidden)} rows of hidden")


def check_temperature(temperature: Any, num_tokens: int) -> None:
    if isinstance(temperature, Tensor):
        if temperature.shape != (num_tokens,):
            raise ValueError(f"temperature {list(temperature.shape)} for {num_tokens} targets")
    elif not temperature > 0:
        raise ValueError(f"temperature is {temperature}, must be positive")


def _check_rest(
    temperature: Any, bias: Tensor | None, main_grad: Tensor | None, hidden: Tensor, weight: Tensor
) -> None:
    check_temperature(temperature, len(hidden))
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {list(bias.shape)} for {len(weight)} rows of weight")
    if main_grad is not None and (main_grad.shape != weight.shape or main_grad.stride(1) != 1):
        raise ValueError(
            f"main_grad {list(main_grad.shape)} for weight {list(weight.shape)}; "
            "must have its shape, and rows without gaps"
        )

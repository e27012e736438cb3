"""`replay.statistics` as Triton kernels: one program per row of a tile of logits."""

import triton
import triton.language as tl

from replay.kernels.support import _divisor, _shape


@triton.jit
def _logits(
    row, bias, offs_v, in_v, scale, softcap,
    HAS_BIAS: tl.constexpr, ROUND: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    z = tl.load(row + offs_v, mask=in_v, other=0.0).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias + offs_v, mask=in_v, other=0.0).to(tl.float32)
    return _shape(z, scale, softcap, ROUND, CAPPED)


@triton.jit
def update_kernel(
    logits, bias, targets, temperature, tops, masses, weighteds, found, argmaxes,
    num_columns, first_id, stride_row, scale, softcap,
    HAS_BIAS: tl.constexpr, PER_TOKEN: tl.constexpr, ROUND: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride_row
    divisor = _divisor(temperature, token, PER_TOKEN)
    column = tl.load(targets + token).to(tl.int64) - first_id
    top = tl.load(tops + token)
    mass = tl.load(masses + token)
    weighted = tl.load(weighteds + token)
    argmax = tl.load(argmaxes + token)
    target = tl.load(found + token)
    for v in range(0, num_columns, BLOCK_V):
        offs_v = v + tl.arange(0, BLOCK_V)
        in_v = offs_v < num_columns
        z, _ = _logits(row, bias, offs_v, in_v, scale, softcap, HAS_BIAS, ROUND, CAPPED)
        z = tl.where(in_v, z / divisor, -3.0e38)
        largest, index = tl.max(z, 0, return_indices=True)
        argmax = tl.where(largest > top, first_id + v + index, argmax)
        new_top = tl.maximum(top, largest)
        shrink = tl.exp(top - new_top)
        p = tl.exp(z - new_top)
        terms = tl.sum(tl.where(in_v, p * (z - new_top), 0.0), 0)
        weighted = shrink * (weighted + (top - new_top) * mass) + terms
        mass = shrink * mass + tl.sum(p, 0)
        own = tl.max(tl.where(offs_v == column, z, float("-inf")), 0)
        target = tl.maximum(target, own)
        top = new_top
    tl.store(tops + token, top)
    tl.store(masses + token, mass)
    tl.store(weighteds + token, weighted)
    tl.store(argmaxes + token, argmax)
    tl.store(found + token, target)


@triton.jit
def outside_kernel(
    logits, bias, temperature, tops, masses, argmaxes,
    num_columns, first_id, stride_row, scale, softcap,
    HAS_BIAS: tl.constexpr, PER_TOKEN: tl.constexpr, ROUND: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride_row
    divisor = _divisor(temperature, token, PER_TOKEN)
    top = tl.load(tops + token)
    mass = tl.load(masses + token)
    argmax = tl.load(argmaxes + token)
    for v in range(0, num_columns, BLOCK_V):
        offs_v = v + tl.arange(0, BLOCK_V)
        in_v = offs_v < num_columns
        z = tl.load(row + offs_v, mask=in_v, other=float("-inf")).to(tl.float32)
        is_outside = z != float("-inf")
        z = tl.where(is_outside, z, 0.0)  # which softcap would bring back from -inf
        if HAS_BIAS:
            z += tl.load(bias + offs_v, mask=in_v, other=0.0).to(tl.float32)
        z, _ = _shape(z, scale, softcap, ROUND, CAPPED)
        z = tl.where(is_outside, z / divisor, float("-inf"))
        largest, index = tl.max(z, 0, return_indices=True)
        argmax = tl.where(largest > top, first_id + v + index, argmax)
        new_top = tl.maximum(top, largest)
        mass = tl.exp(top - new_top) * mass + tl.sum(tl.exp(z - new_top), 0)
        top = new_top
    tl.store(tops + token, top)
    tl.store(masses + token, mass)
    tl.store(argmaxes + token, argmax)


@triton.jit
def gradient_kernel(
    logits, bias, targets, temperature, entropy, logsumexp,
    grad_logprob, grad_entropy, grad_logsumexp, out,
    num_columns, first_id, stride_row, stride_out, scale, softcap,
    HAS_BIAS: tl.constexpr, PER_TOKEN: tl.constexpr, ROUND: tl.constexpr, CAPPED: tl.constexpr,
    HAS_LOGPROB: tl.constexpr, HAS_ENTROPY: tl.constexpr, HAS_LOGSUMEXP: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = offs_v < num_columns
    divisor = _divisor(temperature, token, PER_TOKEN)
    z, slope = _logits(
        logits + token * stride_row, bias, offs_v, in_v, scale, softcap, HAS_BIAS, ROUND, CAPPED
    )
    log_p = z / divisor - tl.load(logsumexp + token)
    p = tl.exp(log_p)
    d = tl.zeros([BLOCK_V], tl.float32)
    if HAS_LOGPROB:
        by_logprob = tl.load(grad_logprob + token)
        column = tl.load(targets + token).to(tl.int64) - first_id
        d += tl.where(offs_v == column, by_logprob, 0.0) - p * by_logprob
    if HAS_ENTROPY:
        d -= p * (log_p + tl.load(entropy + token)) * tl.load(grad_entropy + token)
    if HAS_LOGSUMEXP:
        d += p * tl.load(grad_logsumexp + token)
    d = d * slope / divisor
    tl.store(out + token * stride_out + offs_v, d.to(out.dtype.element_ty), mask=in_v)

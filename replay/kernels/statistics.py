"""`replay.statistics` as Triton kernels: one program per row of a tile of logits."""

import triton
import triton.language as tl

from replay.kernels.support import LOWEST, _divisor, _shape


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
    """Every lane has statistics of its own columns; they meet once, at the end of the row."""
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride_row
    factor = tl.div_rn(1.0, _divisor(temperature, token, PER_TOKEN))
    tops_v = tl.full([BLOCK_V], LOWEST, tl.float32)
    mass_v = tl.zeros([BLOCK_V], tl.float32)
    weighted_v = tl.zeros([BLOCK_V], tl.float32)
    argmax_v = tl.zeros([BLOCK_V], tl.int32)
    for v in range(0, num_columns, BLOCK_V):
        offs_v = v + tl.arange(0, BLOCK_V)
        in_v = offs_v < num_columns
        z, _ = _logits(row, bias, offs_v, in_v, scale, softcap, HAS_BIAS, ROUND, CAPPED)
        z = tl.where(in_v, z * factor, 2 * LOWEST)  # below every top: exp makes it 0
        above = z - tops_v
        less = tl.exp(-tl.abs(above))
        higher = above > 0
        lower = weighted_v - above * mass_v  # seen from z
        weighted_v = tl.where(higher, less * lower, weighted_v + less * above)
        mass_v = tl.where(higher, less * mass_v + 1, mass_v + less)
        argmax_v = tl.where(higher, offs_v, argmax_v)
        tops_v = tl.where(higher, z, tops_v)

    before = tl.load(tops + token)
    largest = tl.max(tops_v, 0)
    top = tl.maximum(before, largest)
    shrink_v = tl.exp(tops_v - top)
    shrink = tl.exp(before - top)
    mass = tl.load(masses + token)
    weighted = shrink * (tl.load(weighteds + token) + (before - top) * mass)
    weighted += tl.sum(shrink_v * (weighted_v + (tops_v - top) * mass_v), 0)
    mass = shrink * mass + tl.sum(shrink_v * mass_v, 0)
    first = tl.min(tl.where(tops_v == largest, argmax_v, num_columns), 0)
    tl.store(tops + token, top)
    tl.store(masses + token, mass)
    tl.store(weighteds + token, weighted)
    tl.store(argmaxes + token, first_id + first, mask=largest > before)

    column = tl.load(targets + token).to(tl.int64) - first_id
    inside = (column >= 0) & (column < num_columns)
    own, _ = _logits(row, bias, column, inside, scale, softcap, HAS_BIAS, ROUND, CAPPED)
    tl.store(found + token, own * factor, mask=inside)


@triton.jit
def take_out_kernel(
    logits, ids, offsets, members, num_columns, first_id, stride_row, BLOCK_E: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride_row
    end = tl.load(offsets + token + 1)
    for e in range(tl.load(offsets + token), end, BLOCK_E):
        entry = e + tl.arange(0, BLOCK_E)
        in_e = entry < end
        column = tl.load(ids + entry, mask=in_e, other=-1).to(tl.int64) - first_id
        inside = in_e & (column >= 0) & (column < num_columns)
        tl.store(members + entry, tl.load(row + column, mask=inside), mask=inside)
        tl.store(row + column, float("-inf"), mask=inside)


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

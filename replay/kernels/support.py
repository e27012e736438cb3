"""The scores over the supports, and their gradients, as Triton kernels.

Axes: `T` tokens, `E` support entries, `V` vocabulary, `D` hidden, `K` entries of one program.
`rank` is a token's place among those with work, -1 for the others. Row offsets are 64-bit.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # below every logit; minus infinity would make 0 * inf


@triton.jit
def _divisor(temperature, token, PER_TOKEN: tl.constexpr):
    if PER_TOKEN:
        t = tl.load(temperature + token).to(tl.float32)
    else:
        t = temperature
    return t


@triton.jit
def _shape(z, scale, softcap, ROUND: tl.constexpr, CAPPED: tl.constexpr):
    """(logit, its derivative) of rounding to the head's dtype, scale and softcap."""
    if ROUND is not None:
        z = z.to(ROUND).to(tl.float32)
    z = z * scale
    slope = z * 0 + scale
    if CAPPED:
        tanh = 1 - 2 / (1 + tl.exp(2 * z / softcap))
        z = softcap * tanh
        slope = scale * (1 - tanh * tanh)
    return z, slope


@triton.jit
def _no_work(
    block, targets, ids, offsets, rank, logprob, entropy, logsumexp, z, outside,
    num_tokens, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Tokens without work: a singleton is 0 if it is the target; empty counts as outside."""
    token = block * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = token < num_tokens
    idle = inside & (tl.load(rank + token, mask=inside, other=0) < 0)
    start = tl.load(offsets + token, mask=idle, other=0)
    single = idle & (tl.load(offsets + token + 1, mask=idle, other=0) - start == 1)
    only = tl.load(ids + start, mask=single, other=-1).to(tl.int64)
    hit = single & (only == tl.load(targets + token, mask=idle, other=-1).to(tl.int64))
    tl.store(logprob + token, tl.where(hit, 0.0, float("-inf")), mask=idle)
    tl.store(entropy + token, tl.zeros([BLOCK_T], tl.float32), mask=idle)
    tl.store(logsumexp + token, tl.where(single, 0.0, float("-inf")), mask=idle)
    tl.store(z + start, tl.zeros([BLOCK_T], tl.float32), mask=single)
    missed = tl.sum((idle & ~hit).to(tl.int32), 0)
    if missed > 0:
        tl.atomic_add(outside, missed.to(tl.int64))


@triton.jit
def _finish(
    token, top, mass, weighted, z_target, logprob, entropy, logsumexp, outside
):  # fmt: skip
    log_mass = tl.log(mass)
    tl.store(logprob + token, z_target - top - log_mass)
    tl.store(entropy + token, log_mass - weighted / mass)
    tl.store(logsumexp + token, top + log_mass)
    if z_target == float("-inf"):
        tl.atomic_add(outside, tl.full([], 1, tl.int64))


@triton.jit
def _target_row(
    weight, y, z_target, softcap, divisor, offs_d, in_d, stride_wv, stride_wd,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """The target's head row times its softcap slope; 0 for a target outside its support."""
    inside = z_target > float("-inf")
    y = tl.where(inside, y, 0)
    row = tl.load(weight + y * stride_wv + offs_d * stride_wd, mask=in_d, other=0.0)
    row = tl.where(inside, row.to(tl.float32), 0.0)
    if CAPPED:
        tanh = tl.where(inside, z_target, 0.0) * divisor / softcap
        row = row * (1 - tanh * tanh)
    return row


@triton.jit(do_not_specialize=["num_items", "num_tokens", "first_slot"])
def forward_kernel(
    hidden, weight, bias, targets, temperature, ids, offsets, rank, items,
    logprob, entropy, logsumexp, z_out, outside, saved, part_stats, part_rows,
    num_items, num_tokens, first_slot, D, scale, softcap,
    stride_ht, stride_hd, stride_wv, stride_wd,
    HAS_BIAS: tl.constexpr, PER_TOKEN: tl.constexpr, ROUND: tl.constexpr, CAPPED: tl.constexpr,
    SAVE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of one token: logits, online softmax, and the mean head row under it."""
    program = tl.program_id(0)
    if program >= num_items:
        _no_work(
            program - num_items, targets, ids, offsets, rank, logprob, entropy, logsumexp,
            z_out, outside, num_tokens, BLOCK_T,
        )  # fmt: skip
        return
    item = items + program.to(tl.int64) * 4
    token = tl.load(item)
    start = tl.load(item + 1)
    count = tl.load(item + 2).to(tl.int32)
    slot = tl.load(item + 3)
    offs_d = tl.arange(0, BLOCK_D)
    in_d = offs_d < D
    offs_d = offs_d.to(tl.int64)
    h = tl.load(hidden + token * stride_ht + offs_d * stride_hd, mask=in_d, other=0.0)
    h = h.to(tl.float32)
    y = tl.load(targets + token).to(tl.int64)
    divisor = _divisor(temperature, token, PER_TOKEN)
    cooling = tl.div_rn(tl.full([], 1.0, tl.float32), divisor)  # once: exact, and slow

    top = tl.full([], LOWEST, tl.float32)
    mass = tl.zeros([], tl.float32)
    weighted = tl.zeros([], tl.float32)  # sum of p * (z - top)
    z_target = tl.full([], float("-inf"), tl.float32)
    mean = tl.zeros([BLOCK_D], tl.float32)
    for k in tl.range(0, count, BLOCK_K, num_stages=STAGES):
        offs_k = k + tl.arange(0, BLOCK_K)
        in_k = offs_k < count
        entry = start + offs_k
        row = tl.load(ids + entry, mask=in_k, other=0).to(tl.int64)
        w = tl.load(
            weight + row[:, None] * stride_wv + offs_d[None, :] * stride_wd,
            mask=in_k[:, None] & in_d[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        z = tl.sum(w * h[None, :], axis=1)
        if HAS_BIAS:
            z += tl.load(bias + row, mask=in_k, other=0.0).to(tl.float32)
        z, slope = _shape(z, scale, softcap, ROUND, CAPPED)
        z = z * cooling
        tl.store(z_out + entry, z, mask=in_k)
        z_target = tl.maximum(z_target, tl.max(tl.where(in_k & (row == y), z, float("-inf")), 0))
        z = tl.where(in_k, z, LOWEST)
        new_top = tl.maximum(top, tl.max(z, 0))
        shrink = tl.exp(top - new_top)
        p = tl.where(in_k, tl.exp(z - new_top), 0.0)
        weighted = shrink * (weighted + (top - new_top) * mass) + tl.sum(p * (z - new_top), 0)
        mass = shrink * mass + tl.sum(p, 0)
        if SAVE:
            if CAPPED:
                p = p * (slope / scale)
            mean = mean * shrink + tl.sum(p[:, None] * w, axis=0)
        top = new_top

    if slot < 0:
        _finish(token, top, mass, weighted, z_target, logprob, entropy, logsumexp, outside)
        if SAVE:
            place = tl.load(rank + token).to(tl.int64)
            own = _target_row(
                weight, y, z_target, softcap, divisor, offs_d, in_d, stride_wv, stride_wd, CAPPED
            )
            gap = own - mean / mass
            tl.store(saved + place * D + offs_d, gap.to(saved.dtype.element_ty), mask=in_d)
    else:
        stats = part_stats + slot * 4
        tl.store(stats, top)
        tl.store(stats + 1, mass)
        tl.store(stats + 2, weighted)
        tl.store(stats + 3, z_target)
        if SAVE:
            tl.store(part_rows + (slot - first_slot) * D + offs_d, mean, mask=in_d)


@triton.jit(do_not_specialize=["first_slot"])
def join_tiles_kernel(
    weight, targets, temperature, rank, splits, part_stats, part_rows,
    logprob, entropy, logsumexp, outside, saved, first_slot, D, softcap, stride_wv, stride_wd,
    PER_TOKEN: tl.constexpr, CAPPED: tl.constexpr, SAVE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The tiles of one token, joined in order, for one block of D."""
    split = splits + tl.program_id(0).to(tl.int64) * 3
    token = tl.load(split)
    first = tl.load(split + 1)
    count = tl.load(split + 2).to(tl.int32)
    top = tl.full([], LOWEST, tl.float32)
    mass = tl.zeros([], tl.float32)
    weighted = tl.zeros([], tl.float32)
    z_target = tl.full([], float("-inf"), tl.float32)
    offs_i = tl.arange(0, 16)
    for i in range(0, count, 16):
        inside = i + offs_i < count
        stats = part_stats + (first + i + offs_i) * 4
        tops = tl.load(stats, mask=inside, other=LOWEST)
        masses = tl.load(stats + 1, mask=inside, other=0.0)
        terms = tl.load(stats + 2, mask=inside, other=0.0)
        found = tl.load(stats + 3, mask=inside, other=float("-inf"))
        z_target = tl.maximum(z_target, tl.max(found, 0))
        new_top = tl.maximum(top, tl.max(tops, 0))
        shrink = tl.exp(top - new_top)
        shrinks = tl.exp(tops - new_top)
        terms = shrinks * (terms + (tops - new_top) * masses)
        weighted = shrink * (weighted + (top - new_top) * mass) + tl.sum(terms, 0)
        mass = shrink * mass + tl.sum(shrinks * masses, 0)
        top = new_top
    if tl.program_id(1) == 0:
        _finish(token, top, mass, weighted, z_target, logprob, entropy, logsumexp, outside)
    if SAVE:
        offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        in_d = offs_d < D
        offs_d = offs_d.to(tl.int64)
        mean = tl.zeros([BLOCK_D], tl.float32)
        for i in range(count):
            shrink = tl.exp(tl.load(part_stats + (first + i) * 4) - top)
            row = part_rows + (first - first_slot + i) * D
            mean += shrink * tl.load(row + offs_d, mask=in_d, other=0.0)
        y = tl.load(targets + token).to(tl.int64)
        divisor = _divisor(temperature, token, PER_TOKEN)
        own = _target_row(
            weight, y, z_target, softcap, divisor, offs_d, in_d, stride_wv, stride_wd, CAPPED
        )
        place = tl.load(rank + token).to(tl.int64)
        gap = own - mean / mass
        tl.store(saved + place * D + offs_d, gap.to(saved.dtype.element_ty), mask=in_d)


@triton.jit
def token_backward_kernel(
    weight, targets, temperature, ids, offsets, rank,
    logprob, entropy, logsumexp, z_in, saved,
    grad_logprob, grad_entropy, grad_support, coefficients, grad_hidden,
    D, scale, softcap, stride_wv, stride_wd,
    PER_TOKEN: tl.constexpr, CAPPED: tl.constexpr, SAVED: tl.constexpr, HIDDEN: tl.constexpr,
    HAS_LOGPROB: tl.constexpr, HAS_ENTROPY: tl.constexpr, HAS_SUPPORT: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """d loss / d (raw logit) of each entry of one token, and d loss / d (its hidden state).

    The latter is a multiple of the saved row, or where more than the logprob has a gradient, the
    head rows weighted by the former. WHOLE: the entries are all of the support, so that their
    probabilities can be divided by their sum. A logsumexp of 20 is off by 1e-6, and so would they.
    """
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(rank + token).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    in_d = offs_d < D
    offs_d = offs_d.to(tl.int64)
    grad = tl.zeros([BLOCK_D], tl.float32)
    if place >= 0:
        start = tl.load(offsets + token)
        count = (tl.load(offsets + token + 1) - start).to(tl.int32)
        lse = tl.load(logsumexp + token)
        y = tl.load(targets + token).to(tl.int64)
        divisor = _divisor(temperature, token, PER_TOKEN)
        by_logprob = tl.zeros([], tl.float32)
        by_entropy = tl.zeros([], tl.float32)
        spread = tl.zeros([], tl.float32)
        total = tl.full([], 1, tl.float32)
        if HAS_LOGPROB:
            inside = tl.load(logprob + token) > float("-inf")
            by_logprob = tl.load(grad_logprob + token, mask=inside, other=0.0)
        if HAS_ENTROPY:
            by_entropy = tl.load(grad_entropy + token)
            mean_surprise = tl.load(entropy + token)
        if WHOLE:
            total = tl.zeros([], tl.float32)
            for k in range(0, count, 64):
                offs_k = k + tl.arange(0, 64)
                z = tl.load(z_in + start + offs_k, mask=offs_k < count, other=LOWEST)
                total += tl.sum(tl.exp(z - lse), 0)
        if HAS_SUPPORT:
            for k in range(0, count, 64):
                offs_k = k + tl.arange(0, 64)
                spread += tl.sum(
                    tl.load(grad_support + start + offs_k, mask=offs_k < count, other=0.0), 0
                )
        for k in tl.range(0, count, BLOCK_K, num_stages=STAGES):
            offs_k = k + tl.arange(0, BLOCK_K)
            in_k = offs_k < count
            entry = start + offs_k
            row = tl.load(ids + entry, mask=in_k, other=0).to(tl.int64)
            z = tl.load(z_in + entry, mask=in_k, other=LOWEST)
            p = tl.exp(z - lse) / total
            c = -p * (by_logprob + spread) + tl.where(row == y, by_logprob, 0.0)
            if HAS_ENTROPY:
                c -= by_entropy * p * (z - lse + mean_surprise)
            if HAS_SUPPORT:
                c += tl.load(grad_support + entry, mask=in_k, other=0.0)
            if CAPPED:
                tanh = tl.where(in_k, z, 0.0) * divisor / softcap
                c = c * (1 - tanh * tanh)
            c = tl.where(in_k, c * scale / divisor, 0.0)
            tl.store(coefficients + entry, c, mask=in_k)
            if HIDDEN and not SAVED:
                w = tl.load(
                    weight + row[:, None] * stride_wv + offs_d[None, :] * stride_wd,
                    mask=in_k[:, None] & in_d[None, :], other=0.0,
                )  # fmt: skip
                grad += tl.sum(c[:, None] * w.to(tl.float32), axis=0)
        if SAVED:
            gap = tl.load(saved + place * D + offs_d, mask=in_d, other=0.0).to(tl.float32)
            grad = gap * (by_logprob * scale / divisor)
    if HIDDEN:
        tl.store(grad_hidden + token * D + offs_d, grad.to(grad_hidden.dtype.element_ty), mask=in_d)


@triton.jit
def _put(into, grad, offs_d, in_d, ADD: tl.constexpr):
    if ADD:
        grad += tl.load(into + offs_d, mask=in_d, other=0.0).to(tl.float32)
    tl.store(into + offs_d, grad.to(into.dtype.element_ty), mask=in_d)


@triton.jit
def _clear(
    block, rows, into, num_rows, D, stride_iv, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Zeros into the named rows."""
    offs_r = block.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_r = offs_r < num_rows
    row = tl.load(rows + offs_r, mask=in_r, other=0)
    offs_d = tl.arange(0, BLOCK_D)
    zeros = tl.zeros([BLOCK_R, BLOCK_D], into.dtype.element_ty)
    mask = in_r[:, None] & (offs_d < D)[None, :]
    tl.store(into + row[:, None] * stride_iv + offs_d[None, :], zeros, mask=mask)


@triton.jit(do_not_specialize=["num_items", "num_absent", "first_slot"])
def head_backward_kernel(
    hidden, coefficients, entries, tokens, items, rows, absent, into, part_rows,
    num_items, num_absent, first_slot, D, stride_ht, stride_hd, stride_iv,
    SCATTER: tl.constexpr, ADD: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """d loss / d (one head row) over a piece of the entries that name it, in their order."""
    program = tl.program_id(0)
    if program >= num_items:
        _clear(program - num_items, absent, into, num_absent, D, stride_iv, BLOCK_R, BLOCK_D)
        return
    item = items + program.to(tl.int64) * 4
    label = tl.load(item)
    start = tl.load(item + 1)
    count = tl.load(item + 2).to(tl.int32)
    slot = tl.load(item + 3)
    offs_d = tl.arange(0, BLOCK_D)
    in_d = offs_d < D
    offs_d = offs_d.to(tl.int64)
    grad = tl.zeros([BLOCK_D], tl.float32)
    for k in tl.range(0, count, BLOCK_K, num_stages=STAGES):
        offs_k = k + tl.arange(0, BLOCK_K)
        in_k = offs_k < count
        token = tl.load(tokens + start + offs_k, mask=in_k, other=0).to(tl.int64)
        entry = tl.load(entries + start + offs_k, mask=in_k, other=0)
        c = tl.load(coefficients + entry, mask=in_k, other=0.0)
        h = tl.load(
            hidden + token[:, None] * stride_ht + offs_d[None, :] * stride_hd,
            mask=in_k[:, None] & in_d[None, :], other=0.0,
        )  # fmt: skip
        grad += tl.sum(c[:, None] * h.to(tl.float32), axis=0)
    if slot < 0:
        if SCATTER:
            label = tl.load(rows + label)
        _put(into + label * stride_iv, grad, offs_d, in_d, ADD)
    else:
        tl.store(part_rows + (slot - first_slot) * D + offs_d, grad, mask=in_d)


@triton.jit(do_not_specialize=["first_slot"])
def join_pieces_kernel(
    splits, rows, part_rows, into, first_slot, D, stride_iv,
    SCATTER: tl.constexpr, ADD: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The pieces of one head row, added in order, for one block of D."""
    split = splits + tl.program_id(0).to(tl.int64) * 3
    label = tl.load(split)
    first = tl.load(split + 1) - first_slot
    count = tl.load(split + 2).to(tl.int32)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = offs_d < D
    offs_d = offs_d.to(tl.int64)
    grad = tl.zeros([BLOCK_D], tl.float32)
    for i in range(count):
        grad += tl.load(part_rows + (first + i) * D + offs_d, mask=in_d, other=0.0)
    if SCATTER:
        label = tl.load(rows + label)
    _put(into + label * stride_iv, grad, offs_d, in_d, ADD)

"""Clean rollouts in, faulty ones out: one function per fault, exact where the record allows it.

A fault changes the rollouts of `which` (all of them by default) and leaves the others as they are.
Faults of the policy take and return a `Policy`. `fault_cases` is a table of them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from replay import Policy
from rollout.record import Rollout, WeightSpan
from rollout.support import Support

Change = Callable[[Rollout], Rollout]
Inject = Callable[[list[Rollout]], list[Rollout]]


def in_some(change: Change, which: Callable[[int, Rollout], bool] = lambda i, r: True) -> Inject:
    """`change` applied to the rollouts that `which` picks by place and content."""
    return lambda rollouts: [change(r) if which(i, r) else r for i, r in enumerate(rollouts)]


def every(n: int) -> Callable[[int, Rollout], bool]:
    return lambda i, r: i % n == n // 2


def softmaxed(r: Rollout, logits: NDArray[np.floating]) -> NDArray[np.float32]:
    """[E] Log-softmax over each support of `r`."""
    exact, rows = logits.astype(np.float64), r.support.rows
    peak = np.full(len(r.support), -np.inf)
    np.maximum.at(peak, rows, exact)
    mass = np.bincount(rows, np.exp(exact - peak[rows]), minlength=len(r.support))
    return (exact - peak[rows] - np.log(mass[rows])).astype(np.float32)


def with_logprobs(r: Rollout, logprobs: NDArray[np.float32], full: bool = False) -> Rollout:
    """`logprobs` [E] as the engine's; what they do to the whole softmax is not known exactly."""
    sampling = r.sampling_logprobs.copy()
    hit = r.support.ids == r.output_ids[r.support.rows]
    sampling[r.support.rows[hit]] = logprobs[hit]
    kept = r.full_logprobs if full else None
    return replace(r, support_logprobs=logprobs, sampling_logprobs=sampling, full_logprobs=kept)


def without_support_logprobs(r: Rollout) -> Rollout:
    return replace(r, support_logprobs=None)


def logits_times(factor: Callable[[Rollout], float]) -> Change:
    """The engine used temperature T / factor."""
    return lambda r: with_logprobs(r, softmaxed(r, r.support_logprobs * factor(r)))


def declared_temperature(factor: float) -> Change:
    """The record says T * factor; everything else stays."""
    return lambda r: replace(r, temperature=float(np.float32(r.temperature * factor)))


def moved(shift: Callable[[Rollout], NDArray[np.floating]]) -> Change:
    """The engine's logits of every support id plus `shift` [E]."""
    return lambda r: with_logprobs(r, softmaxed(r, r.support_logprobs + shift(r)))


def on_ids(by: dict[int, float]) -> Change:
    return moved(lambda r: np.array([by.get(int(i), 0.0) for i in r.support.ids]))


def on_seen(by: float) -> Change:
    """A presence penalty: `by` on every id among the output tokens before."""

    def shift(r: Rollout) -> NDArray[np.floating]:
        first = {int(i): t for t, i in reversed(list(enumerate(r.output_ids)))}
        seen = [
            first.get(int(i), len(r.output_ids)) < t
            for i, t in zip(r.support.ids, r.support.rows, strict=True)
        ]
        return by * np.array(seen, np.float64)

    return moved(shift)


def full_stored(r: Rollout) -> Rollout:
    return replace(r, sampling_logprobs=r.full_logprobs, support_logprobs=None)


def full_stored_for_every_id(r: Rollout) -> Rollout:
    outside = (r.full_logprobs - r.sampling_logprobs)[r.support.rows]
    return replace(
        r, sampling_logprobs=r.full_logprobs, support_logprobs=r.support_logprobs + outside
    )


def supports_shifted(step: int) -> Change:
    """Row t is that of output token t + step."""

    def change(r: Rollout) -> Rollout:
        order = (np.arange(len(r.support)) + step).clip(0, len(r.support) - 1)
        entries = Support(np.arange(len(r.support.ids), dtype=np.int32), r.support.offsets)
        return replace(
            r,
            support=r.support.take(order),
            support_logprobs=r.support_logprobs[entries.take(order).ids],
            sampling_logprobs=r.sampling_logprobs[order],
            full_logprobs=r.full_logprobs[order],
        )

    return change


def logprobs_shifted(step: int) -> Change:
    def change(r: Rollout) -> Rollout:
        order = (np.arange(len(r.support)) + step).clip(0, len(r.support) - 1)
        return replace(r, sampling_logprobs=r.sampling_logprobs[order], support_logprobs=None)

    return change


def _rows(r: Rollout) -> list[tuple[list[int], list[float]]]:
    ends = r.support.offsets
    assert r.support_logprobs is not None
    return [
        (r.support.ids[a:b].tolist(), r.support_logprobs[a:b].tolist())
        for a, b in zip(ends, ends[1:], strict=False)
    ]


def _from_rows(
    r: Rollout, rows: Sequence[tuple[Sequence[int], Sequence[float]]], logprobs: bool = True
) -> Rollout:
    values = np.array([lp for _, lps in rows for lp in lps], np.float32)
    support = Support.from_rows([ids for ids, _ in rows])
    return replace(r, support=support, support_logprobs=values if logprobs else None)


def duplicated(share: float, logprobs: bool = True) -> Change:
    """The first id of some supports stands there twice."""

    def change(r: Rollout) -> Rollout:
        generator = np.random.default_rng(len(r.output_ids))
        rows = [
            (ids + ids[:1], lps + lps[:1]) if generator.random() < share else (ids, lps)
            for ids, lps in _rows(r)
        ]
        return _from_rows(r, rows, logprobs)

    return change


def sampled_removed(share: float) -> Change:
    """Some supports lack the sampled id; another id takes its place."""

    def change(r: Rollout) -> Rollout:
        generator = np.random.default_rng(len(r.output_ids))
        ids = r.support.ids.copy()
        hit = ids == r.output_ids[r.support.rows]
        hit &= generator.random(len(ids)) < share
        ids[hit] = 40_000 + np.arange(hit.sum())
        return replace(r, support=Support(ids, r.support.offsets))

    return change


def truncated(limit: int, logprobs: bool = True) -> Change:
    """Supports are cut to `limit` ids, the sampled one among them."""

    def change(r: Rollout) -> Rollout:
        rows = []
        for (ids, lps), y in zip(_rows(r), r.output_ids, strict=True):
            order = sorted(range(len(ids)), key=lambda i: (ids[i] != y, -lps[i]))[:limit]  # noqa: B023
            rows.append(([ids[i] for i in order], [lps[i] for i in order]))
        return _from_rows(r, rows, logprobs)

    return change


def padded(pad: int, logprob: float | None) -> Change:
    """`pad` at the end of every support that lacks it, with that logprob (None: not recorded)."""

    def change(r: Rollout) -> Rollout:
        rows = [
            (ids, lps) if pad in ids else ([*ids, pad], [*lps, logprob or 0.0])
            for ids, lps in _rows(r)
        ]
        return _from_rows(r, rows, logprob is not None)

    return change


def declared_order(order: str) -> Change:
    def change(r: Rollout) -> Rollout:
        meta = json.loads(r.engine_meta) | {"filter_order": order}
        return replace(r, engine_meta=json.dumps(meta, sort_keys=True))

    return change


def prompt_ids(change: Callable[[list[int]], list[int]]) -> Change:
    """The engine read another prompt than the one that is recorded."""
    return lambda r: replace(r, prompt_ids=np.array(change(r.prompt_ids.tolist()), np.int32))


def at_endpoint(url: str) -> Change:
    return lambda r: replace(
        r, engine_meta=json.dumps(json.loads(r.engine_meta) | {"endpoint": url}, sort_keys=True)
    )


def noise_of(r: Rollout, size: float) -> NDArray[np.floating]:
    """[E] What other weights do to logits, nearly: something else to each."""
    return np.random.default_rng(len(r.support.ids)).normal(0, size, len(r.support.ids))


def stale_from(start: int, size: float) -> Change:
    """Output tokens from `start` on have other weights, and no version says so."""
    return moved(lambda r: np.where(r.support.rows >= start, noise_of(r, size), 0.0))


def stale_before(share: float, other: Callable[[Rollout], NDArray[np.floating]]) -> Change:
    """The first part of the output is of version `old`, whose logits differ by `other` [E]."""

    def change(r: Rollout) -> Rollout:
        border = int(len(r.output_ids) * share)
        shift = np.where(r.support.rows < border, other(r), 0.0)
        spans = (WeightSpan("old", 0, border), WeightSpan("new", border, len(r.output_ids)))
        return replace(
            with_logprobs(r, softmaxed(r, r.support_logprobs + shift)), weight_versions=spans
        )

    return change


# Faults of the policy: the rollouts stay, the trainer is another one.


def softcapped(cap: float) -> Callable[[Policy], Policy]:
    return lambda policy: replace(policy, softcap=cap)


def noisy_head(size: float, seed: int = 0) -> Callable[[Policy], Policy]:
    """Every weight of the head times 1 + size * N(0, 1)."""

    def change(policy: Policy) -> Policy:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(policy.weight.shape, generator=generator)
        return replace(policy, weight=policy.weight * (1 + size * noise).to(policy.weight.dtype))

    return change


def noisy_norm(size: float, seed: int = 0) -> Callable[[Policy], Policy]:
    """Every weight of the body's last norm times 1 + size * N(0, 1): a column of the head."""

    def change(policy: Policy) -> Policy:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(policy.weight.shape[1], generator=generator)
        return replace(policy, weight=policy.weight * (1 + size * noise).to(policy.weight.dtype))

    return change


BODY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def noisy_body(size: float, seed: int = 0) -> Callable[[Policy], Policy]:
    """Every matrix of attention and MLP times 1 + size * N(0, 1): weights of another step."""

    def change(policy: Policy) -> Policy:
        generator = torch.Generator().manual_seed(seed)
        body = copy.deepcopy(policy.body)
        with torch.no_grad():
            for name, weight in body.named_parameters():
                if name.split(".")[-2] in BODY:
                    noise = torch.randn(weight.shape, generator=generator)
                    weight.mul_((1 + size * noise).to(weight.dtype))
        return replace(policy, body=body)

    return change


def head_row_moved(token: int, by: float) -> Callable[[Policy], Policy]:
    """One row of the head is another one, as in a tied head that was cloned and went stale."""

    def change(policy: Policy) -> Policy:
        weight = policy.weight.clone()
        weight[token] = weight[token] * (1 + by)
        return replace(policy, weight=weight)

    return change


def in_halves(r: Rollout) -> Rollout:
    """The first half of the output is of weight version `old`, the rest of `new`."""
    border, end = len(r.output_ids) // 2, len(r.output_ids)
    return replace(
        r, weight_versions=(WeightSpan("old", 0, border), WeightSpan("new", border, end))
    )


def of_version(version: str) -> Callable[[Rollout], NDArray[np.bool_]]:
    def mask(r: Rollout) -> NDArray[np.bool_]:
        out = np.zeros(len(r.output_ids), bool)
        for span in r.weight_versions:
            out[span.start : span.end] |= span.version == version
        return out

    return mask


def of_endpoint(url: str) -> Callable[[Rollout], NDArray[np.bool_]]:
    return lambda r: np.full(len(r.output_ids), json.loads(r.engine_meta).get("endpoint") == url)


def from_token(start: int) -> Callable[[Rollout], NDArray[np.bool_]]:
    return lambda r: np.arange(len(r.output_ids)) >= start

"""The support audit: could the trainer's logits have yielded the recorded supports?

An honest engine's logits are not the trainer's: with bf16 heads near-ties swap, and only 54 to 72 %
of recorded supports are exact prefixes of the trainer's ranking. So the question for each token is
how far the trainer's logits would have to move (`replay.margins`), against how far apart the two
sides are known to be (`Tolerance`). With m the smallest margin over all conditions, in logits:

    robust        m > tolerance      a theorem: every set of logits within the tolerance of the
                                     trainer's yields S (an order not recorded: under one of them)
    consistent    m >= 0             the trainer's own logits yield S
    explainable   -m <= tolerance    each condition alone could be met; not shown that all can
    inconsistent  -m > tolerance     a theorem: no logits within the tolerance yield S, because a
                                     condition that S needs cannot be met
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replay.audit_result import Audit, Tolerance
from replay.audit_rows import Kept, WorstRow, repaired, worst_rows
from replay.batch import PackedBatch
from replay.facts import Head, Supports
from replay.margins import CONDITIONS, EITHER, JOINT, SEQUENTIAL, Filters, margins
from replay.reference import segments
from rollout.record import Rollout
from rollout.rules import Fault
from rollout.self_check import EngineCheck

SEED = 0
KEPT = 1024  # worst rows whose hidden states are kept for a second look
SHOWN = 10
FLOOR = 1e-3
"""Logits. What the order of fp32 sums can do; the tolerance is never below."""
PER_LOG_RATIO = 2.0
"""p99 of half-ranges over p99 of T |log_ratio|: 1.6 to 2.1 on the recorded sets."""
PER_MEDIAN = 6.0
"""p99 of half-ranges over their median is 2.6 to 3.0 on the recorded sets. More is not noise."""

NO_LIMIT = torch.iinfo(torch.int64).max
FILTERS = {
    "top_k": torch.int64,
    "top_p": torch.float64,
    "min_p": torch.float64,
    "order": torch.int8,
    "keeps_ties": torch.bool,
    "is_partial": torch.bool,
}
ORDERS = {"joint": JOINT, "sequential": SEQUENTIAL}
EXCLUDING = ("regex", "json_schema", "ebnf", "structural_tag", "min_new_tokens", "logit_bias")


FILTER_ORDERS = ("joint", "sequential")
TIE_POLICIES = ("keep", "cut")


class Semantics(NamedTuple):
    """How an engine filters; None where nobody knows, and then whatever explains more holds."""

    filter_order: str | None  # joint or sequential
    tie_policy: str | None  # keep or cut


def recorded_semantics(rollout: Rollout) -> Semantics:
    """What `engine_meta` says."""
    meta = json.loads(rollout.engine_meta or "{}")
    return Semantics(meta.get("filter_order"), meta.get("tie_policy"))


def measured_semantics(engine: EngineCheck, rollout: Rollout) -> Semantics:
    """What the engine's own numbers say, where they do, before what `engine_meta` says.

    Some engines have another order with min_p.
    """
    declared = recorded_semantics(rollout)
    seen = engine.min_p_filter_order if rollout.min_p > 0 else engine.filter_order
    order = seen if seen in FILTER_ORDERS else declared.filter_order
    ties = engine.tie_policy if engine.tie_policy in TIE_POLICIES else declared.tie_policy
    return Semantics(order, ties)


def exclusion(rollout: Rollout) -> str | None:
    """The setting that hides ids from the sampler, if there is one.

    What is hidden stays out of the support however likely the trainer finds it, and takes its mass
    along: whether S is a prefix, and which mass it holds, cannot be told.
    """
    sent = json.loads(rollout.sampling_params or "{}")
    for name in EXCLUDING:
        if sent.get(name):
            return name
    if (sent.get("custom_params") or {}).get("token_ids"):
        return "custom_params.token_ids"
    return None


class Auditor:
    """Audits a sample of a run's tokens, batch by batch; `finish` says what came of it."""

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        tokens: int,
        faults: Mapping[str, Sequence[Fault]],
        semantics: Callable[[Rollout], Semantics] = recorded_semantics,
    ) -> None:
        """Draw `tokens` of the sampled tokens of `rollouts`, with a fixed seed.

        `faults` by rollout id: a support that names an id twice is no set, and is not audited.
        """
        self._by_id = {r.rollout_id: r for r in rollouts}
        self._semantics = semantics
        self._skipped: dict[str, Counter[str]] = {}
        eligible = [self._eligible(r, faults.get(r.rollout_id, ())) for r in rollouts]
        borders = np.cumsum([0, *map(len, eligible)])
        generator = np.random.default_rng(SEED)
        number = min(tokens, int(borders[-1]))
        chosen = np.sort(generator.choice(int(borders[-1]), number, replace=False))
        cuts = np.searchsorted(chosen, borders)
        self._chosen = {
            r.rollout_id: at[chosen[cuts[i] : cuts[i + 1]] - borders[i]]
            for i, (r, at) in enumerate(zip(rollouts, eligible, strict=True))
        }
        self._sampled = sum(int((~r.is_forced).sum()) for r in rollouts)
        self._number = 0  # audited so far
        self._rollout_id: list[NDArray[np.object_]] = []
        self._position: list[NDArray[np.int32]] = []
        self._temperature: list[NDArray[np.float64]] = []
        self._margins: list[NDArray[np.float64]] = []
        self._kept: Kept | None = None
        # [tokens], of which `_measured` are there
        self._half_ranges = np.empty(self._sampled, np.float32)
        self._errors = np.full(self._sampled, np.nan, np.float32)
        self._measured = 0
        self._partial: dict[str, Counter[str]] = {}
        self._words: Counter[str] = Counter()

    def _eligible(self, rollout: Rollout, faults: Sequence[Fault]) -> NDArray[np.intp]:
        """Places among the sampled tokens of `rollout`."""
        bad = [p for f in faults if f.code == "duplicate_ids" for p in f.positions.tolist()]
        at = np.flatnonzero(~rollout.is_forced)
        is_set = ~np.isin(at, bad)
        if not is_set.all():
            self._skip("duplicate_ids", 1, int((~is_set).sum()))
        return np.flatnonzero(is_set)

    def _skip(self, reason: str, rollouts: int, tokens: int) -> None:
        counter = self._skipped.setdefault(reason, Counter())
        counter.update(rollouts=rollouts, tokens=tokens)

    def add(self, batch: PackedBatch, hidden: Tensor, head: Head, support_logprobs: Tensor) -> None:
        """Take in a batch: hidden [T, D] of its scored tokens, and the policy's logprobs [E]."""
        rollouts = [self._by_id[rollout_id] for rollout_id in batch.rollout_ids]
        self._measure(rollouts, batch, support_logprobs.cpu())
        number, start = self._number, 0
        places, positions, ids = [], [], []
        for r in rollouts:
            chosen, at = self._chosen[r.rollout_id], np.flatnonzero(~r.is_forced)
            places.append(start + chosen)
            positions.append(at[chosen].astype(np.int32))
            ids.append(np.full(len(chosen), r.rollout_id, dtype=object))
            start += len(at)
        index = torch.tensor(np.concatenate(places))
        if not len(index):
            return
        device = hidden.device
        whole = Supports(batch.support_ids.long(), batch.support_offsets, batch.temperature)
        supports = whole.take(index).to(device)
        filters = self._filters(rollouts).to(device)
        rows, drawn = hidden[index.to(device)], batch.targets[index].to(device)
        found = margins(rows, head, supports, filters)
        is_number = ~found.isnan().any(1).cpu().numpy()
        rollout_ids = np.concatenate(ids)
        if not is_number.all():
            lost = rollout_ids[~is_number]
            self._skip("nonfinite_replay", len(set(lost)), len(lost))
        self._number += int(is_number.sum())
        self._rollout_id.append(rollout_ids[is_number])
        self._position.append(np.concatenate(positions)[is_number])
        self._margins.append(found.cpu().numpy()[is_number])
        temperature = supports.temperature.cpu().numpy().astype(np.float64)
        self._temperature.append(temperature[is_number])
        at_rows = torch.from_numpy(number + np.cumsum(is_number) - 1)
        kept = Kept(at_rows, found.nan_to_num(nan=torch.inf), rows, drawn, supports, filters)
        kept = kept.worst(KEPT)
        if self._kept is not None:
            kept = Kept.concatenate([self._kept, kept]).worst(KEPT)
        self._kept = kept

    def _filters(self, rollouts: Sequence[Rollout]) -> Filters:
        """Of the chosen tokens of `rollouts`, one after another."""
        columns: dict[str, list[Any]] = {name: [] for name in FILTERS}
        counts = []
        for r in rollouts:
            counts.append(number := len(self._chosen[r.rollout_id]))
            order, ties = self._semantics(r)
            hidden_by = exclusion(r)
            if number:
                words = f"{order or 'either order'}, ties {ties or 'kept or cut'}"
                self._words[words] += number
            if number and hidden_by:
                self._partial.setdefault(hidden_by, Counter()).update(rollouts=1, tokens=number)
            columns["top_k"].append(r.top_k if r.top_k > 0 else NO_LIMIT)
            columns["top_p"].append(r.top_p)
            columns["min_p"].append(r.min_p)
            columns["order"].append(ORDERS.get(order or "", EITHER))
            columns["keeps_ties"].append(ties != "cut")
            columns["is_partial"].append(hidden_by is not None)
        repeats = torch.tensor(counts)
        return Filters(
            **{
                name: torch.tensor(columns[name], dtype=dtype).repeat_interleave(repeats)
                for name, dtype in FILTERS.items()
            }
        )

    def _measure(
        self, rollouts: Sequence[Rollout], batch: PackedBatch, replay_logprobs: Tensor
    ) -> None:
        """Half-ranges of T (trainer − engine) over each support of two ids or more, in logits.

        Logprobs of one support are logits less a constant, so that centring at the middle of the
        range leaves the sup-norm distance of both sides' logits over it.
        """
        counts = batch.support_offsets.diff()
        several = counts > 1
        engine = torch.cat([_engine_logprobs(r) for r in rollouts])
        gap = replay_logprobs - engine
        spread = segments("max", gap, counts) + segments("max", -gap, counts)
        here = slice(self._measured, self._measured + int(several.sum()))
        self._measured = here.stop
        self._half_ranges[here] = (batch.temperature * spread / 2)[several].numpy()
        drawn = torch.repeat_interleave(batch.targets, counts) == batch.support_ids
        rows = torch.repeat_interleave(counts)[drawn]
        gap = replay_logprobs[drawn] - batch.sampling_logprobs[rows]
        error = (batch.temperature[rows] * gap).abs()
        errors = torch.full(counts.shape, torch.nan).index_copy(0, rows, error)
        self._errors[here] = errors[several].numpy()

    def tolerance(self) -> Tolerance:
        """p99 of the half-ranges, or of what the sampled tokens alone tell."""
        for source, measured, factor in (
            ("support_logprobs", self._half_ranges, 1.0),
            ("log_ratio", self._errors, PER_LOG_RATIO),
        ):
            known = measured[: self._measured]
            values = known[np.isfinite(known)].astype(np.float64)
            if len(values):
                median, p99 = np.percentile(values, [50, 99])
                largest = min(p99, PER_MEDIAN * median) if factor == 1 else p99
                return Tolerance(max(FLOOR, float(factor * largest)), source, len(values))
        return Tolerance(FLOOR, "none", 0)

    def finish(self, head: Head) -> Audit:
        """Judge what was added, with a second look at the worst."""
        tolerance = self.tolerance()
        is_repaired = np.zeros(self._number, bool)
        worst: tuple[WorstRow, ...] = ()
        if self._kept is not None:
            # worst first, so that the first rows of both are the same
            patched = repaired(self._kept, head, tolerance.logits)
            is_repaired[self._kept.at.numpy()] = patched.cpu().numpy()
            worst = worst_rows(self._kept.worst(SHOWN), head, patched)
        return Audit(
            rollout_id=_joined(self._rollout_id, np.dtype(object)),
            position=_joined(self._position, np.dtype(np.int32)),
            temperature=_joined(self._temperature, np.dtype(np.float64)),
            margins=_joined(self._margins, np.dtype(np.float64)).reshape(-1, len(CONDITIONS)),
            is_repaired=is_repaired,
            tolerance=tolerance,
            sampled_tokens=self._sampled,
            partial=self._partial,
            skipped=self._skipped,
            semantics=dict(self._words),
            worst=worst,
        )


def _joined(parts: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _engine_logprobs(rollout: Rollout) -> Tensor:
    """[E] NaN where not recorded."""
    if rollout.support_logprobs is None:
        return torch.full((len(rollout.support.ids),), torch.nan)
    return torch.tensor(np.asarray(rollout.support_logprobs))

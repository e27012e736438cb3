"""The rules of docs/format.md, one check per rule.

Format rules (`check_format`) hold for every rollout in memory or on disk: breaking one raises.
Content rules (`find_faults`) are judged by the writer, which refuses a rollout that breaks one, and
by replay, which reports them as findings: a shard may come from somebody else's writer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sized
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout import errors
from rollout.errors import ContentError, FormatError
from rollout.record import Rollout, make_rollout_id

LOGPROB_SLACK = 1e-6  # a logprob may exceed 0 by this much: float32 rounding
SUM_SLACK = 1e-5  # recorded supports sum to 1 within 2e-7
SENTINEL = -1000.0  # float32 cannot sample below about -104; servers write -9999 for "none"

FINISH_REASONS = ("stop", "length", "abort")


def check_format(rollout: Rollout) -> None:
    """Raise the `FormatError` of the first broken format rule; the message starts with the id."""
    for error, rule in _broken_format_rules(rollout):
        raise error(f"{rollout.rollout_id}: {rule}")


def _broken_format_rules(r: Rollout) -> Iterator[tuple[type[FormatError], str]]:
    expected = make_rollout_id(r.prompt_id, r.sample_index)
    attempt = r.rollout_id.removeprefix(expected)
    if r.finish_reason == "abort":
        if not re.fullmatch(r"#abort\d+", attempt):
            yield errors.BadRolloutId, f"rollout_id of an aborted one must be '{expected}#abort<n>'"
    elif attempt:
        yield errors.BadRolloutId, f"rollout_id must be {expected!r}"
    if len(r.prompt_ids) == 0:
        yield errors.EmptyPrompt, "prompt_ids must hold at least one token"
    aligned: dict[str, Sized | None] = {
        "loss_mask": r.loss_mask,
        "sampling_logprobs": r.sampling_logprobs,
        "support_counts": r.support,
        "full_logprobs": r.full_logprobs,
    }
    for name, array in aligned.items():
        if array is not None and len(array) != r.num_output_tokens:
            yield (
                errors.LengthMismatch,
                f"{len(array)} {name} for {r.num_output_tokens} output_ids",
            )
    if r.support_logprobs is not None and len(r.support_logprobs) != len(r.support.ids):
        yield (
            errors.LengthMismatch,
            f"{len(r.support_logprobs)} support_logprobs for {len(r.support.ids)} support_ids",
        )
    if ((r.loss_mask != 0) & (r.loss_mask != 1)).any():  # three times as fast as np.isin
        yield errors.BadValue, "loss_mask must hold only 0 and 1"
    if len(missing := np.flatnonzero((r.loss_mask == 1) & r.is_forced)):
        yield (
            errors.MissingSupport,
            f"output token {missing[0]} has loss_mask 1 and an empty support; "
            "every token to train on needs the ids it was sampled from",
        )
    if r.finish_reason not in FINISH_REASONS:
        yield errors.BadValue, f"finish_reason is {r.finish_reason!r}, not one of {FINISH_REASONS}"
    if not (r.temperature > 0 and np.isfinite(r.temperature)):
        yield errors.BadValue, f"temperature is {r.temperature}, must be positive and finite"
    if r.top_k != -1 and r.top_k < 1:
        yield errors.BadValue, f"top_k is {r.top_k}, must be -1 or at least 1"
    for span in r.weight_versions:
        if not 0 <= span.start <= span.end <= r.num_output_tokens:
            yield (
                errors.BadValue,
                f"weight_versions span [{span.start}, {span.end}) does not lie in "
                f"[0, {r.num_output_tokens})",
            )


class Fault(NamedTuple):
    """One broken content rule: which, where, and in words."""

    error: type[ContentError]
    positions: NDArray[np.int64]  # output tokens, ascending; prompt faults have position -1
    message: str

    @property
    def code(self) -> str:
        return self.error.code


def count_tokens(faults: Iterable[Fault]) -> int:
    """Tokens of one rollout with any of `faults`: an id in the output and in its support is one."""
    positions = [fault.positions for fault in faults]
    return len(np.unique(np.concatenate(positions))) if positions else 0


def check_content(rollout: Rollout, vocab_size: int | None = None) -> None:
    """Raise the `ContentError` of the first broken content rule.

    Without `vocab_size` only negative ids count as outside the vocabulary.
    """
    for fault in find_faults(rollout, vocab_size):
        raise fault.error(f"{rollout.rollout_id}: {fault.message}")


def find_faults(rollout: Rollout, vocab_size: int | None = None) -> list[Fault]:
    """Every content rule that `rollout` breaks, in a fixed order; it must pass `check_format`."""
    return [*_find_id_faults(rollout, vocab_size), *_find_logprob_faults(rollout)]


def _find_id_faults(r: Rollout, vocab_size: int | None) -> Iterator[Fault]:
    limit = 2**31 if vocab_size is None else vocab_size
    wanted = "0 or more" if vocab_size is None else f"in [0, {vocab_size})"
    for name, ids, rows in (
        ("prompt_ids", r.prompt_ids, np.full(len(r.prompt_ids), -1)),
        ("output_ids", r.output_ids, np.arange(r.num_output_tokens)),
        ("support_ids", r.support.ids, r.support.rows),
    ):
        if (outside := (ids < 0) | (ids >= limit)).any():
            yield Fault(
                errors.IdOutsideVocabulary,
                np.unique(rows[outside]),
                f"{name}: id {ids[outside][0]} is outside the vocabulary, must be {wanted}",
            )
    if len(at := np.flatnonzero(r.support.duplicated())):
        yield Fault(errors.DuplicateIds, at, f"output token {at[0]}: its support holds an id twice")
    outside = ~r.support.contains(r.output_ids) & ~r.is_forced
    if len(at := np.flatnonzero(outside)):
        yield Fault(
            errors.SampledOutsideSupport,
            at,
            f"output token {at[0]}: sampled id {r.output_ids[at[0]]} is not among the "
            f"{r.support.counts[at[0]]} ids of its support",
        )


def _find_logprob_faults(r: Rollout) -> Iterator[Fault]:
    every_token = np.arange(r.num_output_tokens)
    for name, values, rows in (
        ("sampling_logprobs", r.sampling_logprobs, every_token),
        ("full_logprobs", r.full_logprobs, every_token),
        ("support_logprobs", r.support_logprobs, r.support.rows),
    ):
        if values is None:
            continue
        if (bad := ~np.isfinite(values)).any():
            at = np.unique(rows[bad])
            yield Fault(
                errors.NonfiniteLogprob,
                at,
                f"output token {at[0]}: {name} holds {values[bad][0]}, must be finite",
            )
        if (bad := values > LOGPROB_SLACK).any():
            at = np.unique(rows[bad])
            yield Fault(
                errors.PositiveLogprob,
                at,
                f"output token {at[0]}: {name} holds {values[bad][0]:+.6g}, must be at most 0",
            )
    for name, values in (
        ("sampling_logprobs", r.sampling_logprobs),
        ("full_logprobs", r.full_logprobs),
    ):
        if values is None:
            continue
        bad = (values <= SENTINEL) & np.isfinite(values) & ~r.is_forced
        if len(at := np.flatnonzero(bad)):
            yield Fault(
                errors.SentinelLogprob,
                at,
                f"output token {at[0]}: {name} holds {values[at[0]]:.6g} for a sampled token, "
                f"must be above {SENTINEL:g}",
            )
    wrong = (r.support.counts == 1) & (np.abs(r.sampling_logprobs) > LOGPROB_SLACK)
    if len(at := np.flatnonzero(wrong)):
        yield Fault(
            errors.SingletonLogprob,
            at,
            f"output token {at[0]}: only one id to choose from, but its sampling logprob is "
            f"{r.sampling_logprobs[at[0]]:.6g}, must be 0",
        )
    if r.support_logprobs is not None:
        yield from _find_support_logprob_faults(r, r.support_logprobs)


def _find_support_logprob_faults(r: Rollout, logprobs: NDArray[np.float32]) -> Iterator[Fault]:
    rows = r.support.rows
    with np.errstate(over="ignore"):  # a logprob that large is a fault of its own
        mass = np.bincount(rows, np.exp(logprobs.astype(np.float64)), minlength=len(r.support))
    if len(at := np.flatnonzero((np.abs(mass - 1) > SUM_SLACK) & ~r.is_forced)):
        yield Fault(
            errors.SupportTruncated,
            at,
            f"output token {at[0]}: the probabilities of its support sum to {mass[at[0]]:.6f}, "
            "must be 1: ids are missing or added",
        )
    is_sampled = r.support.ids == r.output_ids[rows]
    gap = np.abs(logprobs[is_sampled] - r.sampling_logprobs[rows[is_sampled]])
    if len(at := np.unique(rows[is_sampled][gap > SUM_SLACK])):
        yield Fault(
            errors.LogprobsDisagree,
            at,
            f"output token {at[0]}: sampling_logprobs and support_logprobs give the sampled id "
            f"different values, {gap.max():.2g} apart at most",
        )

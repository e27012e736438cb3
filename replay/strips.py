"""Which rollouts the page shows token by token, and what it says about each of their tokens.

Rollouts go by in batches: the worst so far and a sample chosen beforehand are kept, each cut to a
window of tokens, so that memory and page stay small however long the run is.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.bins import badness, rows_of_rollouts
from replay.tokens import OK, Floats, TokenTable
from rollout.inspection import Decode
from rollout.record import Rollout

WORST = 20
SAMPLE = 20
TOKENS = 400  # of one rollout; of a longer one those around its worst token
ALTERNATIVES = 10  # ids of a support
LISTED = 10  # ids outside the vocabulary
PROMPT = 2000  # characters of a prompt, the last ones
WHY_WORST, WHY_SAMPLE = "worst", "sample"


@dataclass(frozen=True, eq=False)
class Strip:
    """Output tokens [start, end) of one rollout, and the policy's view of their supports."""

    rollout: Rollout
    why: str  # WHY_WORST or WHY_SAMPLE
    faults: int  # tokens of the rollout that break a rule or have no score
    mean: float | None  # |log_ratio| in nats, over the others
    start: int
    end: int
    rows: dict[str, NDArray[Any]]  # columns of TokenTable, the sampled tokens of the window
    support_logprobs: Floats  # the policy's, aligned with the support ids of the window


class StripCollector:
    """Hears the batches of `verify` in `add`; keeps `worst` rollouts, and `sample` of all."""

    def __init__(self, rollouts: Sequence[Rollout], worst: int = WORST, sample: int = SAMPLE):
        spread = np.linspace(0, len(rollouts) - 1, min(sample, len(rollouts))).astype(int)
        self._sample = {rollouts[i].rollout_id for i in spread}
        self._by_id = {rollout.rollout_id: rollout for rollout in rollouts}
        self._sampled: list[Strip] = []
        self._most = worst
        self._worst: list[tuple[tuple[int, float], int, Strip]] = []  # a heap: the best is first
        self._heard = 0

    def add(self, rollouts: Sequence[Rollout], table: TokenTable, support_logprobs: Floats) -> None:
        """Rollouts with their rows, and [E] the policy's logprobs of all their support ids."""
        by_id = {rollout.rollout_id: rollout for rollout in rollouts}
        borders = np.cumsum([0, *(len(rollout.support.ids) for rollout in rollouts)]).tolist()
        entries = dict(zip(by_id, map(slice, borders, borders[1:]), strict=True))
        bad = badness(table)
        for rollout_id, rows in rows_of_rollouts(table):
            self._heard += 1
            known = bad[rows][np.isfinite(bad[rows])]
            mean = float(known.mean()) if len(known) else None
            rank = (rows.stop - rows.start - len(known), mean or 0.0)
            is_worst = len(self._worst) < self._most or rank > self._worst[0][0]
            if not is_worst and rollout_id not in self._sample:
                continue
            own = support_logprobs[entries[rollout_id]]
            strip = _cut(by_id[rollout_id], table, rows, own, _worst(table, bad, rows))
            strip = replace(strip, faults=rank[0], mean=mean)
            if is_worst:
                heapq.heappush(self._worst, (rank, -self._heard, strip))
                if len(self._worst) > self._most:
                    heapq.heappop(self._worst)
            if rollout_id in self._sample:
                self._sampled.append(replace(strip, why=WHY_SAMPLE))

    def strips(self) -> list[Strip]:
        """The worst first, then those of the sample that are not among them."""
        worst = [strip for *_, strip in sorted(self._worst, key=lambda entry: entry[:2])][::-1]
        shown = {strip.rollout.rollout_id for strip in worst}
        return worst + [s for s in self._sampled if s.rollout.rollout_id not in shown]


def _worst(table: TokenTable, bad: NDArray[np.float64], rows: slice) -> int:
    """Which of `rows` to show the surroundings of: the first finding, or else the worst."""
    broken = np.flatnonzero(table.finding[rows] != OK)
    return int(broken[0] if len(broken) else np.argmax(bad[rows]))


def _cut(
    rollout: Rollout, table: TokenTable, rows: slice, support_logprobs: Floats, worst: int
) -> Strip:
    """`support_logprobs` are aligned with the rollout's support, `worst` is a row of `rows`."""
    positions = table.position[rows]
    length = rollout.num_output_tokens
    start = max(0, min(int(positions[worst]) - TOKENS // 2, length - TOKENS))
    end = min(start + TOKENS, length)
    inside = np.flatnonzero((positions >= start) & (positions < end)) + rows.start
    first, last = rollout.support.offsets[[start, end]]
    return Strip(
        rollout=rollout,
        why=WHY_WORST,
        faults=0,
        mean=None,
        start=start,
        end=end,
        rows={name: values[inside] for name, values in vars(table).items()},
        support_logprobs=support_logprobs[first:last].copy(),  # or the whole batch stays
    )


def strip_data(
    strip: Strip, decode: Decode | None, vocab_size: int | None = None
) -> dict[str, Any]:
    """A strip as JSON: facts, and one column per quantity with an entry per token of the window.

    A forced token has null in every column but `id`. `supports` lists, per token, the likeliest ids
    as [id, engine's probability, policy's], always among them the sampled one and those outside the
    vocabulary, which is the rows of the policy's head. `prompt_outside` are such ids of the prompt.
    """
    r, start, end = strip.rollout, strip.start, strip.end
    at = strip.rows["position"] - start
    columns: dict[str, list[Any]] = {}
    for name, digits in _COLUMNS.items():
        column: list[Any] = [None] * (end - start)
        for place, value in zip(at.tolist(), strip.rows[name].tolist(), strict=True):
            column[place] = value if digits is None else _rounded(value, digits)
        columns[name] = column
    columns["finding"] = [None if code == OK else code for code in columns["finding"]]
    with np.errstate(invalid="ignore"):
        ratios = strip.rows["replay_logprobs"] - strip.rows["sampling_logprobs"]
    log_ratio: list[Any] = [None] * (end - start)
    for place, value in zip(at.tolist(), ratios.tolist(), strict=True):
        log_ratio[place] = _rounded(value, 3, significant=True)
    return {
        "id": r.rollout_id,
        "why": strip.why,
        "faults": strip.faults,
        "mean": strip.mean,
        "length": r.num_output_tokens,
        "start": start,
        "finish": r.finish_reason,
        "reward": r.reward,
        "temperature": _rounded(r.temperature, 4),
        "versions": [s.version for s in r.weight_versions if s.end > start and s.start < end],
        "prompt_tokens": len(r.prompt_ids),
        "prompt": _prompt(r, decode),
        "prompt_outside": r.prompt_ids[_is_outside(r.prompt_ids, vocab_size)][:LISTED].tolist(),
        "ids": r.output_ids[start:end].tolist(),
        "log_ratio": log_ratio,
        "supports": _supports(strip, vocab_size),
        **columns,
    }


_COLUMNS: dict[str, int | None] = {
    "sampling_logprobs": 5,
    "replay_logprobs": 5,
    "full_logprobs": 4,
    "replay_full_logprobs": 4,
    "support_size": None,
    "finding": None,
}


def _is_outside(ids: NDArray[np.int32], vocab_size: int | None) -> NDArray[np.bool_]:
    outside: NDArray[np.bool_] = ids < 0
    return outside if vocab_size is None else outside | (ids >= vocab_size)


def _supports(strip: Strip, vocab_size: int | None) -> list[list[list[Any]]]:
    """Per token of the window, rows of id and both probabilities, likeliest first."""
    r = strip.rollout
    base = r.support.offsets[strip.start]
    found = []
    for t in range(strip.start, strip.end):
        a, b = r.support.offsets[t : t + 2]
        ids = r.support[t]
        trainer = np.exp(strip.support_logprobs[a - base : b - base])
        if r.support_logprobs is not None:
            engine = np.exp(r.support_logprobs[a:b])
        else:
            sampled = np.exp(r.sampling_logprobs[t])
            engine = np.where(ids == r.output_ids[t], sampled, np.nan).astype(np.float32)
        known = np.fmax(engine, trainer)  # NaN only where both are
        order = np.argsort(-np.nan_to_num(known), kind="stable")
        wanted = np.flatnonzero(ids == r.output_ids[t])[:1]
        odd = np.flatnonzero(_is_outside(ids, vocab_size))[:LISTED]
        chosen = np.array(list(dict.fromkeys([*order[:ALTERNATIVES], *wanted, *odd])), np.intp)
        found.append(
            [
                [int(ids[i]), _rounded(float(engine[i]), 4), _rounded(float(trainer[i]), 4)]
                for i in chosen
            ]
        )
    return found


def _prompt(rollout: Rollout, decode: Decode | None) -> str | None:
    """The end of the prompt, as it was sent where that is known."""
    if rollout.prompt_text is not None:
        return rollout.prompt_text[-PROMPT:]
    if decode is None:
        return None
    return "".join(decode(int(i)) or "" for i in rollout.prompt_ids[-PROMPT // 4 :])


def _rounded(value: float, digits: int, significant: bool = False) -> float | str | None:
    """JSON has no NaN and no infinity: null and "-inf" stand for them."""
    if np.isnan(value):
        return None
    if np.isinf(value):
        return "-inf" if value < 0 else "inf"
    return float(f"{value:.{digits}g}") if significant else round(value, digits)


def ids_shown(strips: Sequence[dict[str, Any]]) -> set[int]:
    """Every token id that stands somewhere in `strips`."""
    shown: set[int] = set()
    for strip in strips:
        shown.update(strip["ids"])
        shown.update(row[0] for support in strip["supports"] for row in support)
    return shown

"""What some rollouts of a run share and no other has: where a fault of theirs may come from."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout.record import Rollout

MAX_VALUES = 3  # of one property; more are a list, not a cause
MIN_EACH = 2  # rollouts with each value: one rollout is the only one with its prompt
MAX_TEXT = 60  # characters of a value in a sentence
MIN_LENGTH = 3  # rollouts; two of a few are soon the two longest


@dataclass(frozen=True)
class Traits:
    """The properties of one rollout that a fault may go with."""

    output_tokens: int
    values: dict[str, frozenset[str]]  # by property

    @classmethod
    def of(cls, r: Rollout) -> Traits:
        values = {name: frozenset([text]) for name, text in settings(r).items()}
        values["weight version"] = frozenset(span.version for span in r.weight_versions)
        values["prompt"] = frozenset([r.prompt_id])
        if (url := endpoint(r)) is not None:
            values["endpoint"] = frozenset([url])
        return cls(r.num_output_tokens, values)


def settings(r: Rollout) -> dict[str, str]:
    """What the rollout was sampled with, but its own seed and length, each as text."""
    sent = json.loads(r.sampling_params or "{}")
    numbers = {
        "temperature": r.temperature,
        "top_p": r.top_p,
        "top_k": r.top_k,
        "min_p": r.min_p,
    }
    own = {k: v for k, v in sent.items() if k not in ("sampling_seed", "max_new_tokens")}
    return {
        # a float32 in as many digits as it holds; a grammar stands in memory once
        name: sys.intern(
            f"{value:.6g}" if isinstance(value, float) else json.dumps(value, sort_keys=True)
        )
        for name, value in sorted((own | numbers).items())
    }


def endpoint(r: Rollout) -> str | None:
    """The server that sampled it, where there were several."""
    value = json.loads(r.engine_meta or "{}").get("endpoint")
    return None if value is None else str(value)


def what_only_they_share(affected: Sequence[Traits], others: Sequence[Traits]) -> dict[str, Any]:
    """Properties that all of `affected` have and none of `others`; empty where there is none.

    A property is a list of values, each of them in two rollouts or more; `longer_than` and
    `shorter_than` are numbers of output tokens.
    """
    if not affected or not others:
        return {}
    found: dict[str, Any] = {}
    for name in ("endpoint", *dict.fromkeys(k for t in affected for k in t.values)):
        elsewhere = {v for t in others for v in t.values.get(name, ())}
        mine = [t.values.get(name, frozenset()) - elsewhere for t in affected]
        counts = Counter(v for values in mine for v in values)
        common = sorted(v for v, n in counts.items() if n >= MIN_EACH)
        if len(common) <= MAX_VALUES and all(values & set(common) for values in mine):
            found[name] = common
    lengths, other_lengths = ([t.output_tokens for t in group] for group in (affected, others))
    if len(lengths) >= MIN_LENGTH:
        if min(lengths) > max(other_lengths):
            found["longer_than"] = max(other_lengths)
        elif max(lengths) < min(other_lengths):
            found["shorter_than"] = min(other_lengths)
    return found


def in_words(shared: dict[str, Any]) -> str:
    """To follow "in 3 of 20 rollouts (a, b, c)"; empty where nothing is shared."""
    words = {"longer_than": "more than {} output tokens", "shorter_than": "fewer than {}"}
    words["shorter_than"] += " output tokens"
    parts = [
        words[name].format(value) if name in words else f"{name} {' or '.join(map(_short, value))}"
        for name, value in shared.items()
    ]
    if not parts:
        return ""
    *first, last = parts
    return f", the only ones with {', '.join(first) + ' and ' if first else ''}{last}"


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"

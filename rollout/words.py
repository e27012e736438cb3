"""Numbers and facts in words, the same in every table, page and summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Facts = list[tuple[str, str]]
"""Label and text of each."""


def number_of(number: int, word: str) -> str:
    """1 token, 1,234 tokens."""
    return f"{number:,} {word}{'s' * (number != 1)}"


def float32_in_words(number: float) -> str:
    """0.7: the shortest number that a shard, which has float32, holds as this one."""
    return str(np.float32(number)).removesuffix(".0")


def counts_in_words(counts: Mapping[str, int]) -> str:
    """476 robust, 35 consistent."""
    return ", ".join(f"{number} {name}" for name, number in counts.items()) or "none"


def plain(value: Any) -> str:
    """A value out of a JSON document; of mappings and lists the entries, separated by commas."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{label(key)} {plain(entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(plain(entry) for entry in value)
    return str(value)


def label(key: object) -> str:
    """The key of a document as a reader sees it."""
    return str(key).replace("_", " ")


def engine_facts(check: Mapping[str, Any]) -> Facts:
    """What recorded numbers say about their engine (`rollout.self_check`), with the evidence."""

    def fact(name: str, evidence: str) -> str:
        return check[name] if check[name] == "unknown" else f"{check[name]} ({evidence})"

    rows = check["order_rows"]
    return [
        (
            "filter order, as seen",
            fact(
                "filter_order",
                f"of {rows} tokens, {check['joint_violated']} contradict joint, "
                f"{check['sequential_violated']} sequential",
            ),
        ),
        (
            "ties at top_k, as seen",
            fact(
                "tie_policy", f"{check['above_top_k']} of {check['top_k_rows']} tokens above top_k"
            ),
        ),
        (
            "head, as seen",
            fact(
                "head", f"{check['on_grid']} of {check['grid_pairs']} logit pairs on the bf16 grid"
            ),
        ),
        (
            "full logprobs, as seen",
            fact(
                "full_logprobs",
                f"of {check['temperature_rows']} tokens, {check['after_temperature_violated']} "
                f"contradict after, {check['before_temperature_violated']} before",
            ),
        ),
    ]

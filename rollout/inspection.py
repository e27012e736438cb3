"""A run for people: what it is, and what the sampler chose from, token by token."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from difflib import get_close_matches
from itertools import islice
from typing import Any

import numpy as np

from rollout.errors import BadRolloutId
from rollout.reader import Run
from rollout.record import Rollout

TEXT_LENGTH = 40  # characters of a rollout in a list
MOST_COMPARED = 10_000  # ids that a mistyped one is compared with; difflib takes minutes for more
TOP = 5  # ids of a support that are shown

Decode = Callable[[int], str | None]
"""The text of one id; None where the tokenizer has none."""


def view_run(run: Run, limit: int = 10) -> dict[str, Any]:
    """What stands in run.json in short, the number of rollouts, and the first of them."""
    first = [_summary(rollout) for rollout in islice(run, limit)]
    return {"run": _identity(run.info), "rollouts": len(run), "first": first}


def view_rollout(
    rollout: Rollout, decode: Decode | None = None, limit: int | None = None
) -> dict[str, Any]:
    """Facts of one rollout, and one dict per output token; texts only with `decode`."""
    spans = ", ".join(f"{s.version} [{s.start}, {s.end})" for s in rollout.weight_versions)
    facts = {
        "rollout_id": rollout.rollout_id,
        "prompt_tokens": len(rollout.prompt_ids),
        "output_tokens": rollout.num_output_tokens,
        "sampling_params": rollout.sampling_params,
        "finish_reason": rollout.finish_reason,
        "stop_match": rollout.stop_match,
        "weight_versions": spans or None,
        "reward": rollout.reward,
        "attempts": rollout.attempts,
        "prompt_text": rollout.prompt_text,
        "output_text": rollout.output_text,
    }
    shown = range(rollout.num_output_tokens)[:limit]
    kept_mass = rollout.kept_mass
    forced = rollout.is_forced
    tokens = [
        {
            "position": t,
            "id": (token := int(rollout.output_ids[t])),
            "text": decode(token) if decode else None,
            "forced": bool(forced[t]),
            "support_size": len(rollout.support[t]),
            "sampling_logprob": float(rollout.sampling_logprobs[t]),
            "kept_mass": None if kept_mass is None or forced[t] else float(kept_mass[t]),
            "top": _top(rollout, t, decode),
        }
        for t in shown
    ]
    return {"rollout": facts, "tokens": tokens}


def find_rollout(run: Run, rollout_id: str) -> Rollout:
    """The rollout of this id; raises `BadRolloutId`, with the closest ids where there are few."""
    ids = []
    for count, rollout in enumerate(run, start=1):
        if rollout.rollout_id == rollout_id:
            return rollout
        if count <= MOST_COMPARED + 1:
            ids.append(rollout.rollout_id)
    if len(ids) > MOST_COMPARED:
        raise BadRolloutId(
            f"{run.path}, {rollout_id}: no such rollout; ids look like {ids[0]}, and "
            "`rollout inspect DIR --limit N` lists them"
        )
    close = get_close_matches(rollout_id, ids, n=3, cutoff=0) or ["none, the run is empty"]
    raise BadRolloutId(f"{run.path}, {rollout_id}: no such rollout; closest: {', '.join(close)}")


def named_tokenizer(run: Run) -> str | None:
    """Where the tokenizer that run.json names was found when the run was collected."""
    tokenizer = run.info.get("tokenizer") or {}
    path = tokenizer.get("path")
    return str(path) if path is not None else None


def is_other_vocabulary(run: Run, tokenizer: Any) -> bool:
    """Whether run.json says that another vocabulary than this tokenizer's made the ids."""
    from rollout.prompts import describe_tokenizer

    wanted = (run.info.get("tokenizer") or {}).get("vocabulary_sha256")
    return wanted not in (None, describe_tokenizer(tokenizer, "")["vocabulary_sha256"])


def make_decode(tokenizer: Any) -> Decode:
    """The text that each id stands for, spaces kept; the piece itself for half a character."""

    def decode(token: int) -> str | None:
        if token < 0:
            return None  # which tokenizers in Rust do not take for an id at all
        piece = tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return None  # rows of the head that no tokenizer knows
        text: str = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        if "\N{REPLACEMENT CHARACTER}" in text:
            return str(piece)
        # SentencePiece drops the space in front of what it takes for the first word
        is_stripped = piece.startswith("\N{LOWER ONE EIGHTH BLOCK}") and not text.startswith(" ")
        return f" {text}" if is_stripped else text

    return decode


def _top(rollout: Rollout, t: int, decode: Decode | None) -> list[dict[str, Any]] | None:
    """The likeliest ids of a support; None where their logprobs were not recorded."""
    if rollout.support_logprobs is None:
        return None
    start, end = rollout.support.offsets[t : t + 2]
    logprobs = rollout.support_logprobs[start:end]
    return [
        {
            "id": (token := int(rollout.support[t][i])),
            "text": decode(token) if decode else None,
            "probability": float(np.exp(logprobs[i])),
        }
        for i in np.argsort(-logprobs, kind="stable")[:TOP]
    ]


def _summary(rollout: Rollout) -> dict[str, Any]:
    sizes = rollout.support.counts[~rollout.is_forced]
    text = rollout.output_text
    return {
        "rollout_id": rollout.rollout_id,
        "output_tokens": rollout.num_output_tokens,
        "finish_reason": rollout.finish_reason,
        "reward": rollout.reward,
        "mean_support_size": float(sizes.mean()) if len(sizes) else None,
        "text": None if text is None else text[:TEXT_LENGTH],
    }


def _identity(info: dict[str, Any]) -> dict[str, Any]:
    """What a run is, in a few lines; what run.json does not say is left out."""
    engine, tokenizer = info.get("engine") or {}, info.get("tokenizer") or {}
    dataset, imported = info.get("dataset") or {}, info.get("imported") or {}
    created_us = info.get("created_us")
    sampling = (info.get("config") or {}).get("sampling") or {}
    lines = {
        "run_id": info.get("run_id"),
        "created": datetime.fromtimestamp(created_us // 10**6, UTC).isoformat()
        if created_us is not None
        else None,
        "writer": info.get("writer"),
        "engine": _words(engine.get("name"), engine.get("version"), engine.get("model")),
        "sampling": _words(*(f"{k}={v}" for k, v in sampling.items() if v is not None)),
        "tokenizer": tokenizer.get("path"),
        "vocab_size": info.get("vocab_size"),
        "dataset": _words(dataset.get("path"), dataset.get("split")),
        "imported": _words(imported.get("from"), imported.get("file")),
        "merged": _words(*(source["path"] for source in info.get("merged", ()))),
    }
    return {name: value for name, value in lines.items() if value is not None}


def _words(*parts: object) -> str | None:
    return " ".join(str(part) for part in parts if part is not None) or None

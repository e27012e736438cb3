"""annotate(): later scores for rollouts that are already stored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.annotations import Annotation, both, read_annotations, write_annotations
from rollout.directory import locked
from rollout.errors import BadRolloutId, BadValue
from rollout.reader import open_run
from rollout.sampling import canonical_json
from rollout.schema import ANNOTATIONS_LOCK_FILE

LOCK_TIMEOUT_S = 30.0
BUSY = f"another process has been annotating for {LOCK_TIMEOUT_S:.0f} s; wait for it"


def annotate(
    path: str | Path,
    rewards: Mapping[str, float],
    *,
    extra: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Annotation]:
    """Store rewards, and keys for `extra`, by rollout id; returns all annotations of the run.

    Later values win: a reward over an earlier one, a key of `extra` over the same key. A collect
    may be at work in the directory. Raises `BadRolloutId` for ids that are not in the run and
    `BadValue` for a reward that is not finite, and then stores nothing.
    """
    path = Path(path)
    extra = extra or {}
    _check_rewards(path, rewards)
    _check_ids(path, rewards.keys() | extra.keys())
    with locked(path, ANNOTATIONS_LOCK_FILE, timeout_s=LOCK_TIMEOUT_S, busy=BUSY):
        annotations = read_annotations(path)
        for rollout_id in rewards.keys() | extra.keys():
            new = Annotation(
                reward=float(rewards[rollout_id]) if rollout_id in rewards else None,
                extra=canonical_json(dict(extra[rollout_id])) if rollout_id in extra else None,
            )
            before = annotations.get(rollout_id, Annotation())
            annotations[rollout_id] = both(before, new, f"{path}, {rollout_id}")
        write_annotations(path, annotations)
    return annotations


def _check_rewards(path: Path, rewards: Mapping[str, float]) -> None:
    for rollout_id, reward in rewards.items():
        if not math.isfinite(reward):
            raise BadValue(f"{path}, {rollout_id}: reward is {reward}, must be finite")


def _check_ids(path: Path, wanted: set[str]) -> None:
    unknown = sorted(wanted - {rollout.rollout_id for rollout in open_run(path)})
    if unknown:
        raise BadRolloutId(
            f"{path}, {unknown[0]}: no such rollout in this run "
            f"({len(unknown)} of {len(wanted)} ids are unknown); nothing was stored. "
            f"`rollout inspect {path}` lists its ids"
        )

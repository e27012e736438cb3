"""miles: rollouts as the dicts of its `Sample`, and its debug dump of rollout data.

    from miles.utils.types import Sample
    samples = [Sample.from_dict(sample) for sample in to_miles(open_run("runs/first"))]

miles wants a support for every response token, so a forced token is a *singleton*: its own id, with
logprob 0. Here a forced token has no support; both read as "certain, and not trained on".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.adapters.arrays import float32, int32
from rollout.adapters.carried import carry
from rollout.adapters.facts import Facts
from rollout.adapters.samples import Layout, Parts, Supports
from rollout.errors import BadOffsets, BadValue, LengthMismatch, MissingSupport
from rollout.record import Rollout
from rollout.support import Support

IDS = "rollout_sampling_mask_ids"
OFFSETS = "rollout_sampling_mask_offsets"
LOGPROBS = "rollout_sampling_mask_log_probs"  # of a train batch; here where it was recorded


def to_miles(rollouts: Iterable[Rollout]) -> list[dict[str, Any]]:
    """What `Sample.from_dict` reads, one dict for each rollout; those of one prompt side by side.

    Ids [E] and offsets [R + 1] are lists; where recorded, logprobs of all ids are a float32 tensor
    [E]. Columns that a `Sample` has no field for go into its metadata under "rollout". Raises
    `NotExpressible` if temperatures differ or a reward is not finite, and the `DataError` of the
    first rule that a rollout breaks.
    """
    return LAYOUT.to_samples(rollouts)


def from_miles(samples: Iterable[Any], facts: Facts | None = None) -> Iterator[Rollout]:
    """The rollouts of `Sample.to_dict()`s.

    For samples that miles wrote itself `facts` say how they were sampled. A singleton that is not
    trained on is taken for a forced token there. Raises `BadFacts`, and the `DataError` of the
    first rule that a sample breaks.
    """
    return LAYOUT.from_samples(samples, facts)


def _carry(rollout: Rollout) -> dict[str, Any]:
    return carry(replace(rollout, support_logprobs=None), forced=True)


def _fields(rollout: Rollout) -> dict[str, Any]:
    support, forced = rollout.support, rollout.is_forced
    at = support.offsets[:-1][forced]
    counts = np.maximum(support.counts, 1)
    fields: dict[str, Any] = {
        IDS: np.insert(support.ids, at, rollout.output_ids[forced]).tolist(),
        OFFSETS: [0, *np.cumsum(counts, dtype=np.int64).tolist()],
    }
    if rollout.support_logprobs is not None:
        import torch

        fields[LOGPROBS] = torch.tensor(np.insert(rollout.support_logprobs, at, 0.0))
    return fields


def _supports(sample: Mapping[str, Any], parts: Parts, where: str) -> Supports:
    ids, offsets = sample.get(IDS), sample.get(OFFSETS)
    if ids is None and offsets is None and not len(parts.output_ids):
        return Supports(Support.from_rows([]))
    if ids is None or offsets is None:
        raise MissingSupport(f"{where}: no {IDS} or no {OFFSETS}; {_advice(sample)}")
    support = Support(
        int32(ids, f"{where}: {IDS}"), int32(offsets, f"{where}: {OFFSETS}").astype(np.int64)
    )
    for name, array in (
        (OFFSETS, support),
        ("rollout_log_probs", parts.sampling_logprobs),
        ("loss_mask", parts.loss_mask),
    ):
        if len(array) != len(parts.output_ids):
            raise LengthMismatch(
                f"{where}: {name} are of {len(array)} tokens, the response has "
                f"{len(parts.output_ids)}"
            )
    if len(empty := np.flatnonzero(support.counts == 0)):
        raise BadOffsets(
            f"{where}: {OFFSETS}: no ids for token {empty[0]}; miles allows no empty row"
        )
    forced = _forced(support, parts, where)
    kept = ~forced[support.rows]
    logprobs = sample.get(LOGPROBS)
    if logprobs is not None:
        logprobs = float32(logprobs, f"{where}: {LOGPROBS}")
        if len(logprobs) != len(support.ids):
            raise LengthMismatch(f"{where}: {len(logprobs)} {LOGPROBS} for {len(support.ids)} ids")
        logprobs = logprobs[kept]
    counts = np.where(forced, 0, support.counts)
    return Supports(Support.from_counts(support.ids[kept], counts), logprobs)


def _forced(support: Support, parts: Parts, where: str) -> NDArray[np.bool_]:
    """[R] Which singletons are forced tokens.

    A sample of miles itself does not tell one from a sampled token that had no alternative and is
    not trained on; both are certain, so no score depends on it.
    """
    singleton: NDArray[np.bool_] = (support.counts == 1) & support.contains(parts.output_ids)
    if parts.forced is None:
        singleton &= (parts.loss_mask == 0) & (parts.sampling_logprobs == 0)
        return singleton
    forced = np.zeros(len(support), bool)
    for t in parts.forced:
        if not 0 <= t < len(support) or not singleton[t]:
            raise BadValue(f"{where}: token {t} was exported as forced, but is no singleton now")
        forced[t] = True
    return forced


def _advice(sample: Mapping[str, Any]) -> str:
    if sample.get("rollout_sampling_mask") is not None:
        return (
            "the sample holds an object of miles; where it was written, put its two arrays "
            "(rollout_sampling_mask._as_tensors()) under these keys"
        )
    return "miles records supports where --rollout-top-k is set"


LAYOUT = Layout(
    trainer="miles",
    settings="--rollout-temperature {temperature:g} --rollout-top-p {top_p:g} "
    "--rollout-top-k {top_k}, as they were sampled",
    fields=_fields,
    supports=_supports,
    carry=_carry,
    dump={"metadata": {}},
)

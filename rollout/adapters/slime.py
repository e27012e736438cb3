"""slime: rollouts as the dicts of its `Sample`, and its debug dump of rollout data.

    from slime.utils.types import Sample
    samples = [Sample.from_dict(sample) for sample in to_slime(open_run("runs/first"))]

Response token i was sampled from ``ids[offsets[i]:offsets[i + 1]]``; a token that slime does not
train on has an empty span, which slime scores as certain (logprob 0). That is a forced token here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from rollout.adapters.arrays import int32
from rollout.adapters.facts import Facts
from rollout.adapters.samples import Layout, Parts, Supports
from rollout.errors import MissingSupport
from rollout.record import Rollout
from rollout.support import Support

IDS = "rollout_top_p_token_ids"
OFFSETS = "rollout_top_p_token_offsets"


def to_slime(rollouts: Iterable[Rollout]) -> list[dict[str, Any]]:
    """What `Sample.from_dict` reads, one dict for each rollout; those of one prompt side by side.

    Ids and offsets are int32 tensors [E] and [R + 1]. Columns that a `Sample` has no field for go
    into its metadata under "rollout". Raises `NotExpressible` if temperatures differ
    or a reward is not finite, and the `DataError` of the first rule that a rollout breaks.
    """
    return LAYOUT.to_samples(rollouts)


def from_slime(samples: Iterable[Any], facts: Facts | None = None) -> Iterator[Rollout]:
    """The rollouts of `Sample.to_dict()`s.

    For samples that slime wrote itself `facts` say how they were sampled. Raises `BadFacts`, and
    the `DataError` of the first rule that a sample breaks.
    """
    return LAYOUT.from_samples(samples, facts)


def _fields(rollout: Rollout) -> dict[str, Any]:
    import torch

    return {
        IDS: torch.tensor(rollout.support.ids, dtype=torch.int32),
        OFFSETS: torch.tensor(rollout.support.offsets, dtype=torch.int32),
    }


def _supports(sample: Mapping[str, Any], parts: Parts, where: str) -> Supports:
    ids, offsets = sample.get(IDS), sample.get(OFFSETS)
    if ids is None and offsets is None and not len(parts.output_ids):
        return Supports(Support.from_rows([]))
    if ids is None or offsets is None:
        raise MissingSupport(
            f"{where}: no {IDS} or no {OFFSETS}; slime records supports where --rollout-top-p is "
            "below 1"
        )
    return Supports(
        Support(
            int32(ids, f"{where}: {IDS}"), int32(offsets, f"{where}: {OFFSETS}").astype(np.int64)
        )
    )


LAYOUT = Layout(
    trainer="slime",
    settings="--rollout-temperature {temperature:g} and a --rollout-top-p below 1, without which "
    "it ignores the supports",
    fields=_fields,
    supports=_supports,
)

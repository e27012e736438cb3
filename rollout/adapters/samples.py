"""The `Sample` of slime, and of miles which grew from it, as a plain dict.

Both read such a dict with `Sample.from_dict`. They differ in how a sample holds supports, which is
a `Layout`. Field names and shapes: `slime/utils/types.py`, `miles/utils/types.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout.adapters import sample_fields as read_field
from rollout.adapters import torch_file
from rollout.adapters.arrays import int32, plain
from rollout.adapters.carried import KEY, carry, read_carried, restore
from rollout.adapters.facts import ALL_FACTS, SAMPLER, Facts, complete
from rollout.adapters.groups import check_finite_rewards, check_one_temperature, checked, grouped
from rollout.adapters.importing import Reader
from rollout.adapters.sample_fields import STATUS
from rollout.adapters.sglang_jsonl import recorded_params
from rollout.engines.base import Completion
from rollout.errors import BadValue, NotReplayable
from rollout.record import Rollout
from rollout.sampling import canonical_json
from rollout.support import Support


class Item(NamedTuple):
    """A sample of a dump, with the id that it has if it does not carry one."""

    sample: Any
    prompt_id: str
    sample_index: int


class Parts(NamedTuple):
    """What a sample holds of the response's R tokens, as needed to read its supports."""

    output_ids: NDArray[np.int32]
    loss_mask: NDArray[np.int8]
    sampling_logprobs: NDArray[np.float32]
    forced: list[int] | None  # positions, where the sample carries them


class Supports(NamedTuple):
    """The supports of a sample; logprobs of their ids, where the sample has them."""

    support: Support
    logprobs: NDArray[np.float32] | None = None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What is a trainer's own: the fields that hold supports, and the top of its dump file."""

    trainer: str
    settings: str  # what the trainer must be started with, of one rollout's settings
    fields: Callable[[Rollout], dict[str, Any]]
    supports: Callable[[Mapping[str, Any], Parts, str], Supports]
    carry: Callable[[Rollout], dict[str, Any]] = carry
    dump: Mapping[str, Any] = field(default_factory=dict)  # beside the samples

    def to_samples(self, rollouts: Iterable[Rollout]) -> list[dict[str, Any]]:
        """A sample of each rollout; those of one prompt stand together, numbered alike.

        Raises `NotExpressible` if their temperatures differ, because the trainer divides all logits
        by one, and for a reward that is not finite; and the `DataError` of the first rule that a
        rollout breaks.
        """
        ordered = grouped(checked(rollouts))
        check_finite_rewards(ordered, self.trainer)
        check_one_temperature(ordered, self.trainer)
        groups: dict[str, int] = {}
        return [
            self._to_sample(rollout, groups.setdefault(rollout.prompt_id, len(groups)), index)
            for index, rollout in enumerate(ordered)
        ]

    def _to_sample(self, r: Rollout, group_index: int, index: int) -> dict[str, Any]:
        return {
            "group_index": group_index,
            "index": index,
            "rollout_id": index,
            "prompt": r.prompt_text or "",
            "tokens": [*r.prompt_ids.tolist(), *r.output_ids.tolist()],
            "response": r.output_text or "",
            "response_length": r.num_output_tokens,
            "reward": r.reward,
            "loss_mask": r.loss_mask.tolist(),
            "weight_versions": [span.version for span in r.weight_versions],
            "rollout_log_probs": r.sampling_logprobs.tolist(),
            **self.fields(r),
            "status": STATUS[r.finish_reason],
            "metadata": {KEY: self.carry(r)},
        }

    def from_samples(self, samples: Iterable[Any], facts: Facts | None) -> Iterator[Rollout]:
        """The rollout of each sample, checked against every rule."""
        known = facts or Facts()
        return checked(self.parse(item, number, known) for number, item in _items(samples))

    def parse(self, item: Item, number: int, facts: Facts) -> Rollout:
        """The rollout of one sample; raises the `RolloutError` that says why it cannot be one."""
        where = f"sample {number}"
        sample = item.sample
        if not isinstance(sample, Mapping):
            raise BadValue(f"{where}: must be the dict of a Sample, got {type(sample).__name__}")
        if sample.get("multimodal_inputs") is not None:
            raise NotReplayable(f"{where}: multimodal_inputs; a rollout holds token ids alone")
        tokens = int32(read_field.need(sample, "tokens", where), f"{where}: tokens")
        length = read_field.response_length(sample, len(tokens), where)
        split = len(tokens) - length
        carried = read_carried(sample.get("metadata"), where)
        parts = Parts(
            tokens[split:],
            read_field.loss_mask(sample, length, where),
            read_field.logprobs(sample, length, where),
            None if carried is None else carried.forced,
        )
        supports = self.supports(sample, parts, where)
        said = {
            "prompt_ids": tokens[:split],
            "output_ids": parts.output_ids,
            "sampling_logprobs": parts.sampling_logprobs,
            "support": supports.support,
            "finish_reason": read_field.finish_reason(sample, where),
        }
        scored: dict[str, Any] = {
            "loss_mask": parts.loss_mask,
            "reward": read_field.reward(sample, facts, where),
        }
        if carried is not None:
            known = {name: getattr(carried, name) for name in SAMPLER}
            complete(known | {"finish_reason": said["finish_reason"]}, facts, where, ALL_FACTS)
            if supports.logprobs is not None:
                said["support_logprobs"] = supports.logprobs
            return restore(carried, **said, **scored)
        return replace(_new(item, sample, said, supports.logprobs, facts, where), **scored)

    def write(self, rollouts: Iterable[Rollout], path: Path) -> tuple[str, ...]:
        """The trainer's debug dump of one step; what to mind comes back in sentences."""
        samples = self.to_samples(rollouts)
        torch_file.write(path, {"rollout_id": 0, **self.dump, "samples": samples})
        return tuple(_notes(samples, self))

    def reader(self) -> Reader:
        return Reader(
            items=lambda path: list(_items(torch_file.read(path, "samples"))),
            parse=self.parse,
            body=lambda item: json.dumps(plain(item.sample)).encode(),
        )


def _items(samples: Iterable[Any]) -> Iterator[tuple[int, Item]]:
    """Each sample with its number in the dump, and ids by group where it has one."""
    seen: Counter[str] = Counter()
    for number, sample in enumerate(samples):
        group = sample.get("group_index") if isinstance(sample, Mapping) else None
        prompt_id = f"sample-{number:06d}" if group is None else str(group)
        yield number, Item(sample, prompt_id, seen[prompt_id])
        seen[prompt_id] += 1


def _new(
    item: Item,
    sample: Mapping[str, Any],
    said: Mapping[str, Any],
    support_logprobs: NDArray[np.float32] | None,
    facts: Facts,
    where: str,
) -> Rollout:
    """The rollout of a sample that the trainer itself wrote: the caller says how it was sampled."""
    settings = complete({"finish_reason": said["finish_reason"]}, facts, where, ALL_FACTS)
    del settings["finish_reason"]
    spans, unclear = read_field.spans(
        sample, len(said["prompt_ids"]), len(said["output_ids"]), where
    )
    is_chat = isinstance(sample.get("prompt"), list)
    kept = {
        "label": sample.get("label"),
        "messages": sample["prompt"] if is_chat else None,
        "metadata": sample.get("metadata"),
        "weight_versions": unclear,
    }
    completion = Completion(
        output_ids=said["output_ids"],
        support=said["support"],
        sampling_logprobs=said["sampling_logprobs"],
        full_logprobs=None,
        support_logprobs=support_logprobs,
        finish_reason=said["finish_reason"],
        weight_versions=spans,
        text=read_field.text(sample, "response", where),
        engine_meta={"engine": "sglang", "source": "import"},
    )
    return completion.to_rollout(
        prompt_id=item.prompt_id,
        sample_index=item.sample_index,
        prompt_ids=said["prompt_ids"],
        params=recorded_params(settings),
        sampling_params=canonical_json(settings),
        prompt_text=None if is_chat else read_field.text(sample, "prompt", where),
        extra=canonical_json({k: v for k, v in plain(kept).items() if v not in (None, {})}),
    )


def _notes(samples: Sequence[Mapping[str, Any]], layout: Layout) -> Iterator[str]:
    if samples:
        yield f"start {layout.trainer} with {layout.settings}".format(**samples[0]["metadata"][KEY])
    if without := sum(sample["reward"] is None for sample in samples):
        yield (
            f"{without} of {len(samples)} samples have no reward, and {layout.trainer} needs a "
            "number; rollout.annotate adds them"
        )
    sizes = Counter(sample["group_index"] for sample in samples).values()
    if len(set(sizes)) > 1:
        yield (
            f"prompts have {min(sizes)} to {max(sizes)} samples; {layout.trainer} may compare "
            "rewards of different prompts where the numbers are not equal"
        )

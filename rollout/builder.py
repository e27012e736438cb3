"""RolloutBuilder: several sampled turns, and forced tokens between them, as one rollout."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollout.engines.base import Completion
from rollout.errors import (
    BadValue,
    ConfigError,
    DataError,
    IdOutsideVocabulary,
    PrefixDiverged,
    TurnMismatch,
)
from rollout.prompts import Prompt
from rollout.record import Rollout, WeightSpan, make_rollout_id
from rollout.rules import check_content, check_format
from rollout.sampling import Sampler, SamplingParams, canonical_json
from rollout.support import Support

MAY_DIFFER = {"endpoint"}
"""Keys of `engine_meta` in which turns may differ: the next turn may go to another server."""

OPTIONAL = ("full_logprobs", "support_logprobs")


@dataclass(frozen=True, eq=False)
class _Part:
    """Output tokens that were put there together: a sampled turn, or forced tokens."""

    rollout: Rollout  # these tokens alone, checked
    turn: int | None  # None: forced
    sent: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.rollout.num_output_tokens


class RolloutBuilder:
    """Builds the rollout of a conversation: sampled turns, and forced tokens between them::

        builder = RolloutBuilder("7", prompt_ids)
        builder.append_sampled(await engine.generate(builder.prompt, params), params)
        builder.append_forced(tool_output_ids)
        builder.append_sampled(await engine.generate(builder.prompt, params), params)
        rollout = builder.build(reward=1.0)

    Ids are taken as they are and nothing is ever tokenised: `prompt_ids` is what to send for the
    next turn. Turns are numbered from 0. A turn that one record cannot hold beside the others is a
    `TurnMismatch`, and leaves the builder as it was: docs/multi_turn.md says what may differ.
    """

    def __init__(self, prompt_id: str, prompt_ids: ArrayLike, sample_index: int = 0) -> None:
        self._prompt_id = prompt_id
        self._sample_index = sample_index
        self._first = _as_ids(prompt_ids, "prompt_ids")
        self._parts: list[_Part] = []

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        """[P] What the next token is conditioned on: the prompt and every output token so far."""
        return np.concatenate([self._first, *(p.rollout.output_ids for p in self._parts)])

    @property
    def prompt(self) -> Prompt:
        """`prompt_ids` for `Engine.generate`."""
        return Prompt(self._prompt_id, self.prompt_ids)

    @property
    def num_output_tokens(self) -> int:
        return sum(map(len, self._parts))

    @property
    def num_turns(self) -> int:
        """Sampled ones."""
        return len(self._turns)

    @property
    def _turns(self) -> list[_Part]:
        return [part for part in self._parts if part.turn is not None]

    def append_sampled(
        self, completion: Completion, params: SamplingParams, *, loss_mask: bool = True
    ) -> None:
        """Append what an engine sampled with `params` after `prompt_ids`.

        `loss_mask` False keeps its supports but does not train on it: an off-policy part.

        Raises `TurnMismatch` for a turn that does not fit the ones before, `PrefixDiverged` where
        the engine rendered another prompt than `prompt_ids`, `NotReplayable`, and every error of
        the rules for a completion that breaks one. The message starts with the turn.
        """
        turn = self.num_turns
        if completion.prompt_ids is not None:
            self._check_prefix(completion.prompt_ids, f"turn {turn}: the engine's prompt", True)
        if params.top_k == "auto":
            raise ConfigError(
                f"turn {turn}: sampling.top_k: got auto, wanted the number that the engine used; "
                "pass what engine.resolve(params) returned"
            )
        params.check_replayable()
        try:
            alone = self._alone(completion, params, loss_mask)
        except DataError as error:
            error.args = (f"turn {turn}: {error}",)
            raise
        part = _Part(alone, turn, params.to_request())
        for earlier in self._turns:
            _check_alike(earlier, part)
        self._parts.append(part)

    def append_forced(self, ids: ArrayLike) -> None:
        """Append tokens that the policy did not sample: tool output, or what a template adds."""
        forced = _as_ids(ids, "forced ids")
        length = len(forced)
        zeros = np.zeros(length, np.float32)
        alone = self._alone(
            Completion(
                output_ids=forced,
                support=Support.from_counts(np.zeros(0, np.int32), np.zeros(length, np.int32)),
                sampling_logprobs=zeros,
                full_logprobs=zeros,
                support_logprobs=zeros[:0],
                finish_reason="stop",
            ),
            SamplingParams(top_k=1),
            False,
        )
        self._parts.append(_Part(alone, None))

    def continue_with(self, prompt_ids: ArrayLike) -> None:
        """Append as forced what `prompt_ids` hold beyond what is there: for a next prompt that a
        chat template rendered whole.

        Raises `PrefixDiverged` where they do not begin with `self.prompt_ids`; a template that
        renders an earlier turn anew often does that.
        """
        ids = _as_ids(prompt_ids, "prompt_ids")
        self._check_prefix(ids, "the next prompt", False)
        self.append_forced(ids[len(self.prompt_ids) :])

    def build(
        self,
        *,
        abort: int = 0,
        reward: float | None = None,
        prompt_text: str | None = None,
        output_text: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Rollout:
        """The rollout so far; the builder can go on afterwards.

        `finish_reason` and `stop_match` are those of the last turn; where it was aborted, the id is
        that of the abort-th aborted attempt. `extra` gets a key `turns`, see docs/multi_turn.md.
        Raises `TurnMismatch` without a sampled turn, and `EmptyPrompt`.
        """
        if not self._turns:
            raise TurnMismatch(
                f"{self._prompt_id}: wanted at least one sampled turn, got none; "
                "append_sampled() what the engine returned"
            )
        first, last = self._turns[0].rollout, self._turns[-1].rollout
        parts = [part.rollout for part in self._parts]
        rollout = replace(
            last,
            rollout_id=make_rollout_id(
                self._prompt_id, self._sample_index, abort if _is_aborted(last) else None
            ),
            prompt_ids=self._first,
            output_ids=_joined([r.output_ids for r in parts]),
            loss_mask=_joined([r.loss_mask for r in parts]),
            sampling_logprobs=_joined([r.sampling_logprobs for r in parts]),
            support=Support.concatenate([r.support for r in parts]),
            full_logprobs=self._optional("full_logprobs"),
            support_logprobs=self._optional("support_logprobs"),
            max_new_tokens=sum(turn.rollout.max_new_tokens for turn in self._turns),
            seed=first.seed if len({turn.rollout.seed for turn in self._turns}) == 1 else None,
            sampling_params=canonical_json(self._sent()),
            weight_versions=self._spans(),
            engine_meta=canonical_json(self._meta()),
            reward=reward,
            prompt_text=prompt_text,
            output_text=first.output_text
            if len(parts) == 1 and output_text is None
            else output_text,
            created_us=time.time_ns() // 1000,
            extra=canonical_json({**(extra or {}), "turns": self._described()}),
        )
        check_format(rollout)
        return rollout

    def _alone(self, completion: Completion, params: SamplingParams, train: bool) -> Rollout:
        """These tokens as a rollout of their own, which keeps every rule."""
        rollout = completion.to_rollout(
            prompt_id=self._prompt_id,
            sample_index=self._sample_index,
            prompt_ids=self._first,
            params=params,
            sampling_params="{}",
        )
        if not train:
            rollout = replace(rollout, loss_mask=np.zeros_like(rollout.loss_mask))
        check_format(rollout)
        check_content(rollout)
        return rollout

    def _check_prefix(self, ids: NDArray[np.int32], what: str, is_whole: bool) -> None:
        """`ids` must begin with what is there, or be it."""
        here = self.prompt_ids
        common = min(len(here), len(ids))
        if len(at := np.flatnonzero(here[:common] != ids[:common])):
            i = at[0]
            raise PrefixDiverged(
                f"{what} differs at index {i}: got {ids[i]}, wanted {here[i]}; send the builder's "
                "prompt_ids, and never tokenise sampled text again"
            )
        if len(ids) < len(here) or (is_whole and len(ids) > len(here)):
            raise PrefixDiverged(
                f"{what} differs at index {common}: got {len(ids)} ids, wanted {len(here)}"
                + ("" if len(ids) < len(here) else "; append_forced() the new ones first")
            )

    def _optional(self, name: str) -> NDArray[np.float32] | None:
        """The column over all parts; forced tokens, which have zeros, follow the turns."""
        if getattr(self._turns[0].rollout, name) is None:
            return None
        column: NDArray[np.float32] = _joined([getattr(p.rollout, name) for p in self._parts])
        return column

    def _starts(self) -> list[int]:
        return [0, *np.cumsum([len(part) for part in self._parts]).tolist()]

    def _spans(self) -> tuple[WeightSpan, ...]:
        return tuple(
            WeightSpan(span.version, span.start + start, span.end + start)
            for part, start in zip(self._parts, self._starts(), strict=False)
            for span in part.rollout.weight_versions
        )

    def _sent(self) -> dict[str, Any]:
        """Every setting that any turn sent; `turns` has those of a turn that sent others."""
        sent: dict[str, Any] = {}
        for turn in self._turns:
            sent = {**turn.sent, **sent}
        return sent

    def _meta(self) -> dict[str, Any]:
        """What the engines of all turns say of themselves."""
        metas = [_meta(turn) for turn in self._turns]
        return {k: v for k, v in metas[0].items() if all(k in m and m[k] == v for m in metas)}

    def _described(self) -> list[dict[str, Any]]:
        """What is each turn's own: `turns` of `extra`."""
        sent, meta = self._sent(), self._meta()
        turns = []
        for part, start in zip(self._parts, self._starts(), strict=False):
            if part.turn is None:
                continue
            about: dict[str, Any] = {
                "start": start,
                "end": start + len(part),
                "finish_reason": part.rollout.finish_reason,
            }
            if part.rollout.stop_match is not None:
                about["stop_match"] = part.rollout.stop_match
            if part.sent != sent:
                about["sampling_params"] = dict(part.sent)
            if own := {k: v for k, v in _meta(part).items() if k not in meta}:
                about["engine_meta"] = own
            turns.append(about)
        return turns


def _check_alike(first: _Part, new: _Part) -> None:
    """Raise `TurnMismatch` for what one record has one value of, and turns have two."""
    for name in Sampler._fields:
        _check_equal(name, getattr(first.rollout, name), getattr(new.rollout, name), new)
    old_meta, new_meta = _meta(first), _meta(new)
    for key in sorted(old_meta.keys() | new_meta.keys()):
        if key not in MAY_DIFFER:
            _check_equal(f"engine_meta.{key}", old_meta.get(key), new_meta.get(key), new)
    for name in OPTIONAL:
        known = [getattr(part.rollout, name) is not None for part in (first, new)]
        if known[0] != known[1]:
            raise TurnMismatch(
                f"turn {new.turn}: {name}: got {_whether(known[1])}, wanted {_whether(known[0])} "
                "as in the turns before; a column is there for all tokens or for none: leave it "
                f"out of every turn with dataclasses.replace(completion, {name}=None)"
            )
    spans = [bool(part.rollout.weight_versions) for part in (first, new)]
    if spans[0] != spans[1] and len(first) and len(new):
        raise TurnMismatch(
            f"turn {new.turn}: weight_versions: got {_whether(spans[1])}, wanted "
            f"{_whether(spans[0])} as in the turns before; versions are known for all or for none: "
            "leave them out of every turn with dataclasses.replace(completion, weight_versions=())"
        )


def _check_equal(name: str, wanted: Any, got: Any, part: _Part) -> None:
    if got != wanted:
        raise TurnMismatch(
            f"turn {part.turn}: {name}: got {got}, wanted {wanted} as in the turns before; one "
            "rollout has one value of it: begin another rollout with prompt_ids as its prompt"
        )


def _whether(known: bool) -> str:
    return "values" if known else "none"


def _is_aborted(rollout: Rollout) -> bool:
    return rollout.finish_reason == "abort"


def _meta(part: _Part) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads(part.rollout.engine_meta)
    return meta


def _joined(arrays: Sequence[Any]) -> Any:
    return np.concatenate(arrays)


def _as_ids(ids: ArrayLike, where: str) -> NDArray[np.int32]:
    """`ids` as int32, a copy; `BadValue` and `IdOutsideVocabulary` for what they cannot be."""
    given = np.asarray(ids)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise BadValue(f"{where}: got {given.dtype} {list(given.shape)}, wanted a list of integers")
    outside = (given < 0) | (given >= 2**31)
    if outside.any():
        raise IdOutsideVocabulary(
            f"{where}: got {given[outside][0]} at index {np.flatnonzero(outside)[0]}, wanted a "
            "token id, 0 or more and in 32 bits"
        )
    return given.astype(np.int32)

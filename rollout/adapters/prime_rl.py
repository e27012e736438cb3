"""prime-rl: rollouts as its `TrainingSample`, and files of these or of its packed `MicroBatch`.

    import msgspec
    from prime_rl.transports.rollouts.types import TrainingSample
    samples = msgspec.msgpack.decode(Path("samples.bin").read_bytes(), type=list[TrainingSample])

A sample is one flat sequence, prompt and output alike, and every array has its length. prime-rl
reads a count of 0 as "the whole vocabulary", on tokens that it trains on too. Here such a token
would lack its support: it is refused. On a token that is not trained on, 0 is a forced token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollout.adapters.arrays import float32, int32
from rollout.adapters.facts import ALL_FACTS, Facts, complete
from rollout.adapters.groups import checked, grouped
from rollout.adapters.importing import Reader
from rollout.adapters.prime_rl_types import (
    Filler,
    MicroBatch,
    SamplingMask,
    TrainingSample,
    unpack,
)
from rollout.adapters.sglang_jsonl import recorded_params
from rollout.engines.base import Completion
from rollout.errors import (
    BadOffsets,
    BadValue,
    ConfigError,
    EmptyPrompt,
    FormatError,
    LengthMismatch,
    MissingSupport,
    NotExpressible,
    NotReplayable,
)
from rollout.record import Rollout
from rollout.sampling import canonical_json
from rollout.support import Support

OUR_TRACE_ID = re.compile(r"(?s)(.+):(\d+)")


def to_prime_rl(rollouts: Iterable[Rollout], env_name: str = "") -> list[TrainingSample]:
    """A `TrainingSample` of each rollout, T = P + R tokens; those of one prompt side by side.

    `trace_id` is the rollout id. `advantages` are yours to set before prime-rl trains on one.
    Raises `NotExpressible` for a rollout that is aborted or has no sampled token, which a sample
    cannot say, and the `DataError` of the first rule that one breaks.
    """
    return [_to_sample(rollout, env_name) for rollout in grouped(checked(rollouts))]


def _to_sample(r: Rollout, env_name: str) -> TrainingSample:
    if r.finish_reason == "abort":
        raise NotExpressible(
            f"{r.rollout_id}: aborted, and a sample of prime-rl cannot say so; leave it out "
            "(rollout export --without-aborted)"
        )
    if r.is_forced.all():
        raise NotExpressible(
            f"{r.rollout_id}: no token of it was sampled, and prime-rl would take it for a prompt; "
            "leave it out"
        )
    prompt = len(r.prompt_ids)
    total = prompt + r.num_output_tokens
    counts = np.concatenate([np.zeros(prompt, np.int32), r.support.counts])
    logprobs = r.support_logprobs
    return TrainingSample(
        token_ids=[*r.prompt_ids.tolist(), *r.output_ids.tolist()],
        mask=[False] * prompt + (r.loss_mask == 1).tolist(),
        logprobs=[0.0] * prompt + r.sampling_logprobs.tolist(),
        temperatures=[float(r.temperature)] * total,
        env_name=env_name,
        sampling_mask=SamplingMask(
            ids=r.support.ids.astype("<i4").tobytes(),
            counts=counts.astype("<i4").tobytes(),
            logprobs=None if logprobs is None else logprobs.astype("<f4").tobytes(),
        ),
        trace_id=r.rollout_id,
        branch_index=0,
    )


def from_prime_rl(samples: Iterable[Any], facts: Facts | None = None) -> Iterator[Rollout]:
    """The rollouts of prime-rl's `TrainingSample`s, its own structs or ours.

    A sample says tokens, supports, logprobs and temperatures; `facts` say the rest. The output
    starts at the first token with a support. Raises `BadFacts`, and the `DataError` of the first
    rule that a sample breaks.
    """
    known = facts or Facts()
    return checked(parse(_ours(sample, n), n, known) for n, sample in enumerate(samples))


def parse(sample: TrainingSample | Filler, number: int, facts: Facts) -> Rollout:
    """The rollout of one sample; raises the `RolloutError` that says why it cannot be one."""
    where = f"sample {number}"
    if isinstance(sample, Filler):
        raise BadValue(
            f"{where}: no token of it is trained on; prime-rl fills batches with copies of others"
        )
    tokens = int32(sample.token_ids, f"{where}: token_ids")
    for name in ("mask", "logprobs", "temperatures"):
        if len(getattr(sample, name)) != len(tokens):
            raise LengthMismatch(
                f"{where}: {len(getattr(sample, name))} {name} for {len(tokens)} token_ids"
            )
    if sample.mm_refs is not None:
        raise NotReplayable(f"{where}: images; a rollout holds token ids alone")
    support, support_logprobs = _support(sample, len(tokens), where)
    split = _first_output(support, where)
    output = np.arange(split, len(tokens))
    mask = np.array(sample.mask, bool)
    if mask[:split].any():
        raise MissingSupport(
            f"{where}: token {np.flatnonzero(mask)[0]} is trained on and has a count of 0, which "
            "prime-rl reads as the whole vocabulary; a rollout needs the ids it was sampled from"
        )
    sampled = support.counts > 0
    said = {"temperature": _temperature(sample, sampled, where)}
    settings = complete(said, facts, where, ALL_FACTS)
    finish_reason = settings.pop("finish_reason")
    prompt_id, sample_index = _identity(sample, number)
    completion = Completion(
        output_ids=tokens[split:],
        support=support.take(output),
        sampling_logprobs=float32(sample.logprobs, f"{where}: logprobs")[split:],
        full_logprobs=None,
        support_logprobs=support_logprobs,
        finish_reason=finish_reason,
        engine_meta={"engine": "vllm", "source": "import"},
    )
    rollout = completion.to_rollout(
        prompt_id=prompt_id,
        sample_index=sample_index,
        prompt_ids=tokens[:split],
        params=recorded_params(settings),
        sampling_params=canonical_json(settings),
        extra=canonical_json({"env_name": sample.env_name} if sample.env_name else {}),
    )
    return replace(rollout, loss_mask=mask[split:].astype(np.int8))


def _support(sample: TrainingSample, total: int, where: str) -> tuple[Support, Any]:
    """Supports of all T tokens; logprobs of their ids, where there are some."""
    packed = sample.sampling_mask
    if packed is None:
        raise MissingSupport(
            f"{where}: no sampling_mask; prime-rl records supports where sampling is truncated"
        )
    for name, data in (("ids", packed.ids), ("counts", packed.counts)):
        if len(data) % 4:
            raise BadOffsets(f"{where}: {len(data)} bytes of {name}, must be four for each")
    ids = np.frombuffer(packed.ids, "<i4").astype(np.int32)
    counts = np.frombuffer(packed.counts, "<i4").astype(np.int32)
    if len(counts) != total:
        raise LengthMismatch(f"{where}: {len(counts)} counts for {total} token_ids")
    if packed.logprobs is None:
        return Support.from_counts(ids, counts), None
    if len(packed.logprobs) != len(packed.ids):
        raise LengthMismatch(
            f"{where}: {len(packed.logprobs)} bytes of logprobs for {len(packed.ids)} of ids"
        )
    return Support.from_counts(ids, counts), np.frombuffer(packed.logprobs, "<f4").astype(
        np.float32
    )


def _first_output(support: Support, where: str) -> int:
    sampled = np.flatnonzero(support.counts)
    if not len(sampled):
        raise MissingSupport(f"{where}: no token has a support, so nothing was sampled")
    if sampled[0] == 0:
        raise EmptyPrompt(f"{where}: its first token was sampled, so there is no prompt")
    return int(sampled[0])


def _temperature(sample: TrainingSample, sampled: Any, where: str) -> float:
    """The one temperature of the sampled tokens; that of others means nothing to prime-rl."""
    values = np.unique(np.array(sample.temperatures, np.float64)[sampled])
    if len(values) != 1:
        raise BadValue(f"{where}: sampled at temperatures {values.tolist()}; a rollout has one")
    return float(values[0])


def _identity(sample: TrainingSample, number: int) -> tuple[str, int]:
    """Our own id where an export left it; else a branch of a trace, or the place in the file."""
    if not sample.trace_id:
        return f"sample-{number:06d}", 0
    if not sample.branch_index and (ours := OUR_TRACE_ID.fullmatch(sample.trace_id)):
        return ours[1], int(ours[2])
    return sample.trace_id, sample.branch_index or 0


def write(rollouts: Iterable[Rollout], path: Path) -> tuple[str, ...]:
    """A file of `list[TrainingSample]`; what to mind comes back in sentences."""
    kept = list(rollouts)
    path.write_bytes(msgspec.msgpack.encode(to_prime_rl(kept)))
    notes = ["the samples have no advantages: set them before prime-rl trains on these"]
    notes.append(
        "why each rollout ended, rewards, weight versions and texts have no place in a sample; "
        "keep the run directory"
    )
    if late := sum(bool(r.is_forced[0]) for r in kept):
        notes.append(f"{late} rollouts start with forced tokens, which are prompt in a sample")
    return tuple(notes)


def _items(path: Path) -> Iterator[tuple[int, TrainingSample | Filler]]:
    """Samples of a file of `list[TrainingSample]`, or of a `rank_N.bin` of `list[MicroBatch]`."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        return enumerate(msgspec.msgpack.decode(content, type=list[TrainingSample]))
    except msgspec.DecodeError as error:
        no_samples = error
    try:
        batches = msgspec.msgpack.decode(content, type=list[MicroBatch])
    except msgspec.DecodeError as no_batches:
        raise FormatError(
            f"{path}: neither a list of TrainingSample ({no_samples}) nor of MicroBatch "
            f"({no_batches})"
        ) from no_batches
    return enumerate([sample for batch in batches for sample in unpack(batch, str(path))])


def _ours(sample: Any, number: int) -> TrainingSample:
    """prime-rl's struct as ours, which has the same layout."""
    if isinstance(sample, TrainingSample):
        return sample
    try:
        return msgspec.convert(
            msgspec.to_builtins(sample, builtin_types=(bytes,)),
            TrainingSample,
            from_attributes=True,
        )
    except msgspec.ValidationError as error:
        raise BadValue(f"sample {number}: must be a TrainingSample: {error}") from error


def _body(sample: TrainingSample | Filler) -> bytes:
    return msgspec.json.encode(msgspec.structs.asdict(sample))


READER = Reader(items=lambda path: list(_items(path)), parse=parse, body=_body)

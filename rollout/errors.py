"""Every error of this toolkit, in one tree.

    RolloutError
    ├── ConfigError                  what was asked for cannot be done
    │   ├── NotReplayable            ... because no trainer could replay what would come back
    │   └── ConfigChanged            ... because the run directory was started with other settings
    ├── DataError                    data breaks a rule of docs/format.md
    │   ├── FormatError              the bytes are not what they claim to be
    │   │   ├── NotARun              no run directory, or nothing in it
    │   │   ├── SchemaMismatch       columns or types differ from the schema
    │   │   ├── SchemaVersionUnknown written by another version of the format
    │   │   ├── ShardDamaged         the Arrow stream cannot be decoded
    │   │   ├── ShardHashMismatch    a finished shard is not the one in the manifest
    │   │   ├── NullValue            a null where a value is required
    │   │   ├── BadOffsets           support offsets do not describe the support ids
    │   │   ├── LengthMismatch       two arrays that must be aligned are not
    │   │   ├── EmptyPrompt          no prompt token to condition on
    │   │   ├── MissingSupport       a token to train on has no support
    │   │   ├── BadRolloutId         the id is not "{prompt_id}:{sample_index}", or occurs twice
    │   │   └── BadValue             a scalar outside its range
    │   ├── ContentError             one rollout contradicts itself; `code` is the verdict's word
    │   │   ├── DuplicateIds · SampledOutsideSupport · IdOutsideVocabulary
    │   │   ├── NonfiniteLogprob · PositiveLogprob · SentinelLogprob · SingletonLogprob
    │   │   └── SupportTruncated · LogprobsDisagree
    │   └── TurnMismatch             a turn that one rollout cannot hold beside its other turns
    │       └── PrefixDiverged       a prompt that does not continue what is there
    ├── RunLocked                    another process writes this run directory
    ├── DiskFull                     no space left to write to; what was committed is kept
    ├── PolicyError                  the trainer-side model cannot be used as asked
    ├── EngineError                  the engine cannot be used, or did not answer what was asked
    │   ├── EngineUnreachable        no answer
    │   ├── EngineRefused            HTTP 4xx, with the server's words
    │   │   └── SupportOverflow      a support grew past the server's cap, because of ties
    │   ├── EngineBusy               HTTP 429, 502, 503 or 504: later, perhaps
    │   ├── EngineFailed             any other HTTP 5xx, with the server's words
    │   ├── EngineDown               no endpoint has answered for too long: the run stops
    │   ├── ReplyMalformed           answered, but not in the documented form
    │   ├── PromptTokenCount         answered for another prompt than the one that was sent
    │   ├── SamplingMaskMissing      answered without the sampling mask
    │   ├── GenerationAborted        ended by the server before it was finished
    │   ├── WeightsMoved             sampled with more than one weight version, and that was refused
    │   └── WeightVersionUnconfirmed the server has other weights than the ones that were set
    └── OverBudget                   more failures than the run was allowed

Messages read *where: rule, got, wanted*, and say what to do next where there is something to do.
"""

from __future__ import annotations

from typing import ClassVar


class RolloutError(Exception):
    """Root of every error raised on purpose."""

    #: The word that rejected.jsonl, errors.jsonl and statistics use for this error.
    code: ClassVar[str] = "error"
    #: The reply that caused it, as it came, where there was one.
    body: bytes | None = None


class ConfigError(RolloutError, ValueError):
    """What was asked for cannot be done."""

    code = "config"


class NotReplayable(ConfigError):
    """The sampling settings move logits in a way that a support does not record."""

    code = "not_replayable"


class ConfigChanged(ConfigError):
    """The run directory was started with other settings."""

    code = "config_changed"


class DataError(RolloutError, ValueError):
    """Data breaks a rule of docs/format.md."""

    code = "data"


class FormatError(DataError):
    """The bytes are not what they claim to be."""

    code = "format"


class NotARun(FormatError):
    """No run directory, or nothing in it."""

    code = "not_a_run"


class SchemaMismatch(FormatError):
    """Columns or types differ from the schema."""

    code = "schema_mismatch"


class SchemaVersionUnknown(FormatError):
    """Written by another version of the format."""

    code = "schema_version_unknown"


class ShardDamaged(FormatError):
    """The Arrow stream cannot be decoded."""

    code = "shard_damaged"


class ShardHashMismatch(FormatError):
    """A finished shard is not the one its manifest line describes."""

    code = "shard_hash_mismatch"


class NullValue(FormatError):
    """A null where a value is required."""

    code = "null_value"


class BadOffsets(FormatError):
    """Support offsets do not describe the support ids."""

    code = "bad_offsets"


class LengthMismatch(FormatError):
    """Two arrays that must be aligned are not."""

    code = "length_mismatch"


class EmptyPrompt(FormatError):
    """No prompt token: the first output token has nothing to be conditioned on."""

    code = "empty_prompt"


class MissingSupport(FormatError):
    """A token to train on has no support."""

    code = "missing_support"


class BadRolloutId(FormatError):
    """The id is not "{prompt_id}:{sample_index}", or occurs twice."""

    code = "bad_rollout_id"


class BadValue(FormatError):
    """A scalar outside its range."""

    code = "bad_value"


class ContentError(DataError):
    """One rollout contradicts itself."""

    code = "content"


class DuplicateIds(ContentError):
    """An id stands twice in one support."""

    code = "duplicate_ids"


class SampledOutsideSupport(ContentError):
    """The sampled token is not in its support."""

    code = "sampled_outside_support"


class IdOutsideVocabulary(ContentError):
    """A token id is negative or not below the vocabulary size."""

    code = "id_outside_vocabulary"


class NonfiniteLogprob(ContentError):
    """A logprob is NaN, infinite or null."""

    code = "nonfinite_logprob"


class PositiveLogprob(ContentError):
    """A logprob is above 1e-6."""

    code = "positive_logprob"


class SentinelLogprob(ContentError):
    """A sampled token has a logprob that stands for something else: -1000 or below."""

    code = "sentinel_logprob"


class SingletonLogprob(ContentError):
    """A support of one id has a logprob other than 0."""

    code = "singleton_logprob"


class SupportTruncated(ContentError):
    """The probabilities of a support do not sum to 1 within 1e-5."""

    code = "support_truncated"


class LogprobsDisagree(ContentError):
    """The sampled token's logprob is not the one its support holds, within 1e-5."""

    code = "logprobs_disagree"


class TurnMismatch(DataError):
    """A turn that one rollout cannot hold beside its other turns."""

    code = "turn_mismatch"


class PrefixDiverged(TurnMismatch):
    """A prompt that does not continue what is there."""

    code = "prefix_diverged"


class RunLocked(RolloutError):
    """Another process writes this run directory."""

    code = "run_locked"


class DiskFull(RolloutError):
    """No space left, or over a quota; what was committed is kept."""

    code = "disk_full"


class PolicyError(RolloutError):
    """The trainer-side model cannot be used as asked."""

    code = "policy"


class EngineError(RolloutError):
    """The engine cannot be used, or did not answer what was asked."""

    code = "engine"
    #: How often one rollout may fail like this; None is as often as it is asked for.
    max_attempts: ClassVar[int | None] = 1
    #: Seconds the server asked to wait before the next attempt.
    retry_after_s: float = 0.0
    #: Whether it counts as one of the attempts: not where a rollout only tried a sick endpoint.
    counts: bool = True


class EngineUnreachable(EngineError):
    """No answer: connection refused, reset or timed out."""

    code = "engine_unreachable"
    max_attempts = None


class EngineRefused(EngineError):
    """HTTP 4xx: the request will not be accepted later either."""

    code = "engine_refused"


class SupportOverflow(EngineRefused):
    """Ids that tie at a cut-off made a support larger than the server's cap."""

    code = "support_overflow"


class EngineBusy(EngineError):
    """HTTP 429, 502, 503 or 504: the server, or a proxy before it, cannot serve this now."""

    code = "engine_busy"
    max_attempts = None


class EngineFailed(EngineError):
    """Any other HTTP 5xx: the server failed on this request, perhaps by accident."""

    code = "engine_failed"
    max_attempts = 2


class EngineDown(EngineError):
    """No endpoint has answered for too long; what was collected is kept."""

    code = "engine_down"


class ReplyMalformed(EngineError):
    """HTTP 200, but not in the documented form: a proxy's page, or a reply that was cut."""

    code = "reply_malformed"
    max_attempts = None


class PromptTokenCount(EngineError):
    """The server used other prompt tokens than the ones that were sent."""

    code = "prompt_token_count"


class SamplingMaskMissing(EngineError):
    """HTTP 200 without the sampling mask that was asked for."""

    code = "sampling_mask_missing"


class WeightVersionUnconfirmed(EngineError):
    """After a weight update the server names another version than the one that was set."""

    code = "weight_version_unconfirmed"


class GenerationAborted(EngineError):
    """The server ended the generation before it was finished."""

    code = "aborted"
    max_attempts = None


class WeightsMoved(EngineError):
    """The weights changed while it was sampled, and `single_weight_version` is set."""

    code = "weights_moved"
    max_attempts = None


class OverBudget(RolloutError):
    """More failures than the run was allowed; what was collected is kept."""

    code = "over_budget"

"""verify(): score every sampled token of a run and judge every content rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replay import losses
from replay.audit import Auditor, Semantics, measured_semantics
from replay.audit_result import Audit
from replay.batch import PackedBatch, assemble, group, num_input_tokens, parts_of
from replay.config import ReplayConfig
from replay.diagnose import OtherPrompts, diagnose
from replay.evidence import Evidence, make_evidence
from replay.evidence_store import EvidenceStore
from replay.facts import Head
from replay.full import score_full
from replay.memory import advice_for, memory_for, words_for
from replay.noise import NoiseMeter, noise_sample
from replay.policy import Policy
from replay.tokens import OK, Floats, TokenTable, recorded
from rollout.diagnosis import Diagnosis
from rollout.record import Rollout
from rollout.rules import Fault, count_tokens, find_faults
from rollout.self_check import EngineCheck, check_engine

OnScores = Callable[[Sequence[Rollout], TokenTable, Floats], None]
"""Hears rollouts, their rows, and [E] the policy's logprobs of every support id in them."""


@dataclass(frozen=True)
class Finding:
    """Something that no honest run has: a broken content rule, or a score that is no number."""

    code: str
    count: int  # tokens that break it; a faulty prompt counts once
    rollouts: int
    first: str  # where and what, in words


@dataclass(frozen=True, eq=False)
class Verified:
    """What `verify` found: the scores, the content rules that were broken, and what is wrong."""

    tokens: TokenTable
    findings: tuple[Finding, ...]
    rollouts: int
    noise_floor: float | None = None  # nats; mismatch of honest sides, see `replay.noise`
    diagnoses: tuple[Diagnosis, ...] = ()  # best first; one `clean` where nothing is wrong
    audit: Audit | None = None  # of a sample of the tokens, where it was asked for
    engine: EngineCheck | None = None  # what the recorded numbers say about the engine
    vocab_size: int | None = None  # rows of the policy's head


def verify(
    rollouts: Iterable[Rollout],
    policy: Policy,
    config: ReplayConfig,
    on_batch: Callable[[int, int], None] = lambda rollouts, tokens: None,
    on_scores: OnScores = lambda rollouts, table, support_logprobs: None,
    other_prompts: OtherPrompts | None = None,
    semantics: Callable[[Rollout], Semantics] | None = None,
) -> Verified:
    """Score every sampled token and say what is wrong; bad content never raises, it is a finding.

    A rollout with an id outside the policy's vocabulary cannot go through the policy: its tokens
    are in the table without scores. `on_batch` hears the rollouts and tokens of each batch,
    `on_scores` what the policy says about them, and NaN of what it cannot score. `other_prompts` is
    tried where nothing else explains a mismatch. `semantics` says for the audit how the engine
    filtered each rollout; unless given, the engine's own numbers do, and `engine_meta` where they
    do not tell. Raises `PolicyOutOfMemory` where a batch does not fit on the device.
    """
    rollouts = list(rollouts)
    faults = {r.rollout_id: find_faults(r, policy.vocab_size) for r in rollouts}
    runnable = [r for r in rollouts if _fits(faults, r)]
    unscored = [r for r in rollouts if not _fits(faults, r)]
    tables = [recorded(r, faults[r.rollout_id]) for r in (*unscored, *runnable)]
    for rollout, table in zip(unscored, tables, strict=False):
        on_scores([rollout], table, np.full(len(rollout.support.ids), np.nan, np.float32))
    first = done = sum(map(len, tables[: len(unscored)]))
    # whole from the start, as are the evidence and the audit: small arrays that stay between large
    # ones that go keep a heap from shrinking
    tokens = TokenTable.concatenate(tables)
    del tables
    evidence, floor = EvidenceStore(runnable), _Mean()
    engine = check_engine(rollouts)
    semantics = semantics or partial(measured_semantics, engine)
    auditor = Auditor(runnable, config.audit_tokens, faults, semantics)
    noise = NoiseMeter(policy, config.head_dtype, noise_sample(runnable))
    for own, batch in _packed(runnable, config.max_tokens):
        scores = _scores(own, batch, policy, config, noise)
        table = tokens.rows(done, done + len(batch.targets))
        done += len(table)
        for name, values in scores.columns.items():
            getattr(table, name)[:] = values
        evidence.add(scores.evidence)
        floor.add(scores.evidence.noise)
        if config.audit_tokens:
            with memory_for(words_for(batch), advice_for(batch, config.max_tokens)):
                head, logprobs = _head(policy, config), scores.support_logprobs
                auditor.add(batch, scores.hidden, head, logprobs)
        on_scores(own, table, scores.support_logprobs.cpu().numpy())
        on_batch(len(own), len(table))
    findings = _findings(rollouts, faults) + _no_numbers(tokens, first)
    diagnoses = diagnose(
        evidence.whole(),
        rollouts,
        engine,
        lambda changed: rescore(changed, policy, config),
        other_prompts,
        faults,
    )
    with memory_for("the support audit", "replay without it: --audit 0"):
        audit = auditor.finish(_head(policy, config)) if config.audit_tokens else None
    return Verified(
        tokens=tokens,
        findings=tuple(findings),
        rollouts=len(rollouts),
        noise_floor=floor.value,
        diagnoses=tuple(diagnoses),
        audit=audit,
        engine=engine,
        vocab_size=policy.vocab_size,
    )


def rescore(rollouts: Iterable[Rollout], policy: Policy, config: ReplayConfig) -> Evidence | None:
    """The evidence of `rollouts` alone; None where no token can be scored."""
    rollouts = list(rollouts)
    noise = NoiseMeter(policy, config.head_dtype, noise_sample(rollouts))
    batches = _packed(rollouts, config.max_tokens)
    parts = [_scores(own, batch, policy, config, noise).evidence for own, batch in batches]
    return Evidence.concatenate(parts) if parts else None


def _packed(
    rollouts: Iterable[Rollout], max_tokens: int
) -> Iterator[tuple[list[Rollout], PackedBatch]]:
    """What `pack` yields, each batch with the rollouts in it."""
    for number, own in enumerate(group(rollouts, num_input_tokens, max_tokens)):
        yield own, assemble(parts_of(own), number)


def _fits(faults: dict[str, list[Fault]], rollout: Rollout) -> bool:
    return all(f.code != "id_outside_vocabulary" for f in faults[rollout.rollout_id])


class _Mean:
    """Of the finite values of many arrays."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, values: NDArray[np.float64]) -> None:
        finite = values[np.isfinite(values)]
        self._sum += float(finite.sum())
        self._count += len(finite)

    @property
    def value(self) -> float | None:
        return self._sum / self._count if self._count else None


class _Scores(NamedTuple):
    columns: dict[str, Any]  # of `TokenTable`
    support_logprobs: Tensor  # [E] of every support id
    evidence: Evidence
    hidden: Tensor  # [T, D] of the scored tokens


def _scores(
    rollouts: Sequence[Rollout],
    batch: PackedBatch,
    policy: Policy,
    config: ReplayConfig,
    noise: NoiseMeter,
) -> _Scores:
    with memory_for(words_for(batch), advice_for(batch, config.max_tokens)):
        return _scores_in_memory(rollouts, batch, policy, config, noise)


@torch.inference_mode()
def _scores_in_memory(
    rollouts: Sequence[Rollout],
    batch: PackedBatch,
    policy: Policy,
    config: ReplayConfig,
    noise: NoiseMeter,
) -> _Scores:
    """What the policy says of the scored tokens of `batch`, which holds `rollouts`."""
    b = batch.to(policy.device)
    hidden = policy.hidden(b.input_ids, b.position_ids)[b.hidden_rows]
    head = _head(policy, config)
    masked = policy.over_supports(hidden, b, head.head_dtype)
    full = score_full(hidden, targets=b.targets, temperature=b.temperature, **head._asdict())
    assert masked.support_logprobs is not None and masked.logsumexp is not None
    support_logprobs = masked.support_logprobs.cpu()
    evidence = make_evidence(
        rollouts,
        support_logprobs.numpy(),
        noise.change(rollouts, support_logprobs).numpy(),
        full.logprob.cpu().numpy(),
        masked.logsumexp.cpu().numpy(),
        policy.softcap,
    )
    columns = {
        "replay_logprobs": masked.logprob.cpu().numpy(),
        "replay_full_logprobs": full.logprob.cpu().numpy(),
        "replay_entropy": masked.entropy.cpu().numpy(),
        "support_kl": support_kl(rollouts, batch, support_logprobs).numpy(),
    }
    return _Scores(columns, masked.support_logprobs, evidence, hidden)


def _head(policy: Policy, config: ReplayConfig) -> Head:
    return policy.head(getattr(torch, config.head_dtype))


def support_kl(rollouts: Sequence[Rollout], batch: PackedBatch, replay_logprobs: Tensor) -> Tensor:
    """[T] Exact KL(engine ‖ trainer) over each support; NaN where the engine's side is missing.

    `replay_logprobs` [E] are the policy's logprobs of every support id.
    """
    engine = torch.cat([_engine_logprobs(r) for r in rollouts])
    return losses.support_kl(engine, replay_logprobs, batch.support_offsets)


def _engine_logprobs(rollout: Rollout) -> Tensor:
    if rollout.support_logprobs is None:
        return torch.full((len(rollout.support.ids),), torch.nan)
    return torch.tensor(np.asarray(rollout.support_logprobs))


def _no_numbers(tokens: TokenTable, start: int) -> list[Finding]:
    """Tokens from row `start` on, which went through the policy, that came out as no number."""
    lost = np.isnan(tokens.replay_logprobs[start:]) & (tokens.finding[start:] == OK)
    at = start + np.flatnonzero(lost)
    if not len(at):
        return []
    ids, first = tokens.rollout_id[at], at[0]
    where = f"{tokens.rollout_id[first]}: output token {tokens.position[first]}"
    words = f"{where}: the policy's logprob is not a number"
    return [Finding("nonfinite_replay", len(at), len(set(ids)), words)]


def _findings(rollouts: list[Rollout], faults: dict[str, list[Fault]]) -> list[Finding]:
    by_code: dict[str, dict[str, list[Fault]]] = {}
    for rollout in rollouts:
        for fault in faults[rollout.rollout_id]:
            by_code.setdefault(fault.code, {}).setdefault(rollout.rollout_id, []).append(fault)
    findings = []
    for code, found in by_code.items():
        rollout_id, (first, *_) = next(iter(found.items()))
        count = sum(map(count_tokens, found.values()))
        findings.append(Finding(code, count, len(found), f"{rollout_id}: {first.message}"))
    return findings

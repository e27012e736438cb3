"""The support audit on replies of three real servers: clean sets pass, seeded faults do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import RECORDED, recorded_lines, write_lines

from replay import GatesConfig, Policy
from replay.audit import Auditor, Semantics
from replay.audit_result import Audit
from replay.batch import PackedBatch, pack
from replay.facts import Head
from replay.score import score_support
from rollout.adapters.sglang_jsonl import import_sglang_jsonl
from rollout.reader import open_run
from rollout.record import Rollout
from rollout.rules import find_faults
from rollout.support import Support

pytestmark = pytest.mark.smollm2

# share of supports that are exact prefixes, bf16 body and fp32 head
PREFIXES = {
    "sglang_0.5.23_cpu_pytorch": 0.54,
    "sglang_0.5.21_h200_pytorch": 0.56,
    "sglang_0.5.21_h200_flashinfer": 0.64,
}


@dataclass(frozen=True, eq=False)
class Replayed:
    """A recorded set after one forward pass: hidden states serve every fault seeded in supports."""

    rollouts: list[Rollout]
    hidden: torch.Tensor  # [T, D]
    head: Head
    semantics: Semantics

    def audit(
        self,
        rollouts: list[Rollout] | None = None,
        semantics: Semantics | None = None,
        tokens: int = 256,
    ) -> Audit:
        rollouts = rollouts or self.rollouts
        faults = {r.rollout_id: find_faults(r, len(self.head.weight)) for r in rollouts}
        told = semantics or self.semantics
        auditor = Auditor(rollouts, tokens, faults, lambda r: told)
        (batch,) = pack(rollouts, 10**9)
        auditor.add(batch, self.hidden, self.head, self.logprobs(batch))
        return auditor.finish(self.head)

    def logprobs(self, batch: PackedBatch) -> torch.Tensor:
        scores = score_support(
            self.hidden,
            self.head.weight,
            batch.targets,
            batch.support_ids,
            batch.support_offsets,
            temperature=batch.temperature,
            return_support_logprobs=True,
            check=False,
        )
        assert scores.support_logprobs is not None
        return scores.support_logprobs


@pytest.fixture(scope="module")
def policy(smollm2_path: Path) -> Policy:
    return Policy.load(str(smollm2_path), dtype="bfloat16", device="cpu")


@pytest.fixture(scope="module", params=RECORDED)
def recorded_set(
    request: pytest.FixtureRequest, policy: Policy, tmp_path_factory: pytest.TempPathFactory
) -> Replayed:
    folder = tmp_path_factory.mktemp("run")
    file = write_lines(folder / "dump.jsonl", recorded_lines(request.param))
    import_sglang_jsonl(file, folder / "run", vocab_size=policy.vocab_size)
    rollouts = list(open_run(folder / "run"))
    hidden = [
        policy.hidden(batch.input_ids, batch.position_ids)[batch.hidden_rows]
        for batch in pack(rollouts, 4096)
    ]
    ties = "keep" if request.param.endswith("flashinfer") else "cut"
    semantics = Semantics("joint", ties)
    return Replayed(rollouts, torch.cat(hidden), Head(policy.weight), semantics)


def over_the_gate(audit: Audit) -> bool:
    share = audit.inconsistent_at_least
    assert share is not None
    return share > GatesConfig().audit_inconsistent


def test_clean_sets_pass(recorded_set: Replayed, request: pytest.FixtureRequest) -> None:
    got = recorded_set.audit(tokens=10_000).as_dict()
    wanted = PREFIXES[request.node.callspec.params["recorded_set"]]
    assert got["tokens"] == got["of"] > 950
    assert got["exact_prefixes"] == pytest.approx(wanted, abs=0.06)
    assert 0.28 < got["tolerance"]["logits"] < 0.45
    assert got["tolerance"]["source"] == "support_logprobs"
    assert got["inconsistent"] <= 0.006
    assert got["inconsistent_at_least"] < GatesConfig().audit_inconsistent / 2
    assert got["repair_fingerprints"] <= 1
    assert got["classes"]["robust"] > 100


def test_semantics_that_are_not_known_pass_too(recorded_set: Replayed) -> None:
    assert not over_the_gate(recorded_set.audit(semantics=Semantics(None, None)))


def test_the_tolerance_without_support_logprobs_is_near_the_measured_one(
    recorded_set: Replayed,
) -> None:
    measured = recorded_set.audit().tolerance
    bare = [replace(r, support_logprobs=None) for r in recorded_set.rollouts]
    fallback = recorded_set.audit(bare).tolerance
    assert fallback.source == "log_ratio"
    assert fallback.logits == pytest.approx(measured.logits, rel=0.3)


def resupported(r: Rollout, change: Callable[[int, list[int]], list[int]]) -> Rollout:
    """`r` with supports changed, and its logprobs over them as an engine would give them.

    An id that was not there has hardly any probability.
    """
    assert r.support_logprobs is not None
    rows, logprobs, drawn = [], [], []
    for t, (start, end) in enumerate(_spans(r)):
        known = dict(zip(r.support[t].tolist(), r.support_logprobs[start:end], strict=True))
        row = change(t, sorted(known, key=lambda i: -known[i]))
        lps = np.array([known.get(i, -12.0) for i in row])
        lps -= np.logaddexp.reduce(lps)
        rows.append(row)
        logprobs.append(lps)
        drawn.append(lps[row.index(r.output_ids[t])])
    return replace(
        r,
        support=Support.from_rows(rows),
        support_logprobs=np.concatenate(logprobs).astype(np.float32),
        sampling_logprobs=np.array(drawn, np.float32),
    )


def without_a_member(r: Rollout) -> Rollout:
    """The likeliest member that was not drawn is missing."""

    def change(t: int, ids: list[int]) -> list[int]:
        others = [i for i in ids if i != r.output_ids[t]]
        return [i for i in ids if i not in others[:1]]

    return resupported(r, change)


def _spans(r: Rollout) -> list[tuple[int, int]]:
    return list(zip(r.support.offsets[:-1].tolist(), r.support.offsets[1:].tolist(), strict=True))


def with_an_intruder(r: Rollout) -> Rollout:
    """An id that the trainer finds unlikely, the same everywhere."""
    added = resupported(r, lambda t, ids: ids if 7 in ids else [*ids, 7])
    return replace(added, support_logprobs=None)


FAULTS: dict[str, Callable[[Rollout], Rollout]] = {
    "top_p 0.95 recorded as 0.8": lambda r: replace(r, top_p=0.8 if r.top_p < 1 else r.top_p),
    "top_p 0.9 recorded as 0.99": lambda r: replace(r, top_p=0.99 if r.top_p < 1 else r.top_p),
    "top_k recorded as half": lambda r: replace(r, top_k=r.top_k // 2),
    "a member dropped": without_a_member,
    "an intruder added": with_an_intruder,
}


@pytest.mark.parametrize("name", FAULTS)
def test_seeded_faults_are_over_the_gate(recorded_set: Replayed, name: str) -> None:
    audit = recorded_set.audit([FAULTS[name](r) for r in recorded_set.rollouts])
    assert over_the_gate(audit)


def test_a_swapped_filter_order_is_over_the_gate(recorded_set: Replayed) -> None:
    """Where ties are cut: ids within the tolerance of the k-th can be made to tie with it, and then
    the mass of the top k is nearly that of all."""
    if recorded_set.semantics.tie_policy == "keep":
        pytest.skip("ties are kept")
    assert over_the_gate(recorded_set.audit(semantics=Semantics("sequential", "cut")))


def test_a_mask_rebuilt_with_a_tenth_of_top_k_and_patched_is_a_repair(
    recorded_set: Replayed,
) -> None:
    def patched(r: Rollout) -> Rollout:
        k = max(1, r.top_k // 10)

        def change(t: int, ids: list[int]) -> list[int]:
            y = int(r.output_ids[t])
            return ids[:k] if y in ids[:k] else [*ids[:k], y]

        return replace(resupported(r, change), top_k=k)

    audit = recorded_set.audit([patched(r) for r in recorded_set.rollouts], tokens=10_000)
    got = audit.as_dict()
    assert over_the_gate(audit)
    assert got["repair_fingerprints"] >= 0.8 * got["classes"]["inconsistent"] > 20

"""Padding is found in one pass; what it finds is what the definition, token by token, says."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from builders import make_rollout
from fault_injector import in_some, padded, without_support_logprobs
from hypothesis import given
from hypothesis import strategies as st
from sides import Array, play, scored, some_logits

from replay.diagnose import PADDING_GAP, _implausible, diagnose
from replay.evidence import Evidence
from rollout.record import Rollout
from rollout.record_faults import RecordJudge, explain_record
from rollout.support import Support

PAD = 59


def implausible_by_definition(e: Evidence, rollout: int, pad: int) -> int:
    """Tokens where `pad` is far below every other id, in a rollout where it mostly is."""
    gaps = []
    for t in np.flatnonzero(e.rollout == rollout):
        a, b = e.support.offsets[t : t + 2]
        values = dict(zip(e.support.ids[a:b].tolist(), e.replay_support[a:b], strict=True))
        if len(values) > 1 and pad in values:
            gaps.append(min(v for i, v in values.items() if i != pad) - values[pad])
    gaps = [gap for gap in gaps if np.isfinite(gap)]
    if not gaps or np.median(gaps) <= PADDING_GAP:
        return 0
    return sum(gap > PADDING_GAP for gap in gaps)


@st.composite
def evidence(draw: st.DrawFn) -> Evidence:
    """A few rollouts; some supports hold the pad, some of those give it next to nothing."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    far, held = draw(st.floats(0, 1)), draw(st.floats(0, 1))
    parts = []
    for n in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 8))
        z = generator.normal(0, 2, (length, 6))
        z[generator.random(length) < far, 5] = -20
        rows = [
            generator.permutation(5)[: generator.integers(1, 5)].tolist()
            + [5] * int(generator.random() < held)
            for _ in range(length)
        ]
        rollout = make_rollout(
            str(n),
            output_ids=np.array([row[0] for row in rows], np.int32),
            loss_mask=np.ones(length, np.int8),
            support=Support.from_rows(rows),
            sampling_logprobs=np.zeros(length, np.float32),
            full_logprobs=None,
            support_logprobs=None,
        )
        parts.append(scored(rollout, z))
    return Evidence.concatenate(parts)


@given(evidence())
def test_implausible_tokens_are_those_of_the_definition(e: Evidence) -> None:
    wanted = {r.rollout_id: implausible_by_definition(e, i, 5) for i, r in enumerate(e.rollouts)}
    got = _implausible(e.take(e.informative), 5)
    assert got == {name: n for name, n in wanted.items() if n}


@pytest.fixture(scope="module")
def logits() -> Array:
    return some_logits()


def padding_without_logprobs(logits: Array) -> tuple[list[Rollout], Evidence]:
    """Every third rollout is padded with an id that the policy finds absurd."""
    unlikely = logits.copy()
    unlikely[:, :, PAD] = -10
    rollouts, _ = play(unlikely, noise=0.0)
    faulty = in_some(padded(PAD, None), lambda i, r: i % 3 == 0)(rollouts)
    faulty = [without_support_logprobs(r) for r in faulty]
    return faulty, Evidence.concatenate(
        [scored(r, z) for r, z in zip(faulty, unlikely, strict=True)]
    )


def test_only_the_policy_shows_padding_without_logprobs(logits: Array) -> None:
    rollouts, e = padding_without_logprobs(logits)
    assert explain_record(rollouts) == []
    (got,) = diagnose(e, rollouts)
    assert (got.code, got.evidence) == ("support_padded", {"id": PAD, "tokens": 4 * 32})
    assert got.scope["first"] == ["0:0", "3:0", "6:0", "9:0"]


def test_time_grows_with_the_tokens_not_with_their_square() -> None:
    """One id in every support of ever more rollouts: eight times as many, less than 24 times."""

    def seconds(rollouts: int) -> float:
        generator = np.random.default_rng(0)
        z = np.log(generator.dirichlet(np.ones(8), (50, 1))[:, 0])
        rows = [[7, *range(100 + 8 * t, 107 + 8 * t)] for t in range(50)]
        one = make_rollout(
            output_ids=np.array([row[1] for row in rows], np.int32),
            loss_mask=np.ones(50, np.int8),
            support=Support.from_rows(rows),
            sampling_logprobs=z[:, 1].astype(np.float32),
            full_logprobs=None,
            support_logprobs=z.ravel().astype(np.float32),
            weight_versions=(),
        )
        many = [replace(one, prompt_id=f"{i}", rollout_id=f"{i}:0") for i in range(rollouts)]
        policy = np.zeros((50, 600))
        part = scored(one, policy)
        e = Evidence.concatenate([replace(part, rollouts=(r,)) for r in many])
        start = time.process_time()
        judge = RecordJudge()
        for rollout in many:
            judge.add(rollout)
        assert judge.whole_file(lambda pad: _implausible(e, pad)) == []
        return time.process_time() - start

    seconds(20)
    assert seconds(1600) < 24 * seconds(200)

"""Evidence is held in 32 bits and judged in 64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from builders import make_rollout
from sides import LENGTH, ROLLOUTS, VOCABULARY, sides

from replay.evidence import ENTRY_FIELDS, TOKEN_FIELDS, Evidence, contexts
from replay.evidence_store import EvidenceStore


@pytest.fixture(scope="module")
def parts() -> list[Evidence]:
    """A batch of each rollout, with scores in float32 as a policy gives them."""
    generator = np.random.default_rng(0)
    logits = generator.normal(0, 2, (ROLLOUTS, LENGTH, VOCABULARY))
    ids = [[sorted({1, 2 + t % 5, 9}) for t in range(LENGTH)] for _ in range(ROLLOUTS)]
    outputs = np.ones((ROLLOUTS, LENGTH), np.int32)
    found = []
    for n in range(ROLLOUTS):
        one = slice(n, n + 1)
        _, e = sides(logits[one], logits[one] + 0.1, ids[one], outputs[one])
        scores = ("replay_support", "replay_full", "logsumexp", "noise")
        found.append(replace(e, **{name: getattr(e, name).astype(np.float32) for name in scores}))
    return found


def test_contexts_are_equal_after_the_same_ids_alone() -> None:
    one = make_rollout(prompt_ids=np.array([1, 3], np.int32))
    diverges = make_rollout(output_ids=np.array([9, 7, 2], np.int32))
    longer = make_rollout(prompt_ids=np.array([1, 3, 9], np.int32))
    swapped = make_rollout(prompt_ids=np.array([3, 1], np.int32))
    assert one.output_ids.tolist() == [9, 8, 2]
    np.testing.assert_array_equal(contexts(one)[:2], contexts(diverges)[:2])
    assert contexts(one)[2] != contexts(diverges)[2]
    assert contexts(longer)[0] == contexts(one)[1], "a model does not know where a prompt ends"
    assert not np.isin(contexts(swapped), contexts(one)).any()
    assert len(set(contexts(one))) == 3


def test_a_store_holds_what_joined_batches_do_in_32_bits(parts: list[Evidence]) -> None:
    joined = Evidence.concatenate(parts)
    store = EvidenceStore(joined.rollouts)
    for part in parts:
        store.add(part)
    whole = store.whole()
    assert whole is not None and whole.rollouts == joined.rollouts
    for name in (*TOKEN_FIELDS, *ENTRY_FIELDS):
        held, wanted = getattr(whole, name), getattr(joined, name)
        np.testing.assert_array_equal(held, wanted)
        assert held.dtype.itemsize == 4, name
    np.testing.assert_array_equal(whole.support.ids, joined.support.ids)
    np.testing.assert_array_equal(whole.support.offsets, joined.support.offsets)


def test_batches_that_lack_tokens_leave_no_gap(parts: list[Evidence]) -> None:
    keep = np.arange(LENGTH) % 3 > 0
    store = EvidenceStore([p.rollouts[0] for p in parts])
    for part in parts:
        store.add(part.held(keep))
    whole = store.whole()
    assert whole is not None
    np.testing.assert_array_equal(whole.position, np.tile(np.flatnonzero(keep), ROLLOUTS))
    assert len(whole.support.ids) == len(whole.replay_support) == whole.support.counts.sum()


def test_a_store_without_a_batch_is_none(parts: list[Evidence]) -> None:
    assert EvidenceStore(parts[0].rollouts).whole() is None


def test_a_part_that_is_judged_is_in_64_bits(parts: list[Evidence]) -> None:
    taken = parts[0].take(np.ones(LENGTH, bool))
    for name in (*TOKEN_FIELDS, *ENTRY_FIELDS):
        assert getattr(taken, name).dtype.itemsize == 8, name


def test_what_is_computed_does_not_depend_on_how_it_is_held(parts: list[Evidence]) -> None:
    held, taken = parts[0], parts[0].take(np.ones(LENGTH, bool))
    for name in ("as_recorded", "weights"):
        np.testing.assert_array_equal(getattr(held, name), getattr(taken, name), err_msg=name)

"""A run directory written by release 0.1.0: later releases must read it to the same values."""

from __future__ import annotations

import numpy as np
from builders import DATA, assert_same_rollout

from rollout.reader import open_run
from rollout.record import Rollout, WeightSpan
from rollout.support import Support


def test_golden_shard_reads_to_literal_values() -> None:
    full = Rollout(
        rollout_id="golden:0",
        prompt_id="golden",
        sample_index=0,
        prompt_ids=np.array([1, 3], np.int32),
        output_ids=np.array([9, 8, 2], np.int32),
        loss_mask=np.array([1, 0, 1], np.int8),
        sampling_logprobs=np.array([-1.3862944, 0, 0], np.float32),
        support=Support(np.array([5, 9, 2], np.int32), np.array([0, 2, 2, 3], np.int64)),
        full_logprobs=np.array([-1.609438, 0, -0.105360545], np.float32),
        support_logprobs=np.array([-0.2876821, -1.3862944, 0], np.float32),
        temperature=0.5,
        top_p=0.875,
        top_k=2,
        min_p=0.0,
        max_new_tokens=3,
        seed=11,
        sampling_params='{"temperature":0.5}',
        finish_reason="stop",
        stop_match="2",
        weight_versions=(WeightSpan("v1", 0, 3),),
        engine_meta='{"engine":"test"}',
        prompt_text="why",
        output_text="because",
        reward=0.5,
        created_us=1_700_000_000_000_000,
        latency_ms=2.5,
        attempts=1,
        extra='{"note":"é"}',
    )
    bare = Rollout(
        rollout_id="golden:1",
        prompt_id="golden",
        sample_index=1,
        prompt_ids=np.array([1, 3], np.int32),
        output_ids=np.array([9, 8, 2], np.int32),
        loss_mask=np.array([1, 0, 1], np.int8),
        sampling_logprobs=np.array([-1.3862944, 0, 0], np.float32),
        support=Support(np.array([5, 9, 2], np.int32), np.array([0, 2, 2, 3], np.int64)),
        full_logprobs=None,
        support_logprobs=None,
        temperature=0.5,
        top_p=0.875,
        top_k=2,
        min_p=0.0,
        max_new_tokens=3,
        seed=None,
        sampling_params='{"temperature":0.5}',
        finish_reason="stop",
        stop_match=None,
        weight_versions=(WeightSpan("v1", 0, 3),),
        engine_meta='{"engine":"test"}',
        prompt_text=None,
        output_text=None,
        reward=None,
        created_us=1_700_000_000_000_000,
        latency_ms=2.5,
        attempts=1,
        extra="{}",
    )
    for got, wanted in zip(open_run(DATA / "golden_run"), [full, bare], strict=True):
        assert_same_rollout(got, wanted)

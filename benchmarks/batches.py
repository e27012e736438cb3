"""How fast a run becomes host tensors: tokens/s of a pass, next to a memcpy of the same bytes.

    python benchmarks/batches.py [--tokens 4000000] [--reply-tokens 1024] [--max-tokens 32768]

Rollouts have supports of the sizes that were measured in the field (46 % singletons, mean 8, p99
83, cap 512) and log-normal lengths around `--reply-tokens`. They are written as `rollout collect`
writes them and are then in the page cache. JSON on stdout: seconds to open the run (its hashes) and
to check it, both once, and for each way of passing over it output tokens/s of wall clock and of
processor time (all threads), medians of 7 passes. The floor copies the tensors of the same batches
into new ones, between the passes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from support_inputs import CAP, LOG_MEAN, LOG_SIGMA, SINGLETON_SHARE

from replay import Batches, PackedBatch, batches
from rollout.config import ShardsConfig
from rollout.reader import open_run
from rollout.record import Rollout
from rollout.support import Support
from rollout.writer import RunWriter

VOCAB_SIZE = 151_936
PROMPT_TOKENS = 50
LENGTH_SIGMA = 0.5
PASSES = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4_000_000)
    parser.add_argument("--reply-tokens", type=int, default=1024, help="median of a rollout")
    parser.add_argument("--max-tokens", type=int, default=32_768, help="of a batch")
    parser.add_argument("--compression", choices=["none", "zstd", "lz4"], default="none")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder), options)
        print(json.dumps(measure(Path(folder), options.max_tokens) | vars(options), indent=1))


def write_run(path: Path, options: argparse.Namespace) -> None:
    generator = np.random.default_rng(0)
    left, number = options.tokens, 0
    with RunWriter(path, {}, shards=ShardsConfig(compression=options.compression)) as writer:
        while left > 0:
            spread = np.exp(LENGTH_SIGMA * generator.standard_normal())
            length = max(1, round(options.reply_tokens * spread))
            writer.write(make_rollout(number, length, generator))
            left, number = left - length, number + 1


def make_rollout(number: int, length: int, generator: np.random.Generator) -> Rollout:
    sizes = 2 + np.exp(LOG_MEAN + LOG_SIGMA * generator.standard_normal(length))
    counts = np.where(generator.random(length) < SINGLETON_SHARE, 1, np.minimum(sizes, CAP))
    support = Support.from_counts(
        np.zeros(int(counts.astype(int).sum()), np.int32), counts.astype(int)
    )
    # ascending ids from a random start: no id twice in a support
    starts = generator.integers(0, VOCAB_SIZE - CAP, length)
    ids = starts[support.rows] + np.arange(len(support.ids)) - support.offsets[:-1][support.rows]
    support = Support(ids.astype(np.int32), support.offsets)
    logprobs = np.where(support.counts == 1, 0, -generator.random(length)).astype(np.float32)
    return Rollout(
        rollout_id=f"{number}:0",
        prompt_id=str(number),
        sample_index=0,
        prompt_ids=generator.integers(0, VOCAB_SIZE, PROMPT_TOKENS, dtype=np.int32),
        output_ids=starts.astype(np.int32),
        loss_mask=np.ones(length, np.int8),
        sampling_logprobs=logprobs,
        support=support,
        full_logprobs=logprobs - np.float32(0.1),
        support_logprobs=None,
        temperature=0.7,
        top_p=0.97,
        top_k=CAP,
        min_p=0.0,
        max_new_tokens=length,
        seed=number,
        sampling_params="{}",
        finish_reason="stop",
        stop_match=None,
        weight_versions=(),
        engine_meta="{}",
        prompt_text="word " * PROMPT_TOKENS,
        output_text="word " * length,
    )


def measure(path: Path, max_tokens: int) -> dict[str, Any]:
    run, open_s = timed(lambda: open_run(path))
    made, check_s = timed(lambda: batches(run, max_tokens))
    kept = list(made)
    tokens = sum(len(batch.targets) for batch in kept)
    size = sum(t.nbytes for batch in kept for t in tensors(batch))
    ways = {
        "stored": made,
        "shuffled": batches(run, max_tokens, shuffle_seed=0),
        "shuffled, no thread": batches(run, max_tokens, shuffle_seed=0, prefetch=0),
        "shuffled, padded": batches(run, max_tokens, shuffle_seed=0, layout="padded"),
    }
    calls = {"memcpy": partial(copy, kept)} | {k: partial(drain, way) for k, way in ways.items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(PASSES):
        for name, call in calls.items():
            cpu_s = time.process_time()
            wall_s = timed(call)[1]
            seconds[name].append((wall_s, time.process_time() - cpu_s))
    floor = np.median(seconds["memcpy"], axis=0)
    return {
        "rollouts": len(run),
        "output_tokens": tokens,
        "batches": len(kept),
        "bytes_per_token": round(size / tokens, 1),
        "threads": torch.get_num_threads(),
        "open_s": round(open_s, 3),
        "check_s": round(check_s, 3),
        "check_us_per_rollout": round(1e6 * check_s / len(run), 1),
        "passes": {name: summary(times, tokens, floor) for name, times in seconds.items()},
    }


def summary(
    seconds: list[tuple[float, float]], tokens: int, floor: NDArray[np.float64]
) -> dict[str, float]:
    """`seconds` and the floor are pairs: of wall clock, of processor time."""
    wall_s, cpu_s = np.median(seconds, axis=0)
    return {
        "tokens_per_s": round(tokens / wall_s),
        "slowest_tokens_per_s": round(tokens / max(seconds)[0]),
        "fastest_tokens_per_s": round(tokens / min(seconds)[0]),
        "tokens_per_cpu_s": round(tokens / cpu_s),
        "times_memcpy": round(wall_s / floor[0], 2),
        "cpu_times_memcpy": round(cpu_s / floor[1], 2),
    }


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    result = call()
    return result, time.perf_counter() - began


def drain(made: Batches) -> None:
    for _ in made:
        pass


def copy(kept: list[PackedBatch]) -> None:
    for batch in kept:
        for tensor in tensors(batch):
            torch.empty_like(tensor).copy_(tensor)


def tensors(batch: PackedBatch) -> list[torch.Tensor]:
    return [value for value in vars(batch).values() if torch.is_tensor(value)]


if __name__ == "__main__":
    main()

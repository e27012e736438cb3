"""Memory of a replay beyond its rollouts and its policy, per million tokens.

python benchmarks/replay_memory.py                  # tests/tiny_model, two runs

Each size runs in a process of its own, as a peak does not fall. The difference of two sizes leaves
out what does not grow: the model, one batch, the libraries. Rollouts are made up, with the support
sizes of benchmarks/support_inputs.py (mean 8), every column recorded. Writes one JSON object.
"""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from support_inputs import real_sizes

from replay import Policy, ReplayConfig, verify
from rollout.record import Rollout
from rollout.support import Support

MODEL = Path(__file__).parent.parent / "tests" / "tiny_model" / "model"
LENGTH = 500
MB = 1e6


def made_up(number: int, vocab_size: int, generator: np.random.Generator) -> Rollout:
    """Rollout `number`: neighbouring ids as supports, random probabilities."""
    counts = real_sizes(LENGTH, torch.Generator().manual_seed(number)).numpy()
    starts = np.cumsum(counts) - counts
    within = np.arange(counts.sum()) - np.repeat(starts, counts)
    first = np.repeat(generator.integers(0, vocab_size, LENGTH), counts)
    ids = ((first + within) % vocab_size).astype(np.int32)
    weights = generator.exponential(1, len(ids)) + 1e-3
    logprobs = np.log(weights / np.repeat(np.add.reduceat(weights, starts), counts))
    drawn = starts + (generator.random(LENGTH) * counts).astype(np.int64)
    sampling = np.where(counts == 1, 0, logprobs[drawn]).astype(np.float32)
    return Rollout(
        rollout_id=f"{number}:0",
        prompt_id=str(number),
        sample_index=0,
        prompt_ids=np.array([1, 2, 3], np.int32),
        output_ids=ids[drawn],
        loss_mask=np.ones(LENGTH, np.int8),
        sampling_logprobs=sampling,
        support=Support.from_counts(ids, counts),
        full_logprobs=sampling - np.float32(0.1),
        support_logprobs=np.where(np.repeat(counts, counts) == 1, 0, logprobs).astype(np.float32),
        temperature=1.0,
        top_p=1.0,
        top_k=512,
        min_p=0.0,
        max_new_tokens=LENGTH,
        seed=None,
        sampling_params="{}",
        finish_reason="length",
        stop_match=None,
        weight_versions=(),
        engine_meta="{}",
    )


def measure(tokens: int) -> dict[str, float]:
    """Bytes that a replay of so many tokens adds at its peak; the rollouts are there before."""
    policy = Policy.load(str(MODEL), dtype="float32", device="cpu")
    generator = np.random.default_rng(0)
    rollouts = [made_up(i, policy.vocab_size, generator) for i in range(tokens // LENGTH)]
    entries = sum(len(r.support.ids) for r in rollouts)
    before = resident_bytes()
    verify(rollouts, policy, ReplayConfig(dtype="float32", device="cpu", max_tokens=1024))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"tokens": tokens, "ids_per_token": entries / tokens, "bytes": peak - before}


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs=2, default=(200_000, 600_000))
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one)))
        return
    command = [sys.executable, __file__, "--one"]
    small, large = (
        json.loads(subprocess.run([*command, str(n)], check=True, stdout=subprocess.PIPE).stdout)
        for n in args.tokens
    )
    more = (large["bytes"] - small["bytes"]) / (large["tokens"] - small["tokens"])
    result = {"mb_per_million_tokens": round(more * 1e6 / MB), "runs": [small, large]}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

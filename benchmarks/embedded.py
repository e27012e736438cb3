"""Throughput of the embedded engine next to `model.generate`, same model, same batch, alternating.

python benchmarks/embedded.py --model PATH --batch-size 16 --new-tokens 64

Writes one JSON object to stdout: tokens per second of both (median over rounds) and their ratio.
Both sides get one prompt length, `top_k` and `top_p`, and no stops; generate does not have to
return supports.
"""

import argparse
import asyncio
import json
import statistics
import time

import numpy as np
import torch
import transformers

from rollout.config import EmbeddedConfig
from rollout.engines.embedded import EmbeddedEngine
from rollout.engines.hf import load_model
from rollout.sampling import SamplingParams


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=50)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def time_generate(model: transformers.PreTrainedModel, prompts: np.ndarray, args) -> float:
    """Seconds for one batch through transformers' own sampling loop."""
    input_ids = torch.from_numpy(prompts).long().to(model.device)
    began = time.perf_counter()
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        do_sample=True,
        top_k=args.top_k,
        top_p=args.top_p,
        min_new_tokens=args.new_tokens,
        max_new_tokens=args.new_tokens,
    )
    output.cpu()
    elapsed_s = time.perf_counter() - began
    assert output.shape == (args.batch_size, args.prompt_tokens + args.new_tokens)
    return elapsed_s


async def time_engine(engine: EmbeddedEngine, prompts: np.ndarray, args, round_: int) -> float:
    """Seconds for the same batch through the engine, from calls to completions."""
    settings = [
        SamplingParams(
            top_k=args.top_k,
            top_p=args.top_p,
            max_new_tokens=args.new_tokens,
            ignore_eos=True,
            sampling_seed=round_ * args.batch_size + row,
        )
        for row in range(args.batch_size)
    ]
    began = time.perf_counter()
    completions = await asyncio.gather(*map(engine.generate, prompts, settings))
    elapsed_s = time.perf_counter() - began
    assert all(len(completion.output_ids) == args.new_tokens for completion in completions)
    return elapsed_s


async def measure(args) -> dict[str, object]:
    model = load_model(args.model, dtype=args.dtype, device=args.device, trust_remote_code=False)
    config = EmbeddedConfig(dtype=args.dtype, device=args.device, batch_size=args.batch_size)
    vocab_size = model.config.get_text_config().vocab_size
    rng = np.random.default_rng(0)
    ours, theirs = [], []
    async with EmbeddedEngine(args.model, config) as engine:
        # round 0 warms both up
        for round_ in range(args.rounds + 1):
            shape = (args.batch_size, args.prompt_tokens)
            prompts = rng.integers(vocab_size, size=shape, dtype=np.int32)
            # off the event loop's thread, as the engine's own work is
            theirs.append(await asyncio.to_thread(time_generate, model, prompts, args))
            ours.append(await time_engine(engine, prompts, args, round_))
    tokens = args.batch_size * args.new_tokens
    ratios = [t / o for t, o in zip(theirs[1:], ours[1:], strict=True)]
    return {
        "model": args.model,
        "dtype": args.dtype,
        "device": args.device,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "transformers": transformers.__version__,
        "batch_size": args.batch_size,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "rounds": args.rounds,
        "engine_tokens_per_s": round(tokens / statistics.median(ours[1:]), 1),
        "generate_tokens_per_s": round(tokens / statistics.median(theirs[1:]), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
    }


def main() -> None:
    args = parse_args()
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    print(json.dumps(asyncio.run(measure(args))))


if __name__ == "__main__":
    main()

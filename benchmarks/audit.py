"""Time of the support audit: of a recorded set on the CPU, or beside its matmul on a GPU.

python benchmarks/audit.py --model PATH                          # 1,000 tokens of SmolLM2, CPU
python benchmarks/audit.py --shape 4096x151936 --tokens 512      # on a CUDA device

Writes one JSON object to stdout. The first form times a replay of a recorded set without the audit,
with its default sample and with every token. The second times `margins`, which is all that the
audit does to a batch, and the matmul with fp32 results that it cannot do without; no forward pass.
Supports there are the likeliest ids, as many as benchmarks/support_inputs.py says.
"""

import argparse
import gzip
import json
import tempfile
import time
from pathlib import Path

import torch
from support_inputs import LOG_MEAN, LOG_SIGMA, RECORDED, SINGLETON_SHARE
from support_timing import peak_bytes, times

from replay.config import ReplayConfig
from replay.dense import product
from replay.facts import TILE_ELEMENTS, Head, Supports, gather_facts
from replay.margins import JOINT, SEQUENTIAL, Filters, margins
from replay.policy import Policy
from replay.verify import verify
from rollout.adapters.sglang_jsonl import import_sglang_jsonl
from rollout.reader import open_run

TOP_K = 512


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shape", default="4096x151936", help="hidden size x vocabulary")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--order", choices=["joint", "sequential"], default="joint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def replay_recorded(args: argparse.Namespace) -> dict[str, object]:
    """Seconds of wall clock for each number of audited tokens; the model is loaded before."""
    policy = Policy.load(args.model, dtype=args.dtype, device=args.device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rollouts.jsonl"
        file.write_bytes(gzip.decompress((RECORDED / "rollouts.jsonl.gz").read_bytes()))
        import_sglang_jsonl(file, Path(folder) / "run", vocab_size=policy.vocab_size)
        rollouts = list(open_run(Path(folder) / "run"))
    seconds: dict[int, float] = {}
    for audited in (0, 512, 1_000_000, 0, 512, 1_000_000):
        config = ReplayConfig(dtype=args.dtype, device=args.device, audit_tokens=audited)
        began = time.perf_counter()
        tokens = len(verify(rollouts, policy, config).tokens)
        elapsed_s = time.perf_counter() - began
        seconds[audited] = min(seconds.get(audited, elapsed_s), elapsed_s)
    return {
        "tokens": tokens,
        "threads": torch.get_num_threads(),
        "replay_s": seconds[0],
        "audit_512_s": seconds[512] - seconds[0],
        "audit_all_s": seconds[1_000_000] - seconds[0],
    }


def make_inputs(args: argparse.Namespace) -> tuple[torch.Tensor, Head, Supports, Filters]:
    dim, vocab_size = (int(n) for n in args.shape.split("x"))
    generator = torch.Generator(args.device).manual_seed(0)
    options = {"generator": generator, "device": args.device, "dtype": torch.float32}
    hidden = torch.randn(args.tokens, dim, **options).bfloat16()
    weight = (torch.randn(vocab_size, dim, **options) * (3 / dim**0.5)).bfloat16()
    single = torch.rand(args.tokens, **options) < SINGLETON_SHARE
    sizes = 2 + (LOG_MEAN + LOG_SIGMA * torch.randn(args.tokens, **options)).exp()
    counts = torch.where(single, 1, sizes.clamp(max=TOP_K).long())
    best = product(hidden, weight.T, torch.float32).topk(TOP_K, dim=1).indices
    ids = best[torch.arange(TOP_K, device=args.device) < counts[:, None]]
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    supports = Supports(ids, offsets, torch.ones(args.tokens, device=args.device))
    supports = supports.to(torch.device(args.device))  # as the auditor does: the width is known

    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((args.tokens,), value, dtype=dtype, device=args.device)

    filters = Filters(
        top_k=column(TOP_K, torch.int64),
        top_p=column(0.97, torch.float64),
        min_p=column(0.0, torch.float64),
        order=column(JOINT if args.order == "joint" else SEQUENTIAL, torch.int8),
        keeps_ties=column(True, torch.bool),
        is_partial=column(False, torch.bool),
    )
    return hidden, Head(weight), supports, filters


def audit_beside_matmul(args: argparse.Namespace) -> dict[str, object]:
    hidden, head, supports, filters = make_inputs(args)
    width = max(1, TILE_ELEMENTS // min(args.tokens, 4096))

    def matmul(_: int) -> None:
        for first in range(0, len(head.weight), width):
            product(hidden, head.weight[first : first + width].T, torch.float32)

    def audit(_: int) -> None:
        margins(hidden, head, supports, filters)

    def facts(_: int) -> None:
        gather_facts(hidden, head, supports)

    device, figures = torch.device(args.device), {}
    for name, call in (("matmul", matmul), ("facts", facts), ("audit", audit)):
        call(0)
        figures[name] = times(call, device)
    more = figures["audit"]["time_ms"] - figures["matmul"]["time_ms"]
    return {
        "shape": args.shape,
        "tokens": args.tokens,
        "order": args.order,
        "support_ids": len(supports.ids),
        **figures,
        "beyond_matmul_ms": more,
        "peak_bytes": peak_bytes(lambda: audit(0), device),
    }


if __name__ == "__main__":
    arguments = parse_args()
    measure = replay_recorded if arguments.model else audit_beside_matmul
    print(json.dumps(measure(arguments), indent=1))

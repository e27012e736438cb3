"""Error rates of `diagnose`: clean runs that are accused, faults that are named, by size.

python benchmarks/diagnosis.py clean --model PATH --resamples 200    recorded sets, by rollout
python benchmarks/diagnosis.py fresh --model PATH --runs 60          new runs, embedded, bf16
python benchmarks/diagnosis.py power --model PATH                    fault size against tokens
python benchmarks/diagnosis.py groups RUN… --model PATH              whole prompts of your own runs

Prints one JSON object per line; docs/diagnosis.md quotes them. power_plot.py draws those of power.
"""

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from builders import RECORDED, recorded_rollouts
from fault_injector import (
    declared_temperature,
    every,
    in_some,
    noisy_body,
    on_ids,
    on_seen,
    softcapped,
    without_support_logprobs,
)
from scorer import Scorer

from replay import Policy
from replay.diagnose import diagnose
from replay.evidence import Evidence
from rollout import open_run
from rollout.config import EmbeddedConfig
from rollout.engines.embedded import EmbeddedEngine
from rollout.prompts import Prompt, load_tokenizer, tokenise_text
from rollout.record import Rollout
from rollout.sampling import SamplingParams, canonical_json
from rollout.self_check import check_engine

SETTINGS = (  # temperature, top_k, top_p
    (1.0, 50, 0.95),
    (0.7, 20, 0.9),
    (1.3, 200, 1.0),
)


def upper_bound(bad: int, total: int) -> float:
    """Of a share, with 95 % confidence, one-sided (Clopper and Pearson)."""
    low, high = bad / total, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        # the chance of `bad` or fewer
        log_terms = [
            sum(np.log((total - j) / (j + 1)) for j in range(k))
            + k * np.log(middle)
            + (total - k) * np.log1p(-middle)
            for k in range(bad + 1)
        ]
        low, high = (middle, high) if np.exp(log_terms).sum() > 0.05 else (low, middle)
    return high


def codes(evidence: Evidence, rollouts: list[Rollout]) -> str:
    """The first code; what accuses is shown on stderr."""
    best = diagnose(evidence, rollouts, check_engine(rollouts))[0]
    if best.code != "clean":
        print(best.sentence, best.evidence, file=sys.stderr, flush=True)
    return best.code


def tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def both_ways(rollouts: list[Rollout], scorer: Scorer) -> list[list[tuple[Rollout, Evidence]]]:
    """Each rollout with its evidence, first as it is, then without `support_logprobs`."""
    ways = rollouts, [without_support_logprobs(r) for r in rollouts]
    return [[(r, scorer.evidence([r])) for r in way] for way in ways]


def clean(args: argparse.Namespace) -> None:
    """Whole rollouts of each recorded set, drawn with replacement."""
    generator, bad, total = np.random.default_rng(0), 0, 0
    for dtype in args.dtypes.split(","):
        scorer = Scorer(Policy.load(args.model, dtype=dtype, device="cpu", packed=False))
        for name in RECORDED:
            rollouts = recorded_rollouts(name)
            sets = both_ways(rollouts, scorer)
            found: Counter[str] = Counter()
            for i in range(args.resamples):
                drawn = generator.integers(0, len(rollouts), len(rollouts))
                mine, theirs = zip(*(sets[i % 2][j] for j in drawn), strict=True)
                found[codes(Evidence.concatenate(theirs), list(mine))] += 1
            tell(set=name, dtype=dtype, found=found)
            bad, total = bad + args.resamples - found["clean"], total + args.resamples
    tell(accused=bad, of=total, upper_bound=round(upper_bound(bad, total), 4))


def groups(args: argparse.Namespace) -> None:
    """So many prompts of the runs, each with all its rollouts: steps of a training loop.

    Under the weights that sampled the runs, how often a step is accused; under others, how often
    `other_weights` is found.
    """
    rollouts = [
        replace(r, prompt_id=f"{i}.{r.prompt_id}", rollout_id=f"{i}.{r.rollout_id}")
        for i, path in enumerate(args.runs_of)
        for r in open_run(Path(path))
    ]
    for dtype in args.dtypes.split(","):
        scorer = Scorer(Policy.load(args.model, dtype=dtype, device="cpu", packed=False))
        sets = both_ways(rollouts, scorer)
        of_prompt: dict[str, list[int]] = {}
        for i, rollout in enumerate(rollouts):
            of_prompt.setdefault(rollout.prompt_id, []).append(i)
        log_ratio = np.concatenate([e.replay - e.sampling for _, e in sets[0]])
        apart = round(float(np.abs(log_ratio).mean()), 4)
        for prompts in map(int, args.prompts.split(",")):
            generator, found = np.random.default_rng(0), Counter[str]()
            for i in range(args.resamples):
                names = generator.choice(list(of_prompt), prompts, replace=False)
                drawn = [sets[i % 2][j] for name in names for j in of_prompt[name]]
                mine, theirs = zip(*drawn, strict=True)
                found[codes(Evidence.concatenate(theirs), list(mine))] += 1
            tell(dtype=dtype, log_ratio_abs_mean=apart, prompts=prompts, found=found)


async def fresh(args: argparse.Namespace) -> None:
    """Runs that the embedded engine makes in bf16 now; replayed in bf16 with an fp32 head."""
    tokenizer = load_tokenizer(args.model)
    texts = [
        json.loads(line)["prompt"]
        for line in (Path(__file__).parent.parent / "configs" / "prompts.jsonl").open()
    ]
    prompts = [tokenise_text(text, tokenizer, str(i)) for i, text in enumerate(texts)]
    scorer = Scorer(Policy.load(args.model, dtype="bfloat16", device="cpu", packed=False))
    config = EmbeddedConfig(dtype="bfloat16", device="cpu", batch_size=args.rollouts)
    found: Counter[str] = Counter()
    async with EmbeddedEngine(args.model, config) as engine:
        for run in range(args.runs):
            start = run * args.rollouts
            mine = [prompts[(start + i) % len(prompts)] for i in range(args.rollouts)]
            rollouts = await _collect(engine, mine, run, args.new_tokens)
            evidence = scorer.evidence(rollouts)
            scorer.forget()
            found[codes(evidence, rollouts)] += 1
            kept = evidence.take(evidence.informative)
            over = round(float(kept.as_recorded.sum() / kept.noise.sum()), 2)
            bad = run + 1 - found["clean"]
            tell(
                run=run,
                tokens=len(kept),
                over_noise_floor=over,
                found=found,
                accused=bad,
                upper_bound=round(upper_bound(bad, run + 1), 4),
            )


async def _collect(
    engine: EmbeddedEngine, prompts: list[Prompt], run: int, new_tokens: int
) -> list[Rollout]:
    temperature, top_k, top_p = SETTINGS[run % len(SETTINGS)]
    params = [
        SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            max_new_tokens=new_tokens,
            sampling_seed=1000 * run + i,
        )
        for i in range(len(prompts))
    ]
    done = await asyncio.gather(*map(engine.generate, prompts, params))
    return [
        completion.to_rollout(
            prompt_id=prompt.prompt_id,
            sample_index=run,
            prompt_ids=prompt.ids,
            prompt_text=prompt.text,
            params=p,
            sampling_params=canonical_json({"temperature": temperature}),
        )
        for completion, prompt, p in zip(done, prompts, params, strict=True)
    ]


Change = Callable[[Policy], Policy]
FAULTS: tuple[tuple[str, str, Callable[[list[Rollout]], list[Rollout]], Change | None], ...] = (
    # code, size, on the record, on the policy; the smallest of a code first
    ("temperature_other", "3 %", in_some(declared_temperature(1.03)), None),
    ("temperature_other", "5 %", in_some(declared_temperature(1.05)), None),
    ("temperature_other", "10 %", in_some(declared_temperature(1.1)), None),
    ("temperature_other in 1 of 10", "10 %", in_some(declared_temperature(1.1), every(10)), None),
    ("temperature_other in 1 of 10", "20 %", in_some(declared_temperature(1.2), every(10)), None),
    ("bias", "0.5 on one id", in_some(on_ids({198: 0.5})), None),
    ("bias", "1 on one id", in_some(on_ids({198: 1.0})), None),
    ("penalty", "0.2", in_some(on_seen(-0.2)), None),
    ("penalty", "0.5", in_some(on_seen(-0.5)), None),
    ("other_weights", "body 1 %", list, noisy_body(0.01)),
    ("other_weights", "body 2 %", list, noisy_body(0.02)),
    ("softcap", "100", list, softcapped(100.0)),
    ("softcap", "50", list, softcapped(50.0)),
)
WITHOUT = ("temperature_other",)  # also tried without support_logprobs


def power(args: argparse.Namespace) -> None:
    """How often a fault is named, first and rightly, from so many tokens of recorded sets."""
    base = Scorer(Policy.load(args.model, dtype="bfloat16", device="cpu", packed=False))
    generator = np.random.default_rng(0)
    everyone = [r for name in RECORDED for r in recorded_rollouts(name)]
    # the sets share their rollout ids
    everyone = [replace(r, prompt_id=f"{i}", rollout_id=f"{i}:0") for i, r in enumerate(everyone)]
    for panel, size, inject, change in FAULTS:
        code = panel.split()[0]
        scorer = base if change is None else base.with_policy(change(base.policy))
        for support in (True, False) if panel in WITHOUT else (True,):
            named = {}
            for tokens in map(int, args.tokens.split(",")):
                hits = 0
                for _ in range(args.draws):
                    faulty = inject(_drawn(everyone, tokens, generator))
                    if not support:
                        faulty = [without_support_logprobs(r) for r in faulty]
                    hits += codes(scorer.evidence(faulty), faulty) == code
                named[tokens] = hits / args.draws
            tell(code=panel, fault=size, support_logprobs=support, named=named)


def _drawn(rollouts: list[Rollout], tokens: int, generator: np.random.Generator) -> list[Rollout]:
    """Rollouts at random until they have so many output tokens."""
    drawn: list[Rollout] = []
    for i in generator.permutation(len(rollouts)):
        if sum(r.num_output_tokens for r in drawn) >= tokens:
            break
        drawn.append(rollouts[i])
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["clean", "fresh", "power", "groups"])
    parser.add_argument("runs_of", nargs="*", metavar="RUN")
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--resamples", type=int, default=200)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--tokens", default="50,100,300")
    parser.add_argument("--prompts", default="8,16,32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.what == "fresh":
        asyncio.run(fresh(args))
    else:
        {"clean": clean, "power": power, "groups": groups}[args.what](args)


if __name__ == "__main__":
    main()

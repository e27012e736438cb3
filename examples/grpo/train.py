"""GRPO on a real SGLang server: what recording the supports is worth.

    python examples/grpo/train.py --url http://127.0.0.1:30000 --model MODEL --arm supports

A step is: give the server the weights, sample, check that both sides agree, update. Three arms
differ in how they sample, and over what the trainer normalises:

    supports      truncated sampling; logprobs over the recorded supports
    full          truncated sampling; logprobs over the whole vocabulary: the usual mistake
    untruncated   sampling from the whole vocabulary; logprobs over it

OUT gets a line per step in metrics.jsonl, and run directories step-000 and so on, which `rollout
replay` takes as well. The server reads OUT/checkpoint, so it runs on this machine. The same command
goes on behind the last step that was saved.
"""

import asyncio
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learner import Learner
from tasks import Sums
from transformers import HfArgumentParser
from untruncated import pack, sample

import replay
import rollout
from replay import PackedBatch, losses
from rollout.prompts import load_tokenizer

CLIP = 0.2
Numbers = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Settings:
    url: str = "http://127.0.0.1:30000"
    model: str = ""
    arm: str = "supports"
    out: str = "runs/grpo"
    steps: int = 60
    prompts_per_step: int = 32
    rollouts_per_prompt: int = 8
    tokens_per_update: int = 4096
    new_tokens: int = 24
    top_k: int = 50
    top_p: float = 0.9
    learning_rate: float = 1e-5
    save_every: int = 10
    seed: int = 0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


async def train(s: Settings, tasks: Any) -> None:
    """All steps; `tasks` has the methods of `Sums`."""
    out = Path(s.out)
    learner = Learner(s.model, s.learning_rate, s.device)
    async with (
        rollout.SGLangEngine(s.url, vocab_size=learner.policy.vocab_size) as engine,
        rollout.SGLangControl(s.url) as control,
    ):
        for step in range(resume(out, learner), s.steps):
            clock: Numbers = defaultdict(float)
            first = step * s.prompts_per_step
            prompts = [tasks.prompt(i) for i in range(first, first + s.prompts_per_step)]
            requests = list(rollout.make_requests(prompts, s.rollouts_per_prompt))
            with timed(clock, "transfer_s"):
                path = learner.save(out / "checkpoint")
                async with control.paused("abort"):
                    await control.update_weights_from_disk(path, version=f"step-{step}")
            facts: dict[str, Any] = {"step": step}
            with timed(clock, "engine_s"):
                if s.arm == "untruncated":
                    parts = await sample(s.url, requests, s.new_tokens)
                    outputs = dict(zip(parts.rollout_ids, parts.output_ids, strict=True))
                    source = pack(parts, s.tokens_per_update)
                else:
                    run = await collected(s, engine, requests, out / f"step-{step:03}")
                    outputs = {r.rollout_id: r.output_ids for r in run}
                    source = replay.batches(run, s.tokens_per_update, shuffle_seed=s.seed)
            with timed(clock, "replay_s"):
                if s.arm != "untruncated":
                    facts |= check(run, learner)
                facts |= measured(s, learner, source)
            reward = {i: tasks.reward(i.split(":")[0], ids) for i, ids in outputs.items()}
            with timed(clock, "update_s"):
                facts |= update(s, learner, source, advantages(reward), clock)
            facts["reward"] = float(np.mean([*reward.values()]))
            print(line := json.dumps(facts | clock), flush=True)
            with (out / "metrics.jsonl").open("a") as file:
                file.write(line + "\n")
            if (step + 1) % s.save_every == 0 or step + 1 == s.steps:
                learner.suspend(out / "learner.pt", step + 1)
    learner.save(out / "checkpoint")


async def collected(s: Settings, engine: Any, requests: list[Any], out: Path) -> rollout.Run:
    """The run directory of a step."""
    params = rollout.SamplingParams(top_k=s.top_k, top_p=s.top_p, max_new_tokens=s.new_tokens)
    with rollout.RunWriter(out, {"example": "grpo"}) as writer:
        async for one in rollout.collect(engine, requests, params, seed=s.seed):
            writer.write(one)
    return rollout.open_run(out)


def check(run: rollout.Run, learner: Learner) -> dict[str, Any]:
    """What `rollout replay` says of the run under the weights that sampled it."""
    config = replay.ReplayConfig(audit_tokens=0)
    verified = replay.verify(run, learner.policy, config)
    report = replay.make_report(verified, config.gates, learner.policy.description)
    code, gates = report.diagnoses[0].code, [gate.name for gate in report.failed_gates]
    facts = {"verdict": report.verdict, "diagnosis": code, "failed_gates": gates}
    tokens = verified.tokens
    without = float(np.exp(tokens.log_ratio_without_support).mean())
    return facts | {"kept_mass": float(tokens.kept_mass.mean()), "ratio_without": without}


@torch.no_grad()
def measured(s: Settings, learner: Learner, source: Iterable[PackedBatch]) -> Numbers:
    """The arm's importance ratios before the update, and the entropy over the vocabulary."""
    log_ratios, entropies = [], []
    for batch in source:
        b = batch.to(s.device)
        hidden = learner.hidden(b)
        logprobs, entropy = learner.logprobs(hidden, b, over_supports=False)
        if s.arm == "supports":
            logprobs, _ = learner.logprobs(hidden, b, over_supports=True)
        log_ratios.append(logprobs - b.sampling_logprobs)
        entropies.append(entropy)
    log_ratio = torch.cat(log_ratios)
    ratio = log_ratio.exp()
    return {
        "tokens": len(ratio),
        "ratio_mean": float(ratio.mean()),
        "ratio_std": float(ratio.std()),
        "log_ratio_abs_mean": float(log_ratio.abs().mean()),
        "mismatch_kl": float((ratio - 1 - log_ratio).mean()),
        "entropy": float(torch.cat(entropies).mean()),
    }


def advantages(reward: Numbers) -> Numbers:
    """Rewards relative to those of the same prompt (GRPO, arXiv:2402.03300)."""
    groups: dict[str, Numbers] = defaultdict(dict)
    for rollout_id, value in reward.items():
        groups[rollout_id.split(":")[0]][rollout_id] = value
    centred: Numbers = {}
    for group in groups.values():
        mean, spread = np.mean([*group.values()]), np.std([*group.values()]) + 1e-6
        centred |= {i: float((value - mean) / spread) for i, value in group.items()}
    return centred


def update(
    s: Settings, learner: Learner, source: Iterable[PackedBatch], advantage: Numbers, clock: Numbers
) -> Numbers:
    """An optimiser step per batch; the share of ratios that were beyond the clip range then."""
    beyond, iterator = [], iter(source)
    while True:
        with timed(clock, "waiting_s"):
            batch = next(iterator, None)
        if batch is None:
            return {"share_clipped": float(torch.cat(beyond).float().mean())}
        b = batch.to(s.device, non_blocking=True)
        logprobs, _ = learner.logprobs(learner.hidden(b), b, over_supports=s.arm == "supports")
        counted = losses.scored(b.loss_mask, logprobs)
        log_ratio = losses.log_ratio(logprobs, b.sampling_logprobs, counted)
        of_rollout = torch.tensor([advantage[i] for i in b.rollout_ids]).to(logprobs)
        loss = losses.policy_loss(
            log_ratio, of_rollout[b.rollout_index], counted, clip_low=CLIP, clip_high=CLIP
        )
        learner.step(losses.mean_over_tokens(loss, counted))
        beyond.append(~losses.in_band(log_ratio.detach().exp(), 1 - CLIP, 1 + CLIP)[counted])


def resume(out: Path, learner: Learner) -> int:
    """The step to go on with; what was noted and stored of later ones is thrown away."""
    out.mkdir(parents=True, exist_ok=True)
    done = learner.resume(out / "learner.pt") if (out / "learner.pt").exists() else 0
    metrics = out / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True) if done else []
    metrics.write_text("".join(lines[:done]))
    for folder in sorted(out.glob("step-*"))[done:]:
        shutil.rmtree(folder)
    return done


@contextmanager
def timed(clock: Numbers, name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    clock[name] += time.perf_counter() - began


def main() -> None:
    parser = HfArgumentParser(Settings, description=__doc__.splitlines()[0])
    (s,) = parser.parse_args_into_dataclasses()
    tasks = Sums(load_tokenizer(s.model), s.seed, s.steps * s.prompts_per_step)
    asyncio.run(train(s, tasks))


if __name__ == "__main__":
    main()

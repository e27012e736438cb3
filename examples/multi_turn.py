"""A conversation of two turns with a tool's output between them, as one rollout.

    python examples/multi_turn.py [MODEL] [OUT]
    rollout replay OUT --model MODEL --dtype float32

MODEL is the folder that examples/smollm2.py made unless given, OUT is runs/multi_turn.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from rollout import Rollout, RolloutBuilder, RunWriter, SamplingParams
from rollout.config import EmbeddedConfig
from rollout.engines.embedded import EmbeddedEngine
from rollout.prompts import load_tokenizer

MODEL = "~/.cache/rollout/smollm2-135m-instruct"
QUESTION = "<|im_start|>user\nHow many days has a leap year?<|im_end|>\n<|im_start|>assistant\n"
TOOL = "\n<|im_start|>tool\n366<|im_end|>\n<|im_start|>assistant\n"
PARAMS = SamplingParams(temperature=0.7, top_k=50, top_p=0.95, max_new_tokens=48, sampling_seed=0)


async def converse(model: str) -> Rollout:
    tokenizer = load_tokenizer(model)

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    builder = RolloutBuilder("leap-year", ids(QUESTION))
    async with EmbeddedEngine(model, EmbeddedConfig()) as engine:
        builder.append_sampled(await engine.generate(builder.prompt, PARAMS), PARAMS)
        builder.append_forced(ids(TOOL))
        builder.append_sampled(await engine.generate(builder.prompt, PARAMS), PARAMS)
    everything = tokenizer.decode(builder.prompt_ids)  # for people; nothing reads it back
    return builder.build(prompt_text=QUESTION, output_text=everything[len(QUESTION) :])


def main(model: str = MODEL, out: str = "runs/multi_turn") -> None:
    rollout = asyncio.run(converse(str(Path(model).expanduser())))
    with RunWriter(Path(out), {}) as writer:
        writer.write(rollout)
    print(f"{rollout.num_output_tokens} output tokens, {rollout.is_forced.sum()} of them forced")
    print(f"turns: {rollout.extra}")


if __name__ == "__main__":
    main(*sys.argv[1:])

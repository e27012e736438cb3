"""What the engine may have read instead of the recorded prompt: with or without BOS or template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollout.errors import ConfigError
from rollout.prompts import load_tokenizer
from rollout.record import Rollout

Ids = list[int]
CONTENT = "\u00a7"  # stands for the user's words in a rendered template


def other_prompts(model: str) -> Callable[[Sequence[Rollout]], dict[str, list[Rollout]]]:
    """Candidates from the tokenizer of `model`, which is loaded when they are first asked for."""

    def candidates(rollouts: Sequence[Rollout]) -> dict[str, list[Rollout]]:
        try:
            tokenizer = load_tokenizer(model)
        except ConfigError:
            return {}  # a policy without a tokenizer says nothing about prompts
        return candidate_prompts(rollouts, tokenizer)

    return candidates


def candidate_prompts(rollouts: Sequence[Rollout], tokenizer: Any) -> dict[str, list[Rollout]]:
    """At most three, by name: `rollouts` with every prompt changed in the same way."""
    prompts = [r.prompt_ids.tolist() for r in rollouts]
    changed: dict[str, list[Ids]] = {}
    if (bos := tokenizer.bos_token_id) is not None:
        if all(p[0] == bos for p in prompts):
            changed["without its first BOS"] = [p[1:] for p in prompts]
        else:
            changed["with BOS in front"] = [[bos, *p] for p in prompts]
    if tokenizer.chat_template:
        changed |= _templates(prompts, tokenizer)
    return {
        name: [
            replace(r, prompt_ids=np.array(p, np.int32)) for r, p in zip(rollouts, new, strict=True)
        ]
        for name, new in list(changed.items())[:3]
        if all(new)
    }


def _templates(prompts: Sequence[Ids], tokenizer: Any) -> dict[str, list[Ids]]:
    whole, short, suffix = _around_content(tokenizer)

    def content(p: Ids, prefix: Ids) -> Ids | None:
        inside = p[: len(prefix)] == prefix and p[len(p) - len(suffix) :] == suffix
        return p[len(prefix) : len(p) - len(suffix)] if inside else None

    for prefix, other, name in (
        (whole, short, "without the template's system prompt"),
        (short, whole, "with the template's system prompt"),
    ):
        words = [w for p in prompts if (w := content(p, prefix)) is not None]
        if len(words) == len(prompts):
            changed = {"without the chat template": words}
            if short != whole:
                changed[name] = [[*other, *w, *suffix] for w in words]
            return changed
    changed = {"through the chat template": [[*whole, *p, *suffix] for p in prompts]}
    if short != whole:
        name = "through the chat template without its system prompt"
        changed[name] = [[*short, *p, *suffix] for p in prompts]
    return changed


def _around_content(tokenizer: Any) -> tuple[Ids, Ids, Ids]:
    """Ids before a user's words, those from the last turn on only, and ids after them."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": CONTENT}], tokenize=False, add_generation_prompt=True
    )
    before, _, after = text.partition(CONTENT)
    whole, suffix = (
        tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after)
    )
    special = set(tokenizer.all_special_ids)
    turns = [i for i, token in enumerate(whole) if token in special]
    return whole, whole[turns[-1] :] if turns else whole, suffix

"""Sums from reasoning-gym: prompts, and a reward that can be checked."""

from typing import Any

import reasoning_gym

from rollout import Prompt
from rollout.prompts import Chat, tokenise_chat, tokenise_text

DIGITS = 0.1  # reward of an answer that is nothing but digits: a first step for a model that talks
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


class Sums:
    """Problem i is the same in every arm."""

    def __init__(self, tokenizer: Any, seed: int, size: int) -> None:
        self._tokenizer = tokenizer
        self._problems = reasoning_gym.create_dataset("chain_sum", seed=seed, size=size, **SUMS)

    def prompt(self, index: int) -> Prompt:
        question = self._problems[index]["question"]
        if self._tokenizer.chat_template is None:
            return tokenise_text(question, self._tokenizer, str(index))
        chat = Chat([{"role": "user", "content": question}])
        return tokenise_chat(chat, self._tokenizer, str(index))

    def reward(self, prompt_id: str, output_ids: Any) -> float:
        """1 for the answer alone, less the more there is around it; a little for digits."""
        text = self._tokenizer.decode(output_ids, skip_special_tokens=True).strip()
        score = self._problems.score_answer(text, self._problems[int(prompt_id)])
        return float(score) + DIGITS * sum(c.isdigit() for c in text) / max(1, len(text))

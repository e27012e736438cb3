"""A device that is too small for what is asked, as an error that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from replay.batch import PackedBatch
from rollout.errors import PolicyOutOfMemory

LESS_EACH = "--dtype bfloat16 takes half of float32, --device cpu takes the machine's memory"


@contextmanager
def memory_for(what: str, advice: str) -> Iterator[None]:
    """Within it, raise `PolicyOutOfMemory` for the errors of torch and of numpy."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        said = str(error).partition("err == 0. ")[2] or str(error)  # on a CPU: a place in C++ first
        said = ". ".join(said.split(". ")[:2]).rstrip(".")  # then come figures and a link
        raise PolicyOutOfMemory(f"{what}: {said}; {advice}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the machine had too little; torch has no class of its own for a CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: " in str(error)


def advice_for(batch: PackedBatch, max_tokens: int) -> str:
    """What makes a batch smaller; one long rollout cannot be cut."""
    if len(batch.rollout_ids) == 1:
        return f"one rollout is not cut: {LESS_EACH}"
    fewer = max(1, min(max_tokens, len(batch.input_ids)) // 2)
    return f"replay fewer tokens at once: -o max_tokens={fewer}"


def words_for(batch: PackedBatch) -> str:
    """The batch in words: how many tokens, and which rollouts."""
    first, last = batch.rollout_ids[0], batch.rollout_ids[-1]
    names = first if first == last else f"{first} to {last}"
    return f"a batch of {len(batch.input_ids):,} tokens ({names})"

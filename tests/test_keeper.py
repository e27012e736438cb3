"""What a person is told while outcomes are stored: once, and at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from builders import ScriptedEngine, make_completion
from test_job import CONFIG

from rollout.collect import Request
from rollout.job import collect_into
from rollout.keeper import Progress
from rollout.prompts import Prompt
from rollout.reader import open_run
from rollout.writer import RunWriter


def collect(
    folder: Path, ours: Sequence[int], theirs: Sequence[int] | None
) -> tuple[Progress, list[str]]:
    """Three rollouts of one prompt; the engine's ids for it are `theirs`, unless it took ours."""
    prompt = Prompt("4", np.array(ours, np.int32))
    ids = None if theirs is None else np.array(theirs, np.int32)
    per_id = np.log(np.array([0.75, 0.25, 1], np.float32))
    completion = make_completion(prompt_ids=ids, support_logprobs=per_id)
    engine = ScriptedEngine(*[completion] * 3)
    notes: list[str] = []

    async def run() -> Progress:
        wanted = [Request(prompt, i) for i in range(3)]
        with RunWriter(folder, {}) as writer:
            return await collect_into(writer, engine, wanted, CONFIG, on_note=notes.append)

    return asyncio.run(run()), notes


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        pytest.param(
            [1, 9, 3], "token 1 is 9 at the engine and 2 as rendered here", id="another id"
        ),
        pytest.param(
            [1, 2, 3, 4],
            "4 tokens at the engine and 3 as rendered here, alike until 3",
            id="more ids",
        ),
    ],
)
def test_a_prompt_that_the_engine_rendered_otherwise_is_told_once_and_its_ids_are_recorded(
    tmp_path: Path, theirs: list[int], words: str
) -> None:
    progress, notes = collect(tmp_path, [1, 2, 3], theirs)
    assert progress.prompts_differ == 3
    (note,) = notes
    assert note.startswith(f"prompt 4: {words}; the engine's ids are recorded")
    stored = list(open_run(tmp_path))
    assert [r.prompt_ids.tolist() for r in stored] == [theirs] * 3
    assert [r.prompt_text for r in stored] == [None] * 3, "our text is of other tokens"


def test_a_server_that_ignores_support_mode_is_told_of_once(tmp_path: Path) -> None:
    engine = ScriptedEngine(*[make_completion()] * 2)
    notes: list[str] = []

    async def run() -> None:
        wanted = [Request(Prompt("4", np.array([1], np.int32)), i) for i in range(2)]
        with RunWriter(tmp_path, {}) as writer:
            await collect_into(writer, engine, wanted, CONFIG, on_note=notes.append)

    asyncio.run(run())
    (note,) = notes
    assert note.startswith("the server sends no logprobs of whole supports")


@pytest.mark.parametrize("theirs", [None, [1, 2, 3]], ids=["ours", "the same"])
def test_there_is_nothing_to_tell_where_the_prompt_is_the_same(
    tmp_path: Path, theirs: list[int] | None
) -> None:
    progress, notes = collect(tmp_path, [1, 2, 3], theirs)
    assert (progress.prompts_differ, notes) == (0, [])

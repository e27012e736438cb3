"""Text that is not UTF-8: the ids are stored as they came, the text escaped, ids never."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders import assert_same_rollout, make_rollout

from rollout.errors import BadValue
from rollout.reader import open_run
from rollout.record import WeightSpan
from rollout.text import make_storable
from rollout.writer import RunWriter

HALF = "ok \ud83d"  # a byte-level token was the last one: half of an emoji


def test_one_broken_text_does_not_fail_its_batch(tmp_path: Path) -> None:
    rollouts = [make_rollout(str(i)) for i in range(99)]
    broken = make_rollout("broken", output_text=HALF, extra='{"a":1}')
    with RunWriter(tmp_path, {}) as writer:
        for rollout in [*rollouts[:50], broken, *rollouts[50:]]:
            writer.write(rollout)
    stored = {r.prompt_id: r for r in open_run(tmp_path)}
    assert len(stored) == 100
    wanted = make_rollout(
        "broken", output_text=r"ok \ud83d", extra='{"a":1,"escaped":["output_text"]}'
    )
    assert_same_rollout(stored["broken"], wanted)
    assert_same_rollout(stored["7"], rollouts[7])


def test_text_that_is_utf8_is_left_alone() -> None:
    rollout = make_rollout(output_text="\\ud83d \U0001f600 �")
    assert make_storable(rollout) is rollout


def test_json_keeps_its_value() -> None:
    sent = json.dumps({"stop": [HALF]}, ensure_ascii=False)
    got = make_storable(make_rollout(sampling_params=sent))
    assert got.sampling_params.encode().decode() == '{"stop": ["ok \\ud83d"]}'
    assert json.loads(got.sampling_params) == {"stop": [HALF]}
    assert got.extra == "{}"


def test_text_and_extra_broken_together() -> None:
    extra = json.dumps({"note": HALF}, ensure_ascii=False)
    got = make_storable(make_rollout(output_text=HALF, extra=extra))
    assert json.loads(got.extra.encode()) == {"note": HALF, "escaped": ["output_text"]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"prompt_id": HALF, "rollout_id": f"{HALF}:0"}, r"rollout_id holds", id="id"),
        pytest.param({"finish_reason": HALF}, "finish_reason holds", id="finish_reason"),
        pytest.param(
            {"weight_versions": (WeightSpan(HALF, 0, 3),)}, "weight_versions holds", id="version"
        ),
    ],
)
def test_words_that_must_stay_what_they_are_are_refused(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    with RunWriter(tmp_path, {}) as writer:
        with pytest.raises(BadValue, match=words) as caught:
            writer.write(make_rollout(**({"prompt_id": "7"} | changes)))
        str(caught.value).encode()  # can be printed
        assert writer.done == set()

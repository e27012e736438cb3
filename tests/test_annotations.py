"""Annotations: later scores beside the shards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from builders import make_rollout

from rollout import annotate as module
from rollout import errors
from rollout.annotate import annotate
from rollout.annotations import (
    FIELDS,
    Annotation,
    annotated,
    read_annotations,
    write_annotations,
)
from rollout.directory import locked
from rollout.reader import open_run
from rollout.schema import ANNOTATIONS_LOCK_FILE
from rollout.writer import RunWriter


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Rollouts a:0, b:0 and c:0."""
    with RunWriter(tmp_path, {}) as writer:
        for name in "abc":
            writer.write(make_rollout(name))
    return tmp_path


def test_nothing_said_is_nothing_read(stored: Path) -> None:
    assert read_annotations(stored) == {}


def test_later_values_win_and_the_others_stay(stored: Path) -> None:
    annotate(stored, {"a:0": 1.0, "b:0": 0.5}, extra={"a:0": {"judge": "é", "n": 1}})
    annotate(stored, {"b:0": 0}, extra={"a:0": {"n": 2}, "c:0": {}})
    assert read_annotations(stored) == {
        "a:0": Annotation(1.0, '{"judge":"é","n":2}'),
        "b:0": Annotation(0.0, None),
        "c:0": Annotation(None, "{}"),
    }


def test_the_shards_do_not_change(stored: Path) -> None:
    before = {p.name: p.read_bytes() for p in stored.glob("*.arrow")}
    annotate(stored, {"a:0": 1.0})
    assert {p.name: p.read_bytes() for p in stored.glob("shard-*")} == before


def test_scores_may_come_while_a_collect_is_at_work(tmp_path: Path) -> None:
    with RunWriter(tmp_path, {}) as writer:
        writer.write(make_rollout("a"))
        writer.commit()
        annotate(tmp_path, {"a:0": 1.0})
    assert read_annotations(tmp_path) == {"a:0": Annotation(1.0)}


def test_the_join_keeps_what_was_not_said() -> None:
    rollouts = [
        make_rollout("a", reward=0.25, extra='{"tool":"x","turn":1}'),
        make_rollout("b", reward=0.25),
        make_rollout("c", extra="not JSON, and not touched"),
    ]
    later = {"a:0": Annotation(None, '{"turn":2}'), "b:0": Annotation(1.0), "c:0": Annotation(0.0)}
    got = [(r.reward, r.extra) for r in (annotated(r, later) for r in rollouts)]
    assert got == [
        (0.25, '{"tool":"x","turn":2}'),
        (1.0, "{}"),
        (0.0, "not JSON, and not touched"),
    ]
    assert [annotated(r, {}) for r in rollouts] == rollouts


@pytest.mark.parametrize(
    ("rewards", "extra", "error", "words"),
    [
        pytest.param(
            {"a:0": 1.0, "z:0": 1.0},
            None,
            errors.BadRolloutId,
            r"z:0: no such rollout in this run \(1 of 2 ids",
            id="unknown id with a reward",
        ),
        pytest.param(
            {"a:0": 1.0}, {"z:1": {}}, errors.BadRolloutId, "z:1", id="unknown id with extra"
        ),
        pytest.param(
            {"a:0": float("nan")}, None, errors.BadValue, "reward is nan", id="NaN reward"
        ),
    ],
)
def test_bad_scores_are_refused_and_nothing_is_stored(
    stored: Path, rewards: Any, extra: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        annotate(stored, rewards, extra=extra)
    assert read_annotations(stored) == {}


def test_a_crash_before_the_rename_leaves_the_old_file(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    annotate(stored, {"a:0": 1.0})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", killed)
        annotate(stored, {"a:0": 2.0})
    assert read_annotations(stored) == {"a:0": Annotation(1.0)}
    annotate(stored, {"a:0": 3.0})
    assert read_annotations(stored) == {"a:0": Annotation(3.0)}


def test_readers_of_a_run_see_the_later_scores(stored: Path) -> None:
    annotate(stored, {"a:0": 1.0}, extra={"a:0": {"judge": "x"}})
    run = open_run(stored)
    assert {r.rollout_id: r.reward for r in run} == {"a:0": 1.0, "b:0": None, "c:0": None}
    assert [r.extra for r in run][0] == '{"judge":"x"}'
    assert [r.reward for r in run.stored()] == [None, None, None]


def test_two_do_not_annotate_at_once(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.01)
    with (
        locked(stored, ANNOTATIONS_LOCK_FILE, busy="x"),
        pytest.raises(errors.RunLocked, match="has been annotating"),
    ):
        annotate(stored, {"a:0": 1.0})


def stream(path: Path, table: pa.Table) -> None:
    file = str(path / "annotations.arrow")
    with pa.OSFile(file, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        pytest.param([(None, 1.0, None)], errors.NullValue, "rollout_id", id="null id"),
        pytest.param(
            [("a:0", 1.0, None)] * 2, errors.BadRolloutId, "a:0: stored twice", id="id twice"
        ),
        pytest.param([("a:0", 1.0, "{")], errors.BadValue, "extra is not JSON", id="broken extra"),
        pytest.param([("a:0", 1.0, "[]")], errors.BadValue, "an object, got list", id="list"),
    ],
)
def test_a_file_of_other_origin_must_follow_the_format(
    stored: Path, rows: list[Any], error: type[Exception], words: str
) -> None:
    columns = [
        pa.array(column, kind)
        for column, kind in zip(zip(*rows, strict=True), FIELDS.types, strict=True)
    ]
    stream(stored, pa.Table.from_arrays(columns, schema=FIELDS))
    with pytest.raises(error, match=words):
        read_annotations(stored)


def test_other_columns_are_refused(stored: Path) -> None:
    stream(stored, pa.table({"rollout_id": ["a:0"], "reward": [1]}))
    with pytest.raises(errors.SchemaMismatch, match="rollout_id string, reward int64, must be"):
        read_annotations(stored)


@pytest.mark.parametrize("cut", [8, 30], ids=["its marker", "inside its batch"])
def test_a_cut_file_is_damaged(stored: Path, cut: int) -> None:
    write_annotations(stored, {"a:0": Annotation(1.0)})
    file = stored / "annotations.arrow"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(errors.ShardDamaged, match="annotations.arrow: .*breaks off"):
        read_annotations(stored)

"""RunWriter and Run: what is written is what is read, at every moment and after any crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from builders import assert_same_rollout, make_rollout
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout import errors
from rollout.config import ShardsConfig
from rollout.reader import open_run
from rollout.record import Rollout
from rollout.rules import check_content
from rollout.schema import FIELDS, arrow_schema, to_batch
from rollout.shard import ShardFile
from rollout.support import Support
from rollout.writer import RunWriter

EVERY_ROW = ShardsConfig(batch_rows=1)


def write(path: Path, *rollouts: Rollout, shards: ShardsConfig = EVERY_ROW) -> None:
    with RunWriter(path, {"config": {"a": 1}}, shards=shards) as writer:
        for rollout in rollouts:
            writer.write(rollout)


def stored_ids(path: Path) -> list[str]:
    return [r.rollout_id for r in open_run(path)]


def manifest(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "manifest.jsonl").read_text().splitlines()]


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    rows = draw(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5, unique=True), max_size=6))
    output = [draw(st.sampled_from(row)) if row else 0 for row in rows]
    support = Support.from_rows(rows)
    mass = np.log(1 / np.maximum(support.counts, 1)).astype(np.float32)
    optional = draw(st.booleans())
    text = draw(st.none() | st.text(st.characters(codec="utf-8"), max_size=8))
    return make_rollout(
        prompt_ids=np.array(draw(st.lists(st.integers(0, 9), min_size=1)), np.int32),
        output_ids=np.array(output, np.int32),
        loss_mask=(support.counts > 0).astype(np.int8),
        sampling_logprobs=mass,
        support=support,
        full_logprobs=mass - 1 if optional else None,
        support_logprobs=mass[support.rows] if optional else None,
        weight_versions=(),
        output_text=text,
        prompt_text=text,
        stop_match=text,
        seed=draw(st.none() | st.integers(-(2**63), 2**63 - 1)),
        reward=draw(st.none() | st.floats(allow_nan=False)),
    )


@given(rollout=rollouts())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_valid_rollout_survives_the_disk(
    rollout: Rollout, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("run")
    write(path, rollout)
    (got,) = open_run(path)
    assert_same_rollout(got, rollout)
    check_content(got)


def test_null_columns_of_one_row_do_not_touch_the_next(tmp_path: Path) -> None:
    bare = make_rollout("a", full_logprobs=None, support_logprobs=None, seed=None, output_text=None)
    full = make_rollout("b")
    write(tmp_path, bare, full, shards=ShardsConfig())
    for got, wanted in zip(open_run(tmp_path), [bare, full], strict=True):
        assert_same_rollout(got, wanted)


def test_the_directory_is_a_dataset_from_the_first_commit_on(tmp_path: Path) -> None:
    with RunWriter(tmp_path, {}, shards=EVERY_ROW) as writer:
        assert len(datasets.load_from_disk(str(tmp_path))) == 0
        for count, name in enumerate("abc", start=1):
            writer.write(make_rollout(name))
            live = datasets.load_from_disk(str(tmp_path))
            assert (len(live), live[count - 1]["prompt_id"]) == (count, name)
            assert stored_ids(tmp_path)[-1] == f"{name}:0"
    row = datasets.load_from_disk(str(tmp_path))[0]
    assert (row["output_ids"], row["support_counts"]) == ([9, 8, 2], [2, 0, 1])
    assert (row["support_ids"], row["temperature"]) == ([5, 9, 2], 0.5)


def test_pending_rows_are_not_visible_before_their_commit(tmp_path: Path) -> None:
    with RunWriter(tmp_path, {}, shards=ShardsConfig(batch_rows=2)) as writer:
        writer.write(make_rollout("a"))
        assert stored_ids(tmp_path) == []
        writer.write(make_rollout("b"))
        assert stored_ids(tmp_path) == ["a:0", "b:0"]


def test_an_error_in_the_block_loses_nothing_that_was_written(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), RunWriter(tmp_path, {}) as writer:
        writer.write(make_rollout("a"))
        raise KeyboardInterrupt
    assert stored_ids(tmp_path) == ["a:0"]


def test_shards_roll_over_and_the_manifest_describes_each(tmp_path: Path) -> None:
    write(tmp_path, *map(make_rollout, "abc"), shards=ShardsConfig(batch_rows=1, shard_bytes=1))
    lines = manifest(tmp_path)
    assert [line["file"] for line in lines] == [f"shard-0000{i}.arrow" for i in range(3)]
    assert {(line["rows"], line["output_tokens"], line["support_ids"]) for line in lines} == {
        (1, 3, 3)
    }
    assert stored_ids(tmp_path) == ["a:0", "b:0", "c:0"]


def test_the_same_settings_go_on_in_a_new_shard(tmp_path: Path) -> None:
    write(tmp_path, make_rollout("a"))
    with RunWriter(tmp_path, {"config": {"a": 1}}) as writer:
        assert writer.done == {"a:0"}
        writer.write(make_rollout("b"))
    assert stored_ids(tmp_path) == ["a:0", "b:0"]
    assert len(manifest(tmp_path)) == 2


def test_a_resumed_run_with_nothing_to_do_leaves_the_shards_alone(tmp_path: Path) -> None:
    write(tmp_path, make_rollout("a"))
    write(tmp_path)
    assert sorted(p.name for p in tmp_path.glob("*.arrow")) == ["shard-00000.arrow"]


def test_a_killed_writer_is_taken_over(tmp_path: Path) -> None:
    """A shard without its manifest line, with half a batch behind its marker."""
    write(tmp_path, make_rollout("a"))
    with ShardFile(tmp_path / "shard-00001.arrow") as shard:
        shard.commit(to_batch([make_rollout("b")]))
    with open(tmp_path / "shard-00001.arrow", "ab") as file:
        file.write(b"half a batch")
    (tmp_path / "shard-00002.arrow").touch()  # killed between creating a shard and its schema
    write(tmp_path, make_rollout("c"))
    assert stored_ids(tmp_path) == ["a:0", "b:0", "c:0"]
    assert [line["rows"] for line in manifest(tmp_path)] == [1, 1, 1]


def test_other_settings_are_refused_with_the_difference(tmp_path: Path) -> None:
    write(tmp_path, make_rollout("a"))
    with (
        pytest.raises(errors.ConfigChanged, match="config.a: 1 there, 2 now"),
        RunWriter(tmp_path, {"config": {"a": 2}}),
    ):
        pass


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with (
        RunWriter(tmp_path, {}),
        pytest.raises(errors.RunLocked, match="another process is writing"),
        RunWriter(tmp_path, {}),
    ):
        pass


def test_a_rollout_is_stored_once(tmp_path: Path) -> None:
    with RunWriter(tmp_path, {}) as writer:
        writer.write(make_rollout("a"))
        with pytest.raises(errors.BadRolloutId, match="a:0: already stored.*another --out"):
            writer.write(make_rollout("a"))
    assert stored_ids(tmp_path) == ["a:0"]


def test_a_broken_rollout_is_refused_and_nothing_of_it_is_stored(tmp_path: Path) -> None:
    with RunWriter(tmp_path, {}, vocab_size=10) as writer:
        with pytest.raises(errors.SampledOutsideSupport):
            writer.write(make_rollout("a", output_ids=np.array([4, 8, 2], np.int32)))
        with pytest.raises(errors.IdOutsideVocabulary):
            writer.write(make_rollout("a", prompt_ids=np.array([10], np.int32)))
        writer.write(make_rollout("a"))
    assert stored_ids(tmp_path) == ["a:0"]


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        pytest.param(b'{"x":"\xc3\xa9"}', {"body": '{"x":"é"}'}, id="text as it came"),
        pytest.param(b"\xff\xfe", {"body_base64": "//4="}, id="bytes that are not text"),
        pytest.param(None, {}, id="no reply"),
    ],
)
def test_rejections_keep_reason_and_body(
    tmp_path: Path, body: bytes | None, kept: dict[str, str]
) -> None:
    with RunWriter(tmp_path, {}) as writer:
        writer.reject(errors.DuplicateIds("a:0: twice"), body, rollout_id="a:0")
    line = json.loads((tmp_path / "rejected.jsonl").read_text())
    del line["created_us"]
    assert line == {
        "reason": "duplicate_ids",
        "message": "a:0: twice",
        "rollout_id": "a:0",
        **kept,
    }


def _flip_a_byte(path: Path) -> None:
    content = bytearray((path / "shard-00000.arrow").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "shard-00000.arrow").write_bytes(content)


def _cut_the_tail(path: Path) -> None:
    content = (path / "shard-00000.arrow").read_bytes()
    (path / "shard-00000.arrow").write_bytes(content[:-20])


def _cut_the_tail_of_an_unfinished_shard(path: Path) -> None:
    (path / "manifest.jsonl").unlink()
    _cut_the_tail(path)


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        pytest.param(
            _flip_a_byte, errors.ShardHashMismatch, "the manifest says", id="byte flipped"
        ),
        pytest.param(_cut_the_tail, errors.ShardHashMismatch, "changed or cut", id="tail cut"),
        pytest.param(
            _cut_the_tail_of_an_unfinished_shard,
            errors.ShardDamaged,
            "breaks off",
            id="tail cut, no manifest line",
        ),
        pytest.param(
            lambda path: (path / "shard-00000.arrow").unlink(),
            errors.ShardDamaged,
            "not there",
            id="shard lost",
        ),
        pytest.param(
            lambda path: (path / "run.json").unlink(),
            errors.NotARun,
            "no run.json",
            id="no run.json",
        ),
        pytest.param(
            lambda path: (path / "run.json").write_text("{"),
            errors.FormatError,
            "not JSON",
            id="broken run.json",
        ),
        pytest.param(
            lambda path: (path / "manifest.jsonl").write_text("x\n"),
            errors.FormatError,
            "manifest.jsonl:1: not JSON",
            id="broken manifest",
        ),
    ],
)
def test_damage_is_found_when_a_run_is_opened(
    tmp_path: Path, damage: Any, error: type[errors.FormatError], words: str
) -> None:
    write(tmp_path, make_rollout("a"))
    damage(tmp_path)
    with pytest.raises(error, match=words):
        list(open_run(tmp_path))


def test_a_folder_that_is_not_there_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(errors.NotARun, match="no such directory"):
        open_run(tmp_path / "nowhere")


def foreign(path: Path, batch: pa.RecordBatch) -> Path:
    """A run whose only shard somebody else wrote."""
    write(path)
    (path / "manifest.jsonl").unlink()
    shard = str(path / "shard-00000.arrow")
    with pa.OSFile(shard, "wb") as file, pa.ipc.new_stream(file, batch.schema) as stream:
        stream.write_batch(batch)
    return path


def _without(batch: pa.RecordBatch, name: str) -> pa.RecordBatch:
    return batch.drop_columns([name])


def _with(batch: pa.RecordBatch, name: str, values: Any, kind: Any = None) -> pa.RecordBatch:
    at = batch.schema.get_field_index(name)
    field = FIELDS.field(name) if kind is None else pa.field(name, kind)
    column = pa.array(values, field.type)
    return batch.set_column(at, field, column).replace_schema_metadata(arrow_schema().metadata)


def _version_2(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.replace_schema_metadata({b"rollout": b'{"schema_version": 2}'})


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        pytest.param(
            lambda b: b.replace_schema_metadata(None),
            errors.SchemaMismatch,
            "not a shard of this format",
            id="no metadata",
        ),
        pytest.param(_version_2, errors.SchemaVersionUnknown, "version 2", id="newer version"),
        pytest.param(
            lambda b: b.replace_schema_metadata({b"rollout": b"{}"}),
            errors.SchemaMismatch,
            "metadata is broken",
            id="broken metadata",
        ),
        pytest.param(
            lambda b: _without(b, "seed"), errors.SchemaMismatch, "seed is missing", id="missing"
        ),
        pytest.param(
            lambda b: _with(b, "top_k", [2], pa.int64()),
            errors.SchemaMismatch,
            "top_k is int64, must be int32",
            id="type",
        ),
        pytest.param(
            lambda b: b.append_column("more", pa.array([1])).replace_schema_metadata(
                arrow_schema().metadata
            ),
            errors.SchemaMismatch,
            r"unknown columns \['more'\]",
            id="extra column",
        ),
        pytest.param(
            lambda b: _with(b, "output_ids", [None]),
            errors.NullValue,
            "column output_ids holds 1 nulls",
            id="null row",
        ),
        pytest.param(
            lambda b: _with(b, "output_ids", [[9, None, 2]]),
            errors.NullValue,
            "lists of column output_ids hold nulls",
            id="null in a list",
        ),
        pytest.param(
            lambda b: _with(b, "support_counts", [[2, 0, 2]]),
            errors.BadOffsets,
            "end at 4, but there are 3",
            id="counts do not sum to ids",
        ),
        pytest.param(
            lambda b: _with(b, "loss_mask", [[1, 1, 1]]),
            errors.MissingSupport,
            "shard-00000.arrow, a:0: output token 1",
            id="format rule of a row",
        ),
    ],
)
def test_a_foreign_shard_must_follow_the_format(
    tmp_path: Path, change: Any, error: type[errors.FormatError], words: str
) -> None:
    run = foreign(tmp_path, change(to_batch([make_rollout("a")])))
    with pytest.raises(error, match=words):
        list(open_run(run))


def test_a_foreign_shard_with_bad_content_is_read_as_it_is(tmp_path: Path) -> None:
    outside = make_rollout("a", output_ids=np.array([4, 8, 2], np.int32))
    (got,) = open_run(foreign(tmp_path, to_batch([outside])))
    assert_same_rollout(got, outside)


def test_an_id_stored_twice_is_found(tmp_path: Path) -> None:
    run = foreign(tmp_path, to_batch([make_rollout("a"), make_rollout("a")]))
    with pytest.raises(errors.BadRolloutId, match="a:0: stored twice"):
        list(open_run(run))

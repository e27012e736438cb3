"""Damaged shards: a typed refusal or rollouts that pass the rules, never a crash or a huge read."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from builders import make_rollout

from rollout import errors
from rollout.reader import open_run
from rollout.schema import FIELDS, arrow_schema, to_batch
from rollout.shard import END_OF_STREAM, ShardFile, read_batches
from rollout.writer import RunWriter

HOSTILE = Path(__file__).parent / "hostile.py"


def mutate(folder: Path, first: int, last: int) -> Counter[tuple[str, str]]:
    """What came of each mutation, in another process: a segfault or a hang fails here."""
    done = subprocess.run(
        [sys.executable, HOSTILE, str(folder), str(first), str(last)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"at seed {lines[-1][0]}: {done.stderr[-2000:]}"
    assert [int(seed) for seed, *_ in lines] == list(range(first, last))
    return Counter((unfinished, finished) for _, unfinished, finished in lines)


def test_a_few_damaged_shards(tmp_path: Path) -> None:
    seen = mutate(tmp_path, 0, 500)
    # a finished shard is the one that was written, or it is refused
    assert {finished for _, finished in seen} <= {"=", "!"}
    assert seen["!", "!"] > 250  # without a hash most damage is still seen


@pytest.mark.stress
@pytest.mark.parametrize("first", [10_000, 15_000])
def test_thousands_of_damaged_shards(tmp_path: Path, first: int) -> None:
    seen = mutate(tmp_path, first, first + 5_000)
    assert {finished for _, finished in seen} <= {"=", "!"}
    assert seen["!", "!"] > 2_500


@pytest.fixture(params=["none", "zstd", "lz4"])
def shard(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "s.arrow"
    with ShardFile(path, compression=request.param) as file:
        file.commit(to_batch([make_rollout(str(i), output_text="x" * 500) for i in range(9)]))
    return path


def body_at(path: Path) -> int:
    """Offset of the body of the first batch."""
    with pa.OSFile(str(path)) as file:
        pa.ipc.read_message(file)
        start = file.tell()
        return start + 8 + int(pa.ipc.read_message(file).metadata.size)


@pytest.mark.parametrize("size", [2**30, 2**46, 2**63 - 1], ids=["1 GiB", "64 TiB", "most"])
@pytest.mark.parametrize("shard", ["zstd", "lz4"], indirect=True)
def test_a_compressed_buffer_cannot_ask_for_terabytes(shard: Path, size: int) -> None:
    content = bytearray(shard.read_bytes())
    start = body_at(shard)
    struct.pack_into("<q", content, start, size)
    shard.write_bytes(content)
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(errors.ShardDamaged, match=f"claims to unpack to {size}"):
        read_batches(shard)
    assert pa.default_memory_pool().max_memory() < before + 2**20


def test_buffers_that_compress_best_are_no_damage(tmp_path: Path) -> None:
    """A megabyte of one byte: zstd packs it by more than 10,000."""
    path = tmp_path / "s.arrow"
    with ShardFile(path, compression="zstd") as file:
        file.commit(to_batch([make_rollout("a", prompt_text="x" * 2**20)]))
    assert path.stat().st_size < 20_000
    (batch,) = read_batches(path)[1]
    assert batch.column("prompt_text")[0].as_py() == "x" * 2**20


def test_a_cut_between_two_batches_is_damage(shard: Path) -> None:
    """Arrow itself takes it for the end of the stream."""
    content = shard.read_bytes()
    shard.write_bytes(content[: -len(END_OF_STREAM)])
    with pa.OSFile(str(shard)) as file, pa.ipc.open_stream(file) as stream:
        assert stream.read_all().num_rows == 9
    with pytest.raises(errors.ShardDamaged, match="no end-of-stream marker"):
        read_batches(shard)


def test_values_are_views_of_the_file_unless_compressed(tmp_path: Path) -> None:
    with ShardFile(tmp_path / "s.arrow") as file:
        file.commit(to_batch([make_rollout("a")]))
    before = pa.total_allocated_bytes()
    (batch,) = read_batches(tmp_path / "s.arrow")[1]
    assert batch.column("output_ids").values.to_numpy().tolist() == [9, 8, 2]
    assert pa.total_allocated_bytes() == before


def test_a_commit_between_mapping_and_reading_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The marker that the map ends with becomes a batch that lies beyond it."""
    path = tmp_path / "s.arrow"
    real_map, maps = pa.memory_map, []
    with ShardFile(path, reserved_bytes=0) as shard:
        shard.commit(to_batch([make_rollout("a")]))

        def map_then_commit(name: str) -> Any:
            maps.append(real_map(name))
            if len(maps) == 1:
                shard.commit(to_batch([make_rollout("b")]))
            return maps[-1]

        monkeypatch.setattr(pa, "memory_map", map_then_commit)
        batches = read_batches(path)[1]
    assert [b.column("prompt_id").to_pylist() for b in batches] == [["a"], ["b"]]
    assert len(maps) == 2


SPANS = FIELDS.field("weight_versions").type


@pytest.mark.parametrize(
    "spans",
    [
        pytest.param([None], id="span"),
        pytest.param([{"version": None, "start": 0, "end": 1}], id="version"),
        pytest.param([{"version": "1", "start": None, "end": 1}], id="start"),
    ],
)
def test_nulls_in_spans_are_refused(tmp_path: Path, spans: list[Any]) -> None:
    with RunWriter(tmp_path, {}) as writer:
        writer.write(make_rollout("a"))
    batch = to_batch([make_rollout("a")])
    at = FIELDS.get_field_index("weight_versions")
    batch = batch.set_column(at, FIELDS.field(at), pa.array([spans], SPANS))
    (tmp_path / "manifest.jsonl").unlink()
    with (
        pa.OSFile(str(tmp_path / "shard-00000.arrow"), "wb") as file,
        pa.ipc.new_stream(file, arrow_schema()) as stream,
    ):
        stream.write_batch(batch.replace_schema_metadata(arrow_schema().metadata))
    with pytest.raises(errors.NullValue, match="lists of column weight_versions hold nulls"):
        list(open_run(tmp_path))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        pytest.param("manifest.jsonl", "[]\n", "must hold an object", id="line: a list"),
        pytest.param("manifest.jsonl", "{}\n", "sha256 is None", id="line: nothing in it"),
        pytest.param(
            "manifest.jsonl", '{"file":"../x","sha256":"0"}\n', "a file beside it", id="line: path"
        ),
        pytest.param("state.json", "{}", "_data_files is None", id="state: no list"),
        pytest.param("state.json", '{"_data_files":[1]}', "filename is None", id="state: numbers"),
        pytest.param(
            "state.json",
            '{"_data_files":[{"filename":"/etc/passwd"}]}',
            "a file beside it",
            id="state: path",
        ),
        pytest.param("run.json", "[" * 100_000, "not JSON", id="run: too deep"),
        pytest.param("run.json", b"\xff", "not JSON", id="run: not UTF-8"),
    ],
)
def test_hostile_small_files_are_refused(
    tmp_path: Path, name: str, text: str | bytes, words: str
) -> None:
    with RunWriter(tmp_path, {}) as writer:
        writer.write(make_rollout("a"))
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(errors.FormatError, match=words):
        open_run(tmp_path)


def deep_metadata(schema: pa.Schema) -> pa.Schema:
    return schema.with_metadata({b"rollout": b"[" * 100_000})


def column_twice(schema: pa.Schema) -> pa.Schema:
    return schema.append(schema.field("seed"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(deep_metadata, "metadata is broken", id="metadata too deep"),
        pytest.param(column_twice, "column seed is missing", id="column twice"),
    ],
)
def test_hostile_schemas_are_refused(
    tmp_path: Path, change: Callable[[pa.Schema], pa.Schema], words: str
) -> None:
    path = tmp_path / "s.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, change(arrow_schema())):
        pass
    with pytest.raises(errors.SchemaMismatch, match=words):
        read_batches(path)


def test_a_name_that_is_not_utf8_is_damage(shard: Path) -> None:
    content = shard.read_bytes()
    shard.write_bytes(content.replace(b"seed\0", b"see\xff\0"))
    with pytest.raises(errors.FormatError, match=r"s\.arrow: "):
        read_batches(shard)

"""ShardFile: complete and readable at every moment of a commit."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from builders import make_rollout

import rollout.shard
from rollout.errors import ShardDamaged
from rollout.schema import to_batch
from rollout.shard import (
    END_OF_STREAM,
    ShardFile,
    count_torn_bytes,
    cut_torn_tail,
    read_batches,
    was_started,
)


def batch(*prompt_ids: str) -> pa.RecordBatch:
    return to_batch([make_rollout(name) for name in prompt_ids])


def ids(path: Path) -> list[str]:
    return [i for b in read_batches(path)[1] for i in b.column("prompt_id").to_pylist()]


def test_a_new_shard_opens_and_is_empty(tmp_path: Path) -> None:
    with ShardFile(tmp_path / "s.arrow"):
        assert ids(tmp_path / "s.arrow") == []
        assert was_started(tmp_path / "s.arrow")


def test_commits_append_and_describe_the_file(tmp_path: Path) -> None:
    path = tmp_path / "s.arrow"
    with ShardFile(path) as shard:
        shard.commit(batch("a", "b"))
        assert ids(path) == ["a", "b"]
        shard.commit(batch("c"))
    content = path.read_bytes()
    assert ids(path) == ["a", "b", "c"]
    assert (shard.rows, shard.size_bytes) == (3, len(content))
    assert shard.sha256 == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("compression", ["none", "zstd", "lz4"])
def test_compression_changes_bytes_not_rows(tmp_path: Path, compression: str) -> None:
    with ShardFile(tmp_path / "s.arrow", compression=compression) as shard:
        shard.commit(batch("a"))
    assert ids(tmp_path / "s.arrow") == ["a"]


def test_readers_see_whole_batches_at_every_step_of_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop after every single byte that a commit writes, and open the file with three readers."""
    path = tmp_path / "s.arrow"
    real_pwrite, seen = os.pwrite, []

    def one_byte(descriptor: int, data: Any, offset: int) -> int:
        done = real_pwrite(descriptor, bytes(data[:97]), offset)  # short writes are legal too
        seen.append(ids(path))
        return done

    with ShardFile(path) as shard:
        shard.commit(batch("a"))
        monkeypatch.setattr(os, "pwrite", one_byte)
        shard.commit(batch("b", "c"))
    assert len(seen) > 10
    assert seen[0] == ["a"] and seen[-1] == ["a", "b", "c"]
    assert all(rows in (["a"], ["a", "b", "c"]) for rows in seen)
    assert datasets.Dataset.from_file(str(path))["prompt_id"][:] == ["a", "b", "c"]


@pytest.mark.parametrize("step", [1, 2], ids=["behind the marker", "over the marker"])
def test_ctrl_c_in_a_commit_leaves_the_shard_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    path = tmp_path / "s.arrow"
    with ShardFile(path) as shard:
        shard.commit(batch("a"))
        before, steps = path.read_bytes(), iter(range(1, 3))

        def interrupted(descriptor: int) -> None:
            if next(steps) == step:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, "fsync", interrupted)
            shard.commit(batch("b"))
        assert path.read_bytes() == before
    assert ids(path) == ["a"]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == shard.sha256


def test_a_map_from_before_a_commit_holds_what_is_committed(tmp_path: Path) -> None:
    """A reader, `datasets` for one, may come to the marker long after it mapped the file."""
    path = tmp_path / "s.arrow"
    with ShardFile(path) as shard:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
            shard.commit(batch("a"))
            assert stream.read_all()["prompt_id"].to_pylist() == ["a"]
        assert path.stat().st_blocks * 512 < 2 * shard.size_bytes  # the rest is a hole
    assert path.stat().st_size == shard.size_bytes


def test_a_reader_that_has_seen_the_marker_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit right behind it overwrites the marker, and the file does not grow."""
    path = tmp_path / "s.arrow"
    with ShardFile(path) as shard:
        shard.commit(batch("a"))
        real = rollout.shard._next_message
        size = path.stat().st_size

        def with_a_commit_behind(file: Any) -> Any:
            message = real(file)
            if message is None and shard.rows == 1:
                shard.commit(batch("b"))
            return message

        monkeypatch.setattr(rollout.shard, "_next_message", with_a_commit_behind)
        assert ids(path) == ["a"]
        assert path.stat().st_size == size
        assert ids(path) == ["a", "b"]


def test_a_torn_tail_is_invisible_and_can_be_cut(tmp_path: Path) -> None:
    path = tmp_path / "s.arrow"
    with ShardFile(path) as shard:
        shard.commit(batch("a"))
    whole = path.read_bytes()
    path.write_bytes(whole + b"\x01" * 300)  # what a killed commit leaves behind the marker
    assert ids(path) == ["a"]
    assert read_batches(path).size_bytes == len(whole)
    assert count_torn_bytes(path, len(whole)) == 300
    cut_torn_tail(path)
    assert path.read_bytes() == whole


def test_the_hole_behind_the_marker_is_not_torn(tmp_path: Path) -> None:
    path = tmp_path / "s.arrow"
    with ShardFile(path, reserved_bytes=3 * 2**20) as shard:
        assert path.stat().st_size == 3 * 2**20
        assert count_torn_bytes(path, shard.size_bytes) == 0
        with open(path, "r+b") as file:
            file.seek(2 * 2**20)
            file.write(b"half a batch")
        assert count_torn_bytes(path, shard.size_bytes) == 2 * 2**20 + 12 - shard.size_bytes


def test_a_file_without_its_schema_was_never_started(tmp_path: Path) -> None:
    (tmp_path / "s.arrow").write_bytes(END_OF_STREAM)
    assert not was_started(tmp_path / "s.arrow")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"", "the file is empty", id="empty"),
        pytest.param(b"ARROW1\0\0" * 20, "not an Arrow IPC stream", id="an IPC file, not a stream"),
        pytest.param(b"{}" * 100, "not an Arrow IPC stream", id="JSON"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "s.arrow").write_bytes(content)
    with pytest.raises(ShardDamaged, match=words):
        read_batches(tmp_path / "s.arrow")


def test_a_stream_that_breaks_off_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.arrow"
    with ShardFile(path) as shard:
        shard.commit(batch("a"))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ShardDamaged, match="breaks off"):
        read_batches(path)

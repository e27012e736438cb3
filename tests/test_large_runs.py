"""Large runs: thousands of shards, and more support ids than 32 bits can count."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from builders import make_rollout

from rollout.errors import ShardDamaged, ShardHashMismatch
from rollout.reader import open_run
from rollout.schema import FIELDS, arrow_schema, shard_name, to_batch
from rollout.support import Support
from rollout.writer import RunWriter

NUM_SHARDS = 2000
linux = pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors and maps in /proc")


@pytest.fixture(scope="module")
def many_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2,000 finished shards of one row, written without the writer's fsyncs."""
    path = tmp_path_factory.mktemp("many")
    with RunWriter(path, {}):
        pass
    lines = []
    for index in range(NUM_SHARDS):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, arrow_schema()) as stream:
            stream.write_batch(to_batch([make_rollout(str(index))]))
        content = sink.getvalue().to_pybytes()
        (path / shard_name(index)).write_bytes(content)
        lines.append({"file": shard_name(index), "sha256": hashlib.sha256(content).hexdigest()})
    (path / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """What `ulimit -n 256` does."""
    gc.collect()  # other tests' files are closed now, not while descriptors are counted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped_shards(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(f"{path}/shard-")


@pytest.mark.stress
@linux
def test_reading_thousands_of_shards_holds_one_at_a_time(
    many_shards: Path, few_descriptors: None
) -> None:
    before = open_descriptors()
    run = open_run(many_shards)
    assert len(run) == NUM_SHARDS
    assert (open_descriptors(), mapped_shards(many_shards)) == (before, 0)
    for count, rollout in enumerate(run, start=1):
        assert rollout.output_ids.tolist() == [9, 8, 2]
        if count % 100 == 0:
            assert open_descriptors() == before
            assert (
                mapped_shards(many_shards) <= 2
            )  # the next one is mapped before this rollout is let go
    assert count == NUM_SHARDS
    del rollout
    assert mapped_shards(many_shards) == 0


@pytest.mark.stress
@linux
def test_continuing_a_run_of_thousands_of_shards(many_shards: Path, few_descriptors: None) -> None:
    before = open_descriptors()
    with RunWriter(many_shards, {}) as writer:
        assert len(writer.done) == NUM_SHARDS
        assert open_descriptors() <= before + 1  # the lock
        assert mapped_shards(many_shards) == 0


def test_damage_in_any_finished_shard_is_found_at_opening(many_shards: Path) -> None:
    path = many_shards / shard_name(NUM_SHARDS - 1)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"because", b"Because"))
    with pytest.raises(ShardHashMismatch, match=path.name):
        open_run(many_shards)
    path.write_bytes(content)


def test_a_run_is_what_it_was_when_it_was_opened(tmp_path: Path) -> None:
    with RunWriter(tmp_path, {}) as writer:
        writer.write(make_rollout("a"))
        writer.commit()
        run = open_run(tmp_path)
        writer.write(make_rollout("b"))
        writer.commit()
        assert (len(run), [r.rollout_id for r in run]) == (1, ["a:0"])
        assert [r.rollout_id for r in open_run(tmp_path)] == ["a:0", "b:0"]


def test_a_shard_that_shrinks_after_opening_is_damage(tmp_path: Path) -> None:
    with RunWriter(tmp_path, {}) as writer:
        writer.write(make_rollout("a"))
    run = open_run(tmp_path)
    shard = tmp_path / shard_name(0)
    with pa.OSFile(str(shard), "wb") as file, pa.ipc.new_stream(file, arrow_schema()):
        pass
    with pytest.raises(ShardDamaged, match="changed since the run was opened"):
        list(run)
    shard.unlink()
    with pytest.raises(ShardDamaged, match="the file is not there"):
        list(run)


def test_supports_are_counted_with_64_bits() -> None:
    for name in ("support_ids", "support_logprobs"):
        assert pa.types.is_large_list(FIELDS.field(name).type)
    ids = np.broadcast_to(np.int32(0), 3 * 2**30)  # 12 GiB that take 4 bytes
    support = Support.from_counts(ids, np.full(3, 2**30, np.int32))
    assert support.offsets.tolist() == [0, 2**30, 2**31, 3 * 2**30]
    assert support[2].shape == (2**30,)


def test_concatenated_supports_pass_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    half = Support.from_counts(np.broadcast_to(np.int32(0), 2**30 + 8), np.array([2**30, 8]))
    real_concatenate = np.concatenate

    def without_copying_ids(arrays: list[np.ndarray]) -> np.ndarray:
        size = sum(len(array) for array in arrays)
        return np.broadcast_to(np.int32(0), size) if size > 2**30 else real_concatenate(arrays)

    monkeypatch.setattr(np, "concatenate", without_copying_ids)
    both = Support.concatenate([half, half])
    assert both.offsets.tolist() == [0, 2**30, 2**30 + 8, 2**31 + 8, 2147483664]

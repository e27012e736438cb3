"""Which libraries open a shard, and what they say where they do not (docs/format.md)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.dataset
import pytest
from builders import make_rollout

from rollout.errors import ShardDamaged
from rollout.reader import open_run
from rollout.schema import to_batch
from rollout.shard import read_batches
from rollout.writer import RunWriter

WANTED = ["a:0", "b:0"]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    with RunWriter(tmp_path / "run", {}) as writer:
        for name in "ab":
            writer.write(make_rollout(name))
    return tmp_path / "run" / "shard-00000.arrow"


def ours(shard: Path) -> list[str]:
    return [r.rollout_id for r in open_run(shard.parent)]


def from_file(shard: Path) -> list[str]:
    return list(datasets.Dataset.from_file(str(shard))["rollout_id"])


def load_from_disk(shard: Path) -> list[str]:
    return list(datasets.load_from_disk(str(shard.parent))["rollout_id"])


def load_dataset(shard: Path) -> list[str]:
    cache = str(shard.parent.parent / "cache")
    loaded = datasets.load_dataset("arrow", data_files=str(shard), split="train", cache_dir=cache)
    return list(loaded["rollout_id"])


def open_stream(shard: Path) -> list[str]:
    with pa.OSFile(str(shard)) as file, pa.ipc.open_stream(file) as stream:
        ids: list[str] = stream.read_all()["rollout_id"].to_pylist()
        return ids


def open_file(shard: Path) -> Any:
    return pa.ipc.open_file(str(shard))


def arrow_dataset(shard: Path) -> Any:
    return pyarrow.dataset.dataset(str(shard), format="ipc")


@pytest.mark.parametrize(
    "opener", [ours, from_file, load_from_disk, load_dataset, open_stream], ids=lambda f: f.__name__
)
def test_these_open_a_shard(shard: Path, opener: Callable[[Path], list[str]]) -> None:
    assert opener(shard) == WANTED


@pytest.mark.parametrize("opener", [open_file, arrow_dataset], ids=lambda f: f.__name__)
def test_these_want_the_file_format(shard: Path, opener: Callable[[Path], Any]) -> None:
    with pytest.raises(pa.ArrowInvalid, match="(?i)not an Arrow file|not.*IPC|magic"):
        opener(shard)


def test_an_ipc_file_gets_a_hint(tmp_path: Path) -> None:
    batch = to_batch([make_rollout("a")])
    path = tmp_path / "s.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(ShardDamaged, match=r"Arrow IPC file \(with a footer\).*new_stream"):
        read_batches(path)

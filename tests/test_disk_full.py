"""A disk that is really full: a clean error, nothing committed lost, and the run goes on."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from builders import make_rollout

from rollout import errors
from rollout.config import ShardsConfig
from rollout.files import append_line, read_lines, write_json
from rollout.reader import open_run
from rollout.record import Rollout
from rollout.schema import to_batch
from rollout.shard import END_OF_STREAM, ShardFile
from rollout.writer import RunWriter

SMALL = ShardsConfig(batch_rows=4, shard_bytes=2**20)


def big_rollout(number: int) -> Rollout:
    """60 KB."""
    ids = np.random.default_rng(number).integers(0, 9, 15_000, np.int32)
    return make_rollout(str(number), prompt_ids=ids)


def stored_ids(path: Path) -> list[str]:
    return [r.rollout_id for r in open_run(path)]


def assert_consistent(path: Path) -> None:
    """Every reader opens it, and no small file is torn or left over."""
    ids = stored_ids(path)
    assert len(set(ids)) == len(ids)
    assert datasets.load_from_disk(str(path))["rollout_id"][:] == ids
    for name in ("manifest.jsonl", "rejected.jsonl", "errors.jsonl"):
        if (path / name).exists():
            assert (path / name).read_bytes()[-1:] in (b"", b"\n")
            list(read_lines(path / name))
    assert not list(path.glob(".*.tmp"))


class CountingWriter(RunWriter):
    """Knows which rollouts `commit` has made durable."""

    committed: frozenset[str] = frozenset()

    def commit(self) -> None:
        super().commit()
        self.committed = frozenset(self.done)


def fill(path: Path) -> int:
    """Write until the disk is full, again and again with a little room; how often it was full."""
    times, room_bytes = 0, 0
    ballast = path / "ballast"
    ballast.write_bytes(bytes(400_000))
    while times < 25:
        writer = CountingWriter(path / "run", {"vocab_size": None}, shards=SMALL)
        try:
            with writer:
                for number in itertools.count(len(writer.done)):
                    writer.write(big_rollout(number))
                    writer.reject(errors.DuplicateIds("x"), b"y" * 5_000)
                    writer.fail(errors.EngineFailed("z" * 3_000))
        except errors.DiskFull as error:
            times += 1
            assert "make room and give the same command again" in str(error)
        if (path / "run" / "state.json").exists():
            assert_consistent(path / "run")
            assert writer.committed <= set(stored_ids(path / "run"))
        # one page more each time: the disk is full at another step of the protocol
        room_bytes += 4096 * (1 + times % 3)
        os.truncate(ballast, max(0, 400_000 - room_bytes))
    return times


def fill_then_go_on(path: Path) -> None:
    times = fill(path)
    before = stored_ids(path / "run")
    (path / "ballast").unlink()
    (path / "run" / "rejected.jsonl").unlink()
    (path / "run" / "errors.jsonl").unlink()
    with RunWriter(path / "run", {"vocab_size": None}, shards=SMALL) as writer:
        assert writer.done == set(before)
        writer.write(make_rollout("last"))
    assert_consistent(path / "run")
    assert sorted(stored_ids(path / "run")) == sorted([*before, "last:0"])
    print(json.dumps({"times": times, "rollouts": len(before)}))


MOUNT = 'mount -t tmpfs -o size=8m none "$1" && shift && exec "$@"'


def in_small_disk(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run `command` where `folder` is a file system of 8 MB that ends with it."""
    return subprocess.run(
        ["unshare", "-rm", "sh", "-c", MOUNT, "sh", str(folder), *command],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.stress
def test_a_full_disk_is_a_clean_error_and_the_run_goes_on(tmp_path: Path) -> None:
    if (probe := in_small_disk(tmp_path, "true")).returncode != 0:
        pytest.skip(f"this kernel lets nobody mount a small tmpfs here: {probe.stderr.strip()}")
    done = in_small_disk(tmp_path, sys.executable, __file__, str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout)
    assert seen["times"] == 25
    assert seen["rollouts"] > 80  # of 60 KB on 8 MB


class FullDisk:
    """`os.pwrite` on a disk with room for so many bytes; markers are overwritten in place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room_bytes: int) -> None:
        self.room_bytes = room_bytes
        self._pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", self)

    def __call__(self, descriptor: int, data: Any, offset: int) -> int:
        if len(data) != 8 or bytes(data[:4]) != END_OF_STREAM[:4]:
            if self.room_bytes == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            data = bytes(data[: self.room_bytes])
            self.room_bytes -= len(data)
        return self._pwrite(descriptor, data, offset)


@pytest.mark.parametrize("room_bytes", [0, 1, 9, 500, 2000])
def test_a_commit_without_room_leaves_the_shard_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room_bytes: int
) -> None:
    path = tmp_path / "s.arrow"
    with ShardFile(path) as shard:
        shard.commit(to_batch([make_rollout("a")]))
        before = path.read_bytes()
        disk = FullDisk(monkeypatch, room_bytes)
        with pytest.raises(errors.DiskFull, match=r"s\.arrow: cannot be written \(No space"):
            shard.commit(to_batch([make_rollout("b")]))
        assert path.read_bytes() == before
        disk.room_bytes = 2**20
        shard.commit(to_batch([make_rollout("c")]))
    assert path.stat().st_size == shard.size_bytes
    assert shard.rows == 2
    assert hashlib.sha256(path.read_bytes()).hexdigest() == shard.sha256


def test_a_line_without_room_is_not_there_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines.jsonl"
    append_line(path, {"n": 1})
    disk = FullDisk(monkeypatch, 5)
    with pytest.raises(errors.DiskFull, match="make room there"):
        append_line(path, {"n": 2})
    assert path.read_text() == '{"n": 1}\n'
    disk.room_bytes = 100
    append_line(path, {"n": 3})
    assert list(read_lines(path)) == [{"n": 1}, {"n": 3}]


def test_a_file_without_room_stays_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(tmp_path / "a.json", {"n": 1})
    FullDisk(monkeypatch, 5)
    with pytest.raises(errors.DiskFull):
        write_json(tmp_path / "a.json", {"n": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert json.loads((tmp_path / "a.json").read_text()) == {"n": 1}


def test_the_error_says_how_far_it_got(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(errors.DiskFull, match="1 rollouts are stored and can be read, 1 more are"),
        RunWriter(tmp_path, {}, shards=ShardsConfig(batch_rows=1)) as writer,
    ):
        writer.write(make_rollout("a"))
        FullDisk(monkeypatch, 0)
        writer.write(make_rollout("b"))
    monkeypatch.undo()
    assert stored_ids(tmp_path) == ["a:0"]
    with RunWriter(tmp_path, {}) as writer:
        writer.write(make_rollout("b"))
    assert stored_ids(tmp_path) == ["a:0", "b:0"]


def test_leaving_the_writer_does_not_hide_the_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt) as caught, RunWriter(tmp_path, {}) as writer:
        writer.write(make_rollout("a"))
        FullDisk(monkeypatch, 0)
        raise KeyboardInterrupt
    (note,) = caught.value.__notes__
    assert "the disk is full; 0 rollouts are stored" in note
    monkeypatch.undo()
    with RunWriter(tmp_path, {}) as writer:  # the lock is free
        assert writer.done == set()


def test_an_interrupted_rejection_does_not_break_the_next_start(tmp_path: Path) -> None:
    """Killed in the middle of a manifest line: the next writer cuts it before it appends."""
    with RunWriter(tmp_path, {}) as writer:
        writer.write(make_rollout("a"))
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_bytes(manifest.read_bytes()[:30])
    with RunWriter(tmp_path, {}) as writer:
        writer.write(make_rollout("b"))
    assert [line["file"] for line in read_lines(manifest)] == [
        "shard-00000.arrow",
        "shard-00001.arrow",
    ]
    assert stored_ids(tmp_path) == ["a:0", "b:0"]


def test_a_line_that_lost_only_its_line_feed_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2}')
    append_line(path, {"n": 3})
    assert path.read_bytes() == b'{"n": 1}\n{"n": 2}\n{"n": 3}\n'


if __name__ == "__main__":
    fill_then_go_on(Path(sys.argv[1]))


COLLECT_TWICE = """
import sys
from pathlib import Path
from click.testing import CliRunner
from cli.main import cli

settings, folder = sys.argv[1], Path(sys.argv[2])
ballast = folder / "ballast"
ballast.write_bytes(bytes(8 * 2**20 - 120_000))
for _ in range(2):
    result = CliRunner().invoke(cli, ["collect", settings, "--out", str(folder / "run")])
    rows = len(list(__import__("rollout").open_run(folder / "run")))
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    print(result.exit_code, rows, len(errors), *errors)
    ballast.unlink(missing_ok=True)
"""


@pytest.mark.stress
def test_rollout_collect_on_a_full_disk_says_one_line_and_goes_on(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    rows = [{"prompt": f"{number} " * 300} for number in range(40)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "model": str(tiny_model_path),
        "prompts": {"dataset": str(tmp_path / "p.jsonl"), "format": "text"},
        "sampling": {"top_k": 8, "max_new_tokens": 2},
        "engine": {"kind": "embedded", "batch_size": 4},
        "shards": {"batch_rows": 1},
    }
    (tmp_path / "c.yaml").write_text(json.dumps(settings))
    folder = tmp_path / "disk"
    folder.mkdir()
    done = in_small_disk(
        folder, sys.executable, "-c", COLLECT_TWICE, str(tmp_path / "c.yaml"), str(folder)
    )
    if done.returncode != 0 and "unshare" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    full, whole = done.stdout.splitlines()
    code, stored, num_errors, words = full.split(" ", 3)
    assert (code, num_errors) == ("5", "1")
    assert 0 < int(stored) < 40
    assert f"the disk is full; {stored} rollouts are stored and can be read" in words
    assert whole.split(" ")[:3] == ["0", "40", "0"]

"""repair: the directory of a killed writer made final, and nothing lost that could be read."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from builders import make_rollout
from test_cli import run

from rollout import errors
from rollout.config import ShardsConfig
from rollout.reader import open_run
from rollout.repair import repair
from rollout.schema import to_batch
from rollout.shard import END_OF_STREAM, ShardFile
from rollout.writer import RunWriter

EVERY_ROW = ShardsConfig(batch_rows=1)


def stored_ids(path: Path) -> list[str]:
    return [rollout.rollout_id for rollout in open_run(path)]


def manifest(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "manifest.jsonl").read_text().splitlines()]


def files(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.iterdir() if p.name != ".lock"}


def actions(path: Path) -> list[tuple[str, int, int]]:
    return [(s.action, s.rows, s.bytes_cut) for s in repair(path).shards]


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """Rollouts a:0, b:0 and c:0, a batch each, in one finished shard."""
    path = tmp_path / "run"
    with RunWriter(path, {}, shards=EVERY_ROW) as writer:
        for name in "abc":
            writer.write(make_rollout(name))
    return path


@pytest.fixture
def killed(finished: Path) -> Path:
    """The same and d:0 in a second shard: no manifest line, half a batch behind its marker."""
    with ShardFile(finished / "shard-00001.arrow") as shard:
        shard.commit(to_batch([make_rollout("d")]))
    with open(finished / "shard-00001.arrow", "ab") as file:
        file.write(b"half a batch")
    return finished


def batch_ends(path: Path) -> list[int]:
    """Offsets behind the schema and behind each batch of a shard of a:0, b:0 and c:0."""
    with ShardFile(path.parent / "probe.arrow") as shard:
        ends = [shard.size_bytes - len(END_OF_STREAM)]
        for name in "abc":
            shard.commit(to_batch([make_rollout(name)]))
            ends.append(shard.size_bytes - len(END_OF_STREAM))
    (path.parent / "probe.arrow").unlink()
    assert ends[-1] + len(END_OF_STREAM) == path.stat().st_size
    return ends


def test_a_finished_run_is_left_alone(finished: Path) -> None:
    before = files(finished)
    done = repair(finished)
    assert (done.lines_cut, done.files_written, done.problems) == ({}, (), ())
    assert [(s.file, s.action, s.rows) for s in done.shards] == [("shard-00000.arrow", "whole", 3)]
    assert files(finished) == before


def test_a_killed_writer_is_finished(killed: Path) -> None:
    assert actions(killed) == [("whole", 3, 0), ("finished", 1, len(b"half a batch"))]
    assert stored_ids(killed) == ["a:0", "b:0", "c:0", "d:0"]
    assert datasets.load_from_disk(str(killed))["prompt_id"][:] == list("abcd")
    shard = (killed / "shard-00001.arrow").read_bytes()
    assert shard.endswith(END_OF_STREAM)
    assert manifest(killed)[1] == {
        "file": "shard-00001.arrow",
        "rows": 1,
        "output_tokens": 3,
        "support_ids": 3,
        "bytes": len(shard),
        "sha256": hashlib.sha256(shard).hexdigest(),
    }
    before = files(killed)
    assert actions(killed) == [("whole", 3, 0), ("whole", 1, 0)]
    assert files(killed) == before, "repaired once is repaired"


def test_a_dry_run_says_the_same_and_changes_nothing(killed: Path) -> None:
    before = files(killed)
    plan = repair(killed, dry_run=True)
    assert files(killed) == before
    assert plan == repair(killed)


def test_a_collect_goes_on_after_a_repair(killed: Path) -> None:
    repair(killed)
    with RunWriter(killed, {}) as writer:
        assert writer.done == {"a:0", "b:0", "c:0", "d:0"}
        writer.write(make_rollout("e"))
    assert stored_ids(killed)[-1] == "e:0"


@pytest.mark.parametrize("is_listed", [True, False], ids=["finished", "not finished"])
@pytest.mark.parametrize(
    ("where", "kept"),
    [
        pytest.param(lambda ends: ends[3] + 5, "abc", id="inside the marker"),
        pytest.param(lambda ends: ends[3], "abc", id="before the marker"),
        pytest.param(lambda ends: ends[3] - 1, "ab", id="last byte of a batch"),
        pytest.param(lambda ends: ends[2] + 3, "ab", id="inside a message head"),
        pytest.param(lambda ends: ends[2], "ab", id="between batches"),
        pytest.param(lambda ends: ends[1] - 100, "", id="inside the first batch"),
        pytest.param(lambda ends: ends[0], "", id="behind the schema"),
    ],
)
def test_a_shard_that_breaks_off_keeps_its_whole_batches(
    finished: Path, where: Callable[[list[int]], int], kept: str, is_listed: bool
) -> None:
    shard = finished / "shard-00000.arrow"
    ends = batch_ends(shard)
    cut = shard.read_bytes()[: where(ends)]
    shard.write_bytes(cut)
    line = manifest(finished)[0]
    if not is_listed:
        (finished / "manifest.jsonl").unlink()
    (done,) = repair(finished).shards
    whole = ends[len(kept)]
    assert (done.action, done.rows, done.bytes_cut) == ("salvaged", len(kept), len(cut) - whole)
    assert stored_ids(finished) == [f"{name}:0" for name in kept]
    assert len(datasets.load_from_disk(str(finished))) == len(kept)
    assert shard.read_bytes() == cut[:whole] + END_OF_STREAM
    assert (finished / "shard-00000.arrow.damaged").read_bytes() == cut
    (now,) = manifest(finished)
    about = {"original": "shard-00000.arrow.damaged", "sha256": hashlib.sha256(cut).hexdigest()}
    assert now["salvaged"] == about | ({"manifest_line": line} if is_listed else {})
    assert actions(finished) == [("whole", len(kept), 0)]


def test_zeros_of_a_lost_write_are_damage(finished: Path) -> None:
    """A file system that was cut off may leave the length of a file without its content."""
    shard = finished / "shard-00000.arrow"
    ends = batch_ends(shard)
    shard.write_bytes(shard.read_bytes()[: ends[2]] + bytes(ends[3] - ends[2] + 8))
    (finished / "manifest.jsonl").unlink()
    assert actions(finished) == [("salvaged", 2, ends[3] - ends[2] + 8)]
    assert stored_ids(finished) == ["a:0", "b:0"]


def test_an_original_hides_no_earlier_one(finished: Path) -> None:
    shard = finished / "shard-00000.arrow"
    (finished / "shard-00000.arrow.damaged").write_bytes(b"of an earlier repair")
    shard.write_bytes(shard.read_bytes()[:-20])
    assert repair(finished).shards[0].original == "shard-00000.arrow.damaged-2"
    assert (finished / "shard-00000.arrow.damaged").read_bytes() == b"of an earlier repair"


@pytest.mark.parametrize("call", range(9))
def test_a_repair_that_is_killed_can_be_run_again(
    killed: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Stop before each fsync, which stand at every step that changes something."""
    shard = killed / "shard-00000.arrow"
    cut = shard.read_bytes()[:-20]
    shard.write_bytes(cut)
    real_fsync, left = os.fsync, [call]

    def fsync(descriptor: int) -> None:
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        real_fsync(descriptor)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "fsync", fsync)
        repair(killed)
    assert repair(killed).problems == ()
    assert stored_ids(killed) == ["a:0", "b:0", "d:0"]
    assert (killed / "shard-00000.arrow.damaged").read_bytes() == cut
    assert not (killed / "shard-00000.arrow.damaged-2").exists()
    assert len(manifest(killed)) == 2


def _change(path: Path) -> None:
    content = bytearray((path / "shard-00000.arrow").read_bytes())
    at = content.index(b"because")
    content[at] ^= 1
    (path / "shard-00000.arrow").write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "action"),
    [
        pytest.param(_change, "changed", id="finished, readable, other bytes"),
        pytest.param(lambda path: (path / "shard-00000.arrow").unlink(), "missing", id="file lost"),
        pytest.param(
            lambda path: (path / "shard-00000.arrow").write_bytes(b"x" * 9000),
            "unreadable",
            id="no schema",
        ),
        pytest.param(
            lambda path: (path / "shard-00000.arrow").write_bytes(b""), "unreadable", id="empty"
        ),
    ],
)
def test_what_only_a_copy_can_bring_back_is_reported_and_not_touched(
    finished: Path, damage: Callable[[Path], Any], action: str
) -> None:
    damage(finished)
    before = files(finished)
    result = run("repair", finished)
    assert result.exit_code == 3
    assert f"Error: {finished}/shard-00000.arrow: {action}, restore it" in result.stderr
    assert files(finished) == before
    with pytest.raises(errors.FormatError):
        list(open_run(finished))


def test_a_shard_without_its_schema_never_had_a_row(finished: Path) -> None:
    (finished / "shard-00001.arrow").write_bytes(END_OF_STREAM)
    assert actions(finished) == [("whole", 3, 0), ("unstarted", 0, 0)]
    assert stored_ids(finished) == ["a:0", "b:0", "c:0"]


def test_a_shard_of_another_format_stops_everything(killed: Path) -> None:
    batch = to_batch([make_rollout("x")]).replace_schema_metadata(
        {b"rollout": b'{"schema_version": 2}'}
    )
    sink = killed / "shard-00002.arrow"
    with pa.OSFile(str(sink), "wb") as file, pa.ipc.new_stream(file, batch.schema) as stream:
        stream.write_batch(batch)
    before = files(killed)
    with pytest.raises(errors.SchemaVersionUnknown, match="version 2"):
        repair(killed)
    assert files(killed) == before


@pytest.mark.parametrize(
    ("tail", "cut", "reasons"),
    [
        pytest.param(b'{"reason": "b', 13, ["a"], id="torn"),
        pytest.param(b'{"reason": "b"}', 0, ["a", "b"], id="only the line feed lost"),
    ],
)
def test_last_lines_are_mended(finished: Path, tail: bytes, cut: int, reasons: list[str]) -> None:
    (finished / "rejected.jsonl").write_bytes(b'{"reason": "a"}\n' + tail)
    assert repair(finished).lines_cut == ({"rejected.jsonl": cut} if cut else {})
    content = (finished / "rejected.jsonl").read_text()
    assert [json.loads(line)["reason"] for line in content.splitlines()] == reasons
    assert content.endswith("\n")


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json"])
def test_small_files_that_are_lost_are_written_again(finished: Path, name: str) -> None:
    wanted = json.loads((finished / name).read_text())
    (finished / name).unlink()
    assert repair(finished).files_written == (name,)
    got = json.loads((finished / name).read_text())
    for document in (wanted, got):
        document.pop("_fingerprint", None)
    assert got == wanted
    assert len(datasets.load_from_disk(str(finished))) == 3


def test_a_broken_state_is_written_again(finished: Path) -> None:
    (finished / "state.json").write_text('{"_data_files": [{"filename": "../elsewhere"}]}')
    assert repair(finished).files_written == ("state.json",)
    assert stored_ids(finished) == ["a:0", "b:0", "c:0"]


def test_a_manifest_that_leads_elsewhere_is_refused(finished: Path) -> None:
    (finished / "manifest.jsonl").write_text('{"file": "../x", "sha256": ""}\n')
    with pytest.raises(errors.FormatError, match=r"manifest.jsonl: file is '../x'"):
        repair(finished)


def test_a_directory_at_work_is_locked(tmp_path: Path) -> None:
    with RunWriter(tmp_path, {}), pytest.raises(errors.RunLocked, match="another process"):
        repair(tmp_path)


def test_no_run_is_not_repaired_into_one(tmp_path: Path) -> None:
    with pytest.raises(errors.NotARun):
        repair(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_the_command_says_what_it_did(killed: Path) -> None:
    shard = killed / "shard-00000.arrow"
    shard.write_bytes(shard.read_bytes()[:-20])
    result = run("repair", killed, "--dry-run", "--json")
    assert (result.exit_code, result.stderr) == (0, "dry run: nothing was changed\n")
    plan = json.loads(result.stdout)
    assert [s["action"] for s in plan["shards"]] == ["salvaged", "finished"]
    result = run("repair", killed)
    cut = plan["shards"][0]["bytes_cut"]
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"shard-00000.arrow  salvaged, 2 rows; {cut} bytes left out, "
        "the whole is shard-00000.arrow.damaged",
        "shard-00001.arrow  finished, 1 rows; 12 bytes cut",
        "state.json  written",
    ]


def test_a_full_disk_is_said_and_the_repair_can_be_run_again(
    killed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = killed / "shard-00000.arrow"
    shard.write_bytes(shard.read_bytes()[:-20])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(errors.DiskFull, match="make room"):
        patch.setattr(os, "replace", full)
        repair(killed)
    repair(killed)
    assert stored_ids(killed) == ["a:0", "b:0", "d:0"]


def test_a_failing_disk_is_no_damage(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output error"):
        patch.setattr(pa.ipc, "read_record_batch", broken)
        repair(finished)
    assert actions(finished) == [("whole", 3, 0)]


@pytest.mark.parametrize(
    ("cut_bytes", "rows"),
    [pytest.param(0, 9, id="killed before it was closed"), pytest.param(30, 6, id="tail cut")],
)
def test_three_batches_of_three_give_what_is_whole(
    tmp_path: Path, cut_bytes: int, rows: int
) -> None:
    """An unfinished shard in the middle of its commit life, or without its last 30 bytes."""
    with RunWriter(tmp_path / "run", {}):
        pass
    (tmp_path / "run" / "manifest.jsonl").unlink()
    shard = tmp_path / "run" / "shard-00000.arrow"
    with ShardFile(shard) as written:
        for batch in range(3):
            names = (f"{batch}{row}" for row in range(3))
            written.commit(to_batch([make_rollout(name) for name in names]))
    os.truncate(shard, shard.stat().st_size - cut_bytes)
    assert repair(tmp_path / "run").shards[0].rows == rows
    assert len(stored_ids(tmp_path / "run")) == rows

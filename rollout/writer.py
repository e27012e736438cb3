"""RunWriter: the only thing that changes a run directory."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollout import schema
from rollout.config import ShardsConfig
from rollout.directory import (
    locked,
    manifest_line,
    numbered_shards,
    read_manifest,
    write_dataset_info,
    write_state,
)
from rollout.errors import (
    BadRolloutId,
    ConfigChanged,
    DiskFull,
    RolloutError,
    ShardDamaged,
)
from rollout.files import append_line, disk_full_is_an_error, read_json, write_json
from rollout.record import Rollout
from rollout.rules import check_content, check_format
from rollout.shard import (
    ShardFile,
    check_sha256,
    cut_torn_tail,
    read_batches,
    was_started,
)
from rollout.text import make_storable


class RunWriter:
    """Writes rollouts into a run directory, each at most once; a context manager.

    `identity` goes to run.json when the directory is new. On a directory that exists it must be
    equal to what stands there, or `ConfigChanged` tells the difference; writing then continues in a
    new shard, and `done` holds the ids that are already stored.

    Leaving the context commits what is pending, also after an error: it was checked when it came.

    `DiskFull` leaves a directory that can be read, with every rollout that was committed. What was
    pending stays pending: after room was made, writing can go on, here or in another process.
    """

    def __init__(
        self,
        path: Path,
        identity: Mapping[str, Any],
        *,
        shards: ShardsConfig | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.path = path
        self.done: set[str] = set()
        self._identity = dict(identity)
        self._config = shards or ShardsConfig()
        self._vocab_size = vocab_size
        self._lock = ExitStack()
        self._shard: ShardFile | None = None
        self._names: list[str] = []  # of shards, for state.json
        self._next_shard = 0
        self._pending: list[Rollout] = []
        self._pending_bytes = 0
        self._pending_since = 0.0

    def __enter__(self) -> Self:
        with ExitStack() as entered:
            with disk_full_is_an_error(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                busy = "another process is writing here; wait, or choose another --out"
                entered.enter_context(locked(self.path, busy=busy))
            with self._disk_full_says_how_far():
                self._claim_directory()
                self._finish_earlier_shards()
                if self._names:
                    write_state(self.path, self._names)
                else:
                    self._start_shard()  # so that readers can open the run before the first commit
            self._lock = entered.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.commit()
            if self._shard is not None:
                with self._disk_full_says_how_far():
                    self._finish_shard(self._shard)
        except DiskFull as full:
            if error is None:
                raise
            error.add_note(str(full))  # the first error is the one to act on
        finally:
            if self._shard is not None:
                self._shard.close()
            self._lock.close()

    def write(self, rollout: Rollout) -> None:
        """Store `rollout`; raises the `DataError` of the first rule it breaks and stores nothing.

        Durable after the next `commit`, which happens by itself at the limits of `ShardsConfig`.
        """
        rollout = make_storable(rollout)
        check_format(rollout)
        check_content(rollout, self._vocab_size)
        if rollout.rollout_id in self.done:
            raise BadRolloutId(
                f"{rollout.rollout_id}: already stored in {self.path}; choose another --out"
            )
        self.done.add(rollout.rollout_id)
        if not self._pending:
            self._pending_since = time.monotonic()
        self._pending.append(rollout)
        self._pending_bytes += _size(rollout)
        if (
            len(self._pending) >= self._config.batch_rows
            or self._pending_bytes >= self._config.batch_bytes
        ):
            self.commit()
        else:
            self.commit_if_old()

    def commit_if_old(self) -> None:
        """Commit if the oldest pending rollout waits for `batch_age_s`."""
        age_s = time.monotonic() - self._pending_since
        if self._pending and age_s >= self._config.batch_age_s:
            self.commit()

    def commit(self) -> None:
        """Make everything written so far durable and visible to readers."""
        if not self._pending:
            return
        with self._disk_full_says_how_far():
            shard = self._shard or self._start_shard()
            shard.commit(schema.to_batch(self._pending))
            self._pending, self._pending_bytes = [], 0
            if shard.size_bytes >= self._config.shard_bytes:
                self._finish_shard(shard)
            write_state(self.path, self._names)

    def reject(
        self, error: RolloutError, body: bytes | None, *, reason: str | None = None, **about: Any
    ) -> None:
        """Keep a reply that broke a rule: its reason, and the bytes as they came.

        The reason is the code of `error`, or one that explains it: then the code stays as `rule`.
        """
        if reason not in (None, error.code):
            about = {"reason": reason, "rule": error.code} | about
        self._note(schema.REJECTED_FILE, error, about, _as_text(body))

    def fail(self, error: RolloutError, **about: Any) -> None:
        """Note a rollout that could not be had."""
        self._note(schema.ERRORS_FILE, error, about, {})

    def _note(
        self, file: str, error: RolloutError, about: dict[str, Any], body: dict[str, str]
    ) -> None:
        line = {"reason": error.code, "message": str(error), **about, "created_us": now_us()}
        with self._disk_full_says_how_far():
            append_line(self.path / file, line | body)

    @contextmanager
    def _disk_full_says_how_far(self) -> Iterator[None]:
        try:
            yield
        except DiskFull as error:
            stored = len(self.done) - len(self._pending)
            raise DiskFull(
                f"{self.path}: the disk is full; {stored} rollouts are stored and can be read, "
                f"{len(self._pending)} more are not; make room and give the same command again, "
                f"it goes on from there ({error})"
            ) from error

    def _claim_directory(self) -> None:
        path = self.path / schema.RUN_FILE
        if not (self.path / schema.DATASET_INFO_FILE).exists():
            write_dataset_info(self.path)
        if path.exists():
            _refuse_difference(read_json(path), self._identity, self.path)
            return
        run = {
            "schema_version": schema.SCHEMA_VERSION,
            "run_id": uuid.uuid4().hex,
            "created_us": now_us(),
            "writer": f"rollout {version('rollout')}",
        }
        write_json(path, run | self._identity)

    def _finish_earlier_shards(self) -> None:
        """Earlier processes' shards: cut torn tails, complete the manifest, learn what is done."""
        manifest = read_manifest(self.path)
        for index, path in numbered_shards(self.path):
            if not was_started(path) and path.name not in manifest:
                continue  # no schema, so never a row: its name is used again
            if path.name in manifest:
                check_sha256(path, manifest[path.name]["sha256"])
            else:
                cut_torn_tail(path)
                self._list_shard(path)
            for batch in read_batches(path).batches:
                self.done.update(batch.column("rollout_id").to_pylist())
            self._names.append(path.name)
            self._next_shard = index + 1
        if lost := sorted(manifest.keys() - set(self._names)):
            raise ShardDamaged(
                f"{self.path / lost[0]}: listed in the manifest, but the file is not there; "
                "restore it from where it was copied"
            )

    def _start_shard(self) -> ShardFile:
        """A new shard, named in state.json before the first row is in it."""
        path = self.path / schema.shard_name(self._next_shard)
        shard = ShardFile(
            path,
            compression=self._config.compression,
            reserved_bytes=self._config.shard_bytes + 2 * self._config.batch_bytes,
        )
        try:
            write_state(self.path, [*self._names, path.name])
        except (RolloutError, OSError):
            shard.close()  # nobody has seen it; its name is used again
            raise
        self._shard = shard
        self._names.append(path.name)
        self._next_shard += 1
        return shard

    def _finish_shard(self, shard: ShardFile) -> None:
        self._shard = None  # whatever follows: a shard without its line is only unfinished
        shard.close()
        self._list_shard(shard.path, shard.sha256)

    def _list_shard(self, path: Path, sha256: str | None = None) -> None:
        append_line(self.path / schema.MANIFEST_FILE, manifest_line(path, sha256))


def now_us() -> int:
    """Microseconds since the epoch."""
    return time.time_ns() // 1000


def _size(rollout: Rollout) -> int:
    """Bytes of a row, roughly: its arrays."""
    optional = (rollout.full_logprobs, rollout.support_logprobs)
    return (
        rollout.prompt_ids.nbytes
        + 13 * rollout.num_output_tokens
        + rollout.support.ids.nbytes
        + sum(array.nbytes for array in optional if array is not None)
    )


def _as_text(body: bytes | None) -> dict[str, str]:
    if body is None:
        return {}
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


def _refuse_difference(old: Mapping[str, Any], new: Mapping[str, Any], path: Path) -> None:
    before, after = _flatten({k: old.get(k) for k in new}), _flatten(new)
    changed = [
        f"  {key}: {before.get(key)!r} there, {after.get(key)!r} now"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]
    if changed:
        raise ConfigChanged(
            f"{path}: was started with other settings; use them again, or choose another --out\n"
            + "\n".join(changed)
        )


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    return {
        key: leaf
        for name, child in value.items()
        for key, leaf in _flatten(child, f"{prefix}.{name}" if prefix else str(name)).items()
    }

"""RunWriter: the only thing that changes a run directory."""

from __future__ import annotations

import base64
import hashlib
import time
import uuid
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from rollout import schema
from rollout.config import ShardsConfig
from rollout.errors import BadRolloutId, ConfigChanged, RolloutError, RunLocked
from rollout.files import append_line, read_json, read_lines, write_json
from rollout.record import Rollout
from rollout.rules import check_content, check_format
from rollout.shard import ShardFile, cut_torn_tail, read_batches, sync_directory, was_started


class RunWriter:
    """Writes rollouts into a run directory, each at most once; a context manager.

    `identity` goes to run.json when the directory is new. On a directory that exists it must be
    equal to what stands there, or `ConfigChanged` tells the difference; writing then continues in a
    new shard, and `done` holds the ids that are already stored.

    Leaving the context commits what is pending, also after an error: it was checked when it came.
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
        self._lock = FileLock(path / ".lock")
        self._shard: ShardFile | None = None
        self._next_shard = 0
        self._pending: list[Rollout] = []
        self._pending_bytes = 0
        self._pending_since = 0.0

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise RunLocked(
                f"{self.path}: another process is writing here; wait, or choose another --out"
            ) from None
        try:
            self._claim_directory()
            self._finish_earlier_shards()
            if self._next_shard == 0:
                self._start_shard()  # so that readers can open the run before the first commit
            self._write_state()
        except RolloutError:
            self._lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.commit()
            if self._shard is not None:
                self._finish_shard(self._shard)
        finally:
            self._lock.release()

    def write(self, rollout: Rollout) -> None:
        """Store `rollout`; raises the `DataError` of the first rule it breaks and stores nothing.

        Durable after the next `commit`, which happens by itself at the limits of `ShardsConfig`.
        """
        check_format(rollout)
        check_content(rollout, self._vocab_size)
        if rollout.rollout_id in self.done:
            raise BadRolloutId(f"{rollout.rollout_id}: already stored in {self.path}")
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
        shard = self._shard or self._start_shard()
        shard.commit(schema.to_batch(self._pending))
        self._pending, self._pending_bytes = [], 0
        if shard.size_bytes >= self._config.shard_bytes:
            self._finish_shard(shard)
        self._write_state()

    def reject(self, error: RolloutError, body: bytes | None, **about: Any) -> None:
        """Keep a reply that broke a rule: its reason, and the bytes as they came."""
        line = {"reason": error.code, "message": str(error), **about, "created_us": now_us()}
        append_line(self.path / schema.REJECTED_FILE, line | _as_text(body))

    def fail(self, error: RolloutError, **about: Any) -> None:
        """Note a rollout that could not be had."""
        line = {"reason": error.code, "message": str(error), **about, "created_us": now_us()}
        append_line(self.path / schema.ERRORS_FILE, line)

    def _claim_directory(self) -> None:
        path = self.path / schema.RUN_FILE
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
        write_json(self.path / "dataset_info.json", {"features": schema.hf_features()})
        sync_directory(self.path)

    def _finish_earlier_shards(self) -> None:
        """Earlier processes' shards: cut torn tails, complete the manifest, learn what is done."""
        listed = {line["file"] for line in read_lines(self.path / schema.MANIFEST_FILE)}
        for path in sorted(self.path.glob("shard-*.arrow")):
            self._next_shard = int(path.stem.removeprefix("shard-")) + 1
            if not was_started(path):
                self._next_shard -= 1  # no schema, so never a row: its name is used again
                continue
            if path.name not in listed:
                cut_torn_tail(path)
                self._list_shard(path, hashlib.sha256(path.read_bytes()).hexdigest())
            for batch in read_batches(path)[1]:
                self.done.update(batch.column("rollout_id").to_pylist())

    def _start_shard(self) -> ShardFile:
        path = self.path / schema.shard_name(self._next_shard)
        self._shard = ShardFile(path, compression=self._config.compression)
        self._next_shard += 1
        return self._shard

    def _finish_shard(self, shard: ShardFile) -> None:
        shard.close()
        self._list_shard(shard.path, shard.sha256)
        self._shard = None

    def _list_shard(self, path: Path, sha256: str) -> None:
        batches = read_batches(path)[1]
        line = {
            "file": path.name,
            "rows": sum(b.num_rows for b in batches),
            "output_tokens": sum(len(b.column("output_ids").flatten()) for b in batches),
            "support_ids": sum(len(b.column("support_ids").flatten()) for b in batches),
            "bytes": path.stat().st_size,
            "sha256": sha256,
        }
        append_line(self.path / schema.MANIFEST_FILE, line)

    def _write_state(self) -> None:
        """What `datasets.load_from_disk` reads; a new fingerprint, or it would serve old caches."""
        state: dict[str, Any] = {
            "_data_files": [
                {"filename": schema.shard_name(index)} for index in range(self._next_shard)
            ],
            "_fingerprint": uuid.uuid4().hex[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": "train",
        }
        write_json(self.path / "state.json", state)


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

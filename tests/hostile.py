"""Mutate shards, open them, and say what came of each; a script, so that a crash is seen as one.

    python tests/hostile.py FOLDER FIRST LAST

One line per seed: a letter for the unfinished shard (no manifest line, so no hash protects it),
one for the finished shard. `=` the rollouts as they were written, `!` a typed refusal, `~` other
rollouts, which pass the rules. Whatever else happens ends the script.
"""

from __future__ import annotations

import random
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from builders import make_rollout

from rollout.config import ShardsConfig
from rollout.errors import DataError
from rollout.reader import open_run
from rollout.record import Rollout
from rollout.rules import check_format
from rollout.support import Support
from rollout.writer import RunWriter

HEADROOM_BYTES = 400 * 2**20  # of address space: no mutation may ask for more
ONE_SHARD_S = 5
SHARD = "shard-00000.arrow"


def rollouts() -> list[Rollout]:
    """Eight, no two alike: nulls, an empty output, a support of thousands."""
    bare = {"full_logprobs": None, "support_logprobs": None, "seed": None, "stop_match": None}
    nothing = make_rollout(
        "empty",
        output_ids=np.zeros(0, np.int32),
        loss_mask=np.zeros(0, np.int8),
        sampling_logprobs=np.zeros(0, np.float32),
        support=Support.from_rows([]),
        weight_versions=(),
        **bare,
    )
    wide = make_rollout(
        "wide",
        output_ids=np.array([7], np.int32),
        loss_mask=np.ones(1, np.int8),
        sampling_logprobs=np.log(np.array([1 / 3000], np.float32)),
        support=Support.from_rows([range(3000)]),
        weight_versions=(),
        **bare,
    )
    plain = [make_rollout(name, output_text="é" * i) for i, name in enumerate("abcde")]
    return [*plain, make_rollout("bare", **bare), nothing, wide]


def overwrite_integer(data: bytearray, rng: random.Random) -> None:
    """A length, count or offset that is out of range, or asks for terabytes."""
    width = rng.choice([4, 8])
    top = 2 ** (8 * width - 1)
    value = rng.choice([-1, -8, 0, 1, top - 1, top - 8, -top, top // 2, 2 ** (8 * width - 12)])
    at = 4 * rng.randrange((len(data) - width) // 4)
    data[at : at + width] = value.to_bytes(width, "little", signed=True)


def flip_a_bit(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def replace_bytes(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.randint(2, 20)):
        data[rng.randrange(len(data))] = rng.randrange(256)


def cut_a_range(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    del data[start : start + rng.randint(1, 256)]


def swap_ranges(data: bytearray, rng: random.Random) -> None:
    size = rng.randint(1, 128)
    a, b = sorted(rng.sample(range(len(data) - size), 2))
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]


def cut_the_tail(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def repeat_a_range(data: bytearray, rng: random.Random) -> None:
    """Sometimes exactly a message: a batch twice."""
    starts = [i for i in range(0, len(data), 8) if data[i : i + 4] == b"\xff" * 4]
    start, end = sorted(rng.sample([*starts, rng.randrange(len(data))], 2))
    data[end:end] = data[start:end]


MUTATIONS: list[Callable[[bytearray, random.Random], None]] = [
    overwrite_integer,
    overwrite_integer,
    flip_a_bit,
    replace_bytes,
    cut_a_range,
    swap_ranges,
    cut_the_tail,
    repeat_a_range,
]


def main() -> None:
    folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    runs = []
    for compression in ("none", "none", "none", "zstd", "lz4"):
        run = folder / f"{first}-{len(runs)}-{compression}"
        config = ShardsConfig(batch_rows=3, compression=compression)
        with RunWriter(run, {}, shards=config) as writer:
            for rollout in rollouts():
                writer.write(rollout)
        runs.append((run, (run / SHARD).read_bytes(), (run / "manifest.jsonl").read_bytes()))
    as_written = [_fields(r) for r in open_run(runs[0][0])]
    _limit_memory()
    for seed in range(first, last):
        rng = random.Random(seed)
        run, shard, manifest = rng.choice(runs)
        data = bytearray(shard)
        rng.choice(MUTATIONS)(data, rng)
        print(seed, end=" ", flush=True)  # before it is tried: a crash names its seed
        signal.alarm(ONE_SHARD_S)
        (run / SHARD).write_bytes(data)
        (run / "manifest.jsonl").unlink(missing_ok=True)
        print(_outcome(run, as_written), end=" ")
        (run / "manifest.jsonl").write_bytes(manifest)
        print(_outcome(run, as_written))
        signal.alarm(0)


def _outcome(run: Path, as_written: list[tuple[object, ...]]) -> str:
    try:
        got = list(open_run(run))
    except DataError as error:
        assert str(run) in str(error) or SHARD in str(error), f"does not say where: {error}"
        return "!"
    for rollout in got:
        check_format(rollout)
    return "=" if [_fields(r) for r in got] == as_written else "~"


def _fields(rollout: Rollout) -> tuple[object, ...]:
    """Every value, comparable."""
    values = vars(rollout) | {"ids": rollout.support.ids, "offsets": rollout.support.offsets}
    del values["support"]
    return tuple(v.tobytes() if isinstance(v, np.ndarray) else v for v in values.values())


def _limit_memory() -> None:
    status = Path("/proc/self/status").read_text()
    used_kib = next(int(line.split()[1]) for line in status.splitlines() if "VmSize" in line)
    limit = 1024 * used_kib + HEADROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()

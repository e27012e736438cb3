"""compare(): two runs or two reports, settings first, then numbers beyond a tolerance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rollout.errors import ConfigError, NotARun, ShardDamaged
from rollout.files import read_json
from rollout.reader import open_run
from rollout.schema import REPORTS_DIR, RUN_FILE
from rollout.stats import run_stats

Flat = dict[str, Any]

SUMMARY_FILE, TOKENS_FILE = "summary.json", "tokens.arrow"
RTOL, ATOL = 0.01, 1e-6
WORST = 5
# what a report says of itself, and what it says twice
_NOT_NUMBERS = {"run_id", "created_us", "gates", "precision", "metrics", "failed_gates"}
# of a run: who it is, and how fast it was
_NOT_SETTINGS = {"run_id", "created_us"}
_TIMINGS = {"latency_ms", "bytes_per_token", "attempts", "last_command"}


@dataclass(frozen=True)
class Side:
    """One of two things to compare, flattened: keys such as `log_ratio_abs.mean`."""

    name: str
    settings: Flat
    numbers: Flat
    tokens: Path | None = None  # tokens.arrow of a report
    kind: str = "report"  # or run


@dataclass(frozen=True)
class Difference:
    """One key whose values differ; None where a side does not have it."""

    key: str
    a: Any
    b: Any
    change: float | None  # b - a, of numbers


@dataclass(frozen=True)
class TokenDifference:
    """The policy's logprobs of the tokens that both reports have, over the supports, in nats."""

    tokens: int  # in both, with a finite score on both sides
    unmatched: int  # in one of them only, or without a score
    mean: float | None  # of the absolute differences
    max: float | None
    differs: bool
    worst: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Diff:
    """`same` is about numbers and tokens; settings explain, and decide nothing."""

    a: str
    b: str
    rtol: float
    atol: float
    settings: tuple[Difference, ...]
    numbers: tuple[Difference, ...]
    compared: int  # numbers
    tokens: TokenDifference | None

    @property
    def same(self) -> bool:
        return not self.numbers and not (self.tokens and self.tokens.differs)

    def as_dict(self) -> dict[str, Any]:
        return {"same": self.same, **asdict(self)}


def compare(a: Side, b: Side, rtol: float = RTOL, atol: float = ATOL) -> Diff:
    """What differs between `a` and `b`.

    Fractions and means are the same within atol + rtol * the larger of both; counts and words only
    when they are equal. Raises `ConfigError` for a run beside a report.
    """
    if a.kind != b.kind:
        raise ConfigError(
            f"{a.name} is a {a.kind} and {b.name} a {b.kind}: they have no numbers in common; "
            "give two runs or two reports"
        )
    keys = [*a.numbers, *(key for key in b.numbers if key not in a.numbers)]
    numbers = [_difference(key, a.numbers, b.numbers) for key in keys]
    settings = [*a.settings, *(key for key in b.settings if key not in a.settings)]
    differing = (_difference(key, a.settings, b.settings) for key in settings)
    return Diff(
        a=a.name,
        b=b.name,
        rtol=rtol,
        atol=atol,
        settings=tuple(d for d in differing if d.a != d.b),
        numbers=tuple(d for d in numbers if not _same(d.a, d.b, rtol, atol)),
        compared=len(keys),
        tokens=_compare_tokens(a.tokens, b.tokens, rtol, atol) if a.tokens and b.tokens else None,
    )


def load_side(path: Path) -> Side:
    """A run directory, a report folder or a summary.json; raises `NotARun` for anything else."""
    if path.is_file():
        return _report(path)
    if (path / SUMMARY_FILE).is_file():
        return _report(path / SUMMARY_FILE)
    if (path / RUN_FILE).is_file():
        return _run(path)
    raise NotARun(f"{path}: neither a run directory, nor a report of `rollout replay`")


def newest_report(run: Path) -> Path | None:
    """The folder of the last report of a run, where there is one."""
    found = sorted(file.parent for file in (run / REPORTS_DIR).glob(f"*/{SUMMARY_FILE}"))
    return found[-1] if found else None


def with_reports(a: Side, b: Side, path_a: Path, path_b: Path) -> tuple[Side, Side]:
    """Two runs with the numbers of their newest reports beside their own, if both have one."""
    reports = newest_report(path_a), newest_report(path_b)
    if not (path_a / RUN_FILE).is_file() or not (path_b / RUN_FILE).is_file():
        return a, b
    if reports[0] is None or reports[1] is None:
        return a, b
    first, second = (
        Side(
            name=f"{side.name} (report {report.name})",
            settings=side.settings | _prefixed("report", found.settings),
            numbers=side.numbers | _prefixed("report", _without_engine(found.numbers)),
            tokens=found.tokens,
            kind=side.kind,
        )
        for side, report in zip((a, b), reports, strict=True)
        if report is not None
        for found in [_report(report / SUMMARY_FILE)]
    )
    return first, second


def _report(path: Path) -> Side:
    summary = read_json(path)
    if "verdict" not in summary:
        raise NotARun(f"{path}: no report of `rollout replay`: it has no verdict")
    gates = summary.get("gates", {})
    settings = _flat(
        {
            "precision": summary.get("precision", {}),
            "gates": {name: gate["limit"] for name, gate in gates.items()},
            "run_id": summary.get("run_id"),
        }
    )
    numbers = {key: value for key, value in summary.items() if key not in _NOT_NUMBERS}
    # rows near a border change class with the last bit of a logit; the share that counts does not
    audit = numbers.pop("audit", None) or {}
    numbers["audit"] = {k: v for k, v in audit.items() if k == "inconsistent_at_least"}
    numbers["findings"] = {f["code"]: f["count"] for f in numbers.pop("findings", None) or ()}
    numbers["diagnoses"] = _by_code(numbers.pop("diagnoses", None) or ())
    tokens = path.parent / TOKENS_FILE
    return Side(str(path.parent), settings, _flat(numbers), tokens if tokens.is_file() else None)


def _by_code(diagnoses: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Where each cause is, in words: one code may be in several places."""
    places: dict[str, list[str]] = {}
    for entry in diagnoses:
        places.setdefault(entry["code"], []).append(entry["scope"]["where"])
    return {code: "; ".join(sorted(where)) for code, where in places.items()}


def _run(path: Path) -> Side:
    info = open_run(path).info
    settings = {key: value for key, value in info.items() if key not in _NOT_SETTINGS}
    stats = {key: value for key, value in run_stats(path).items() if key not in _TIMINGS}
    return Side(str(path), _flat(settings), _flat(stats), kind="run")


def _flat(value: Mapping[str, Any], before: str = "") -> Flat:
    flat: Flat = {}
    for key, entry in value.items():
        if isinstance(entry, Mapping):
            flat |= _flat(entry, f"{before}{key}.")
        else:
            flat[f"{before}{key}"] = entry
    return flat


def _without_engine(numbers: Flat) -> Flat:
    """What a run says of its engine, its report repeats."""
    return {key: value for key, value in numbers.items() if not key.startswith("engine_check.")}


def _prefixed(name: str, flat: Flat) -> Flat:
    return {f"{name}.{key}": value for key, value in flat.items()}


def _difference(key: str, a: Flat, b: Flat) -> Difference:
    x, y = a.get(key), b.get(key)
    both = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (x, y))
    return Difference(key, x, y, y - x if both and x is not None and y is not None else None)


def _same(a: Any, b: Any, rtol: float, atol: float) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return bool(abs(a - b) <= atol + rtol * max(abs(a), abs(b)))
    return bool(a == b)


def _compare_tokens(a: Path, b: Path, rtol: float, atol: float) -> TokenDifference | None:
    """None where the reports are of different tokens."""
    keys = ["rollout_id", "position", "token_id"]
    tables = [_read(path, [*keys, "replay_logprobs"]) for path in (a, b)]
    joined = tables[0].join(tables[1], keys, join_type="inner", right_suffix="_b")
    if not joined.num_rows:
        return None
    x = joined["replay_logprobs"].to_numpy().astype(np.float64)
    y = joined["replay_logprobs_b"].to_numpy().astype(np.float64)
    finite = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    unmatched = tables[0].num_rows + tables[1].num_rows - 2 * len(finite)
    if not len(finite):
        return TokenDifference(0, unmatched, None, None, False, ())
    gap = np.abs(x[finite] - y[finite])
    scale = np.maximum(np.abs(x[finite]), np.abs(y[finite])).mean()
    worst = finite[np.argsort(-gap, kind="stable")[:WORST]]
    return TokenDifference(
        tokens=len(finite),
        unmatched=unmatched,
        mean=float(gap.mean()),
        max=float(gap.max()),
        differs=bool(gap.mean() > atol + rtol * scale),
        worst=tuple(
            {key: joined[key][int(i)].as_py() for key in keys}
            | {"a": float(x[i]), "b": float(y[i])}
            for i in worst
        ),
    )


def _read(path: Path, columns: list[str]) -> pa.Table:
    try:
        with pa.memory_map(str(path)) as source:
            return pa.ipc.open_stream(source).read_all().select(columns)
    except (pa.ArrowException, OSError, KeyError) as error:
        raise ShardDamaged(f"{path}: not the tokens.arrow of a report ({error})") from error

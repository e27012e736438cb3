"""replay_run(): what `rollout replay` does, from a run directory to a report."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from replay.config import ReplayConfig
from replay.html import render_page
from replay.other_prompts import other_prompts
from replay.policy import Policy
from replay.report import Report, make_report
from replay.strips import StripCollector
from replay.tokens import TokenTable
from replay.verify import verify
from rollout.errors import ConfigError, NotARun
from rollout.files import write_json
from rollout.inspection import Decode, is_other_vocabulary, make_decode, view_run
from rollout.prompts import load_tokenizer
from rollout.reader import Run, open_run
from rollout.schema import REPORTS_DIR


def replay_run(
    path: str | Path,
    model: str,
    config: ReplayConfig | None = None,
    on_progress: Callable[[int, int, int], None] = lambda done, total, tokens: None,
) -> tuple[Report, Path]:
    """Replay the run directory `path` under `model` and write the report into it.

    Returns the report and its folder, reports/<id>/. `on_progress` hears rollouts done, rollouts in
    all, and tokens scored. Raises `FormatError` for a damaged run, `NotARun` for one without a
    sampled token, `PolicyError` and `ConfigError` for a model that cannot be used,
    `PolicyOutOfMemory` for a device that is too small.
    """
    config = config or ReplayConfig()
    run = open_run(path)
    rollouts = list(run)
    if not any(len(r.support.ids) for r in rollouts):
        raise NotARun(f"{path}: no sampled token in it, so nothing to replay")
    policy = Policy.load(
        model,
        dtype=config.dtype,
        device=resolve_device(config.device),
        trust_remote_code=config.trust_remote_code,
        packed=config.max_tokens > 1,
    )
    done = tokens = 0

    def on_batch(more_rollouts: int, more_tokens: int) -> None:
        nonlocal done, tokens
        done, tokens = done + more_rollouts, tokens + more_tokens
        on_progress(done, len(rollouts), tokens)

    strips = StripCollector(rollouts)
    verified = verify(rollouts, policy, config, on_batch, strips.add, other_prompts(model))
    precision = policy.description | {"head_dtype": config.head_dtype}
    report = make_report(verified, config.gates, precision)
    about = {"run_id": run.info.get("run_id"), "created_us": time.time_ns() // 1000}
    page = render_page(
        report.as_dict(),
        verified,
        rollouts,
        strips.strips(),
        _decode(run, model),
        {"name": Path(path).resolve().name, "run": view_run(run, limit=0)["run"]},
    )
    return report, write_report(Path(path), report, verified.tokens, about, page)


def resolve_device(name: str) -> str:
    """The device that "auto" means here; any other name is taken as it is."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _decode(run: Run, model: str) -> Decode | None:
    """Texts of ids, where the model has the tokenizer that made them."""
    try:
        tokenizer = load_tokenizer(model)
    except ConfigError:
        return None
    return None if is_other_vocabulary(run, tokenizer) else make_decode(tokenizer)


def write_report(
    run_path: Path, report: Report, tokens: TokenTable, about: dict[str, Any], page: str
) -> Path:
    """Write reports/<id>/ with tokens.arrow, report.html and, last, summary.json; returns it."""
    folder = run_path / REPORTS_DIR / f"{datetime.now(UTC):%Y%m%dT%H%M%S-%f}-{uuid.uuid4().hex[:6]}"
    folder.mkdir(parents=True)
    table = tokens.to_arrow()
    path = str(folder / "tokens.arrow")
    with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    (folder / "report.html").write_text(page, encoding="utf-8")
    write_json(folder / "summary.json", about | report.as_dict())
    return folder

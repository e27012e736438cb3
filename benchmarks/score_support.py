"""Scoring over recorded supports beside masked logits, other projects' ways and dense kernels.

    python benchmarks/score_support.py [--quick] [--minutes 8] [--out runs/score_support]
    python benchmarks/score_support.py --only ' 4096 real' --only 'uniform .*score_support$'
    python benchmarks/score_support.py --cpu
    python benchmarks/score_support.py --markdown runs/score_support/score_support.json

--only takes what it finds in "{head} {tokens} {supports} {way}". The last prints the tables of
docs/performance.md from what an earlier run has written.

Prints a row as soon as it is measured and writes all of them to score_support.json, with a picture
beside it. Times are medians of the device's time, with the caches cold and the launches hidden;
`wall` is what one call takes when nothing is queued. `gather` is the share of the time in which a
copy of this run would move each head row that a support of two ids or more names, and its hidden
state, once: (E' + T') * 2D bytes. `floor` of a forward and backward adds what the backward must
move: 3T' rows for dh, E' and V for dense dW.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import support_rivals as rivals
import torch
from support_exact import Exact, exact_over_supports, exact_over_vocabulary
from support_inputs import Batch, Shape, make_batch, make_supports, make_weight
from support_markdown import tables
from support_plot import draw
from support_rivals import Prepared, Rival
from support_timing import INPUT_SETS, copy_bytes_per_s, peak_bytes, times

SHAPES = (Shape(1024, 151_936), Shape(4096, 151_936), Shape(7168, 129_280))
FORWARD, BOTH = "forward", "forward+backward"
WHEELS = ("skyrl", "liger-kernel", "cut-cross-entropy", "trl", "triton", "torch", "transformers")
HEADER = (
    f"{'head':>12} {'tokens':>6} {'supports':<17} {'pass':<16} {'how':<23} {'ms':>9} {'ratio':>8}"
    f" {'gather':>7} {'floor':>6} {'wall ms':>8} {'peak MB':>8} {'logprob':>8} {'dh':>7} {'dW':>7}"
)


def failures() -> tuple[type[Exception], ...]:
    """What a rival may raise on a machine or with versions that it was not made for."""
    known = (RuntimeError, ImportError, AttributeError, TypeError, ValueError, AssertionError)
    try:
        from triton.errors import TritonError
    except ImportError:
        return known
    return (*known, TritonError)


@dataclass(frozen=True)
class Cell:
    """What is measured over the same batches."""

    shape: Shape
    num_tokens: int
    supports: str
    rivals: Sequence[Rival]

    @property
    def name(self) -> str:
        return f"{self.shape} {self.num_tokens} {self.supports}"


@dataclass
class Run:
    device: torch.device
    out: Path
    minutes: float
    seed: int
    began_s: float = field(default_factory=time.monotonic)
    copy_bytes_per_s: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    ours_ms: dict[tuple[str, ...], float] = field(default_factory=dict)

    @property
    def spent(self) -> bool:
        return time.monotonic() - self.began_s > 60 * self.minutes

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(line(row), flush=True)

    def write(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        report = {
            "device": device_name(self.device),
            "versions": versions(),
            "seed": self.seed,
            "copy_bytes_per_s": self.copy_bytes_per_s,
            "minutes": round((time.monotonic() - self.began_s) / 60, 2),
            "left_out": self.left_out,
            "rows": self.rows,
        }
        part = self.out / "score_support.json.part"
        part.write_text(json.dumps(report, indent=1) + "\n")
        part.replace(self.out / "score_support.json")


@click.command()
@click.option("--quick", is_flag=True, help="32k tokens with real supports only, in 2 minutes.")
@click.option("--cpu", is_flag=True, help="The CPU implementation beside dense logits.")
@click.option("--only", metavar="REGEX", multiple=True, help="Measure what one of these finds.")
@click.option("--minutes", type=float, help="Stop after these; 8, or 2 with --quick or --cpu.")
@click.option("--seed", type=int, help="Of the inputs; another one each run if left out.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/score_support"))
@click.option("--markdown", type=click.Path(path_type=Path), help="Only print tables of this JSON.")
def main(
    quick: bool,
    cpu: bool,
    only: tuple[str, ...],
    minutes: float | None,
    seed: int | None,
    out: Path,
    markdown: Path | None,
) -> None:
    if markdown is not None:
        print(tables(json.loads(markdown.read_text())))
        return
    device = torch.device("cpu" if cpu else "cuda")
    minutes = minutes or (2 if quick or cpu else 8)
    run = Run(device, out, minutes, new_seed() if seed is None else seed)
    run.copy_bytes_per_s = copy_bytes_per_s(device)
    print(f"{device_name(device)}, copy {run.copy_bytes_per_s / 1e12:.2f} TB/s, seed {run.seed}")
    print(HEADER)
    cells = cpu_cells() if cpu else gpu_cells(quick)
    measure(run, list(chosen(cells, only) if only else cells))
    picture = out / "score_support.svg"
    picture.write_text(draw(run.rows, device_name(device)))
    print(
        f"{len(run.rows)} rows, {len(run.left_out)} cells left out; {out}/score_support.json, .svg"
    )


def new_seed() -> int:
    return int.from_bytes(os.urandom(3))


def gpu_cells(quick: bool) -> Iterator[Cell]:
    """The most telling ones first."""
    for shape in SHAPES:
        yield Cell(shape, 32_768, "real", (rivals.PLAN, *rivals.OVER_SUPPORTS[:-1]))
    for shape in SHAPES:
        yield Cell(shape, 32_768, "real, top_k 50", (rivals.OURS, rivals.PADDED, rivals.SKYRL))
    for shape in SHAPES:
        yield Cell(shape, 32_768, "real", rivals.OVER_VOCABULARY)
    if quick:
        return
    ours = (rivals.PLAN, rivals.OURS, rivals.OURS_TRITON, rivals.OURS_DENSE)
    for shape in SHAPES:
        yield Cell(shape, 32_768, "512 each", ours)
    for supports in ("1024 each", "2048 each"):
        yield Cell(SHAPES[1], 8192, supports, ours)
    sparse = (rivals.PLAN, rivals.OURS, rivals.PADDED)
    for supports in ("20 each", "50 each", "recorded", "real, uniform ids"):
        for shape in SHAPES:
            yield Cell(shape, 32_768, supports, (*sparse, rivals.COMPILED))
    for num_tokens in (4096, 131_072):
        # at 131,072 tokens a gather that is padded to 512 ids takes up to 12 s a pass
        skipped = rivals.PADDED if num_tokens > 32_768 else None
        others = [r for r in rivals.OVER_SUPPORTS[:-1] if r is not skipped]
        for shape in SHAPES:
            yield Cell(shape, num_tokens, "real", (rivals.PLAN, *others))
        for supports in ("real, top_k 50", "50 each", "20 each"):
            for shape in SHAPES:
                yield Cell(shape, num_tokens, supports, sparse)
        for supports in ("real, uniform ids", "recorded", "512 each"):
            for shape in SHAPES:
                yield Cell(shape, num_tokens, supports, (rivals.PLAN, rivals.OURS))


def chosen(cells: Iterable[Cell], patterns: Sequence[str]) -> Iterator[Cell]:
    """The cells with the ways that one of `patterns` finds."""
    for cell in cells:
        ways = [
            r for r in cell.rivals if any(re.search(p, f"{cell.name} {r.name}") for p in patterns)
        ]
        if ways:
            yield replace(cell, rivals=ways)


def cpu_cells() -> Iterator[Cell]:
    for num_tokens in (512, 128):
        how = (rivals.PLAN, rivals.OURS_CPU, rivals.EAGER)
        yield Cell(SHAPES[0], num_tokens, "real", how)


def measure(run: Run, cells: Sequence[Cell]) -> None:
    generator = torch.Generator(run.device).manual_seed(run.seed)
    dtype = torch.bfloat16 if run.device.type == "cuda" else torch.float32
    shape = weight = None
    for cell in cells:
        if run.spent or lost(run.device):
            run.left_out.append(cell.name)
            continue
        if shape != cell.shape:
            shape, weight = cell.shape, None  # the old one goes before the new one comes
            weight = make_weight(shape, dtype, generator)
        try:
            measure_cell(run, cell, weight, generator)
        except torch.OutOfMemoryError:
            run.left_out.append(f"{cell.name}: out of memory")
        run.write()
    run.write()


def measure_cell(run: Run, cell: Cell, weight: torch.Tensor, generator: torch.Generator) -> None:
    vocab_size = cell.shape.vocab_size
    batches = [
        make_batch(
            make_supports(cell.supports, cell.num_tokens, vocab_size, generator), weight, generator
        )
        for _ in range(INPUT_SETS)
    ]
    exact = {
        rivals.SUPPORT: exact_over_supports(batches[0], generator),
        rivals.PRODUCT: None,
    }
    if any(rival.question == rivals.VOCABULARY for rival in cell.rivals):
        exact[rivals.VOCABULARY] = exact_over_vocabulary(batches[0], generator)
    for rival in cell.rivals:
        if rival is rivals.PLAN:
            measure_plan(run, cell, batches)
            continue
        for what in (FORWARD, BOTH) if rival.backward else (FORWARD,):
            if run.spent:
                run.left_out.append(f"{cell.name} {rival.name}")
                return
            figures = attempt(lambda r=rival, w=what: measure_rival(run, r, w, batches, exact))
            run.add(described(run, cell, rival, what, batches[0], figures))
            if lost(run.device):
                return
            free()


def attempt(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The figures, or what went wrong; nothing that a rival raises keeps its tensors alive."""
    try:
        return call()
    except torch.OutOfMemoryError:
        return {"note": "out of memory"}
    except ModuleNotFoundError as error:
        return {"note": f"not installed ({error.name})"}
    except failures() as error:
        first = next(iter(str(error).splitlines()), "")
        return {"note": f"{type(error).__name__}: {first[:160]}"}


def measure_rival(
    run: Run, rival: Rival, what: str, batches: Sequence[Batch], exact: dict[str, Exact | None]
) -> dict[str, Any]:
    prepared = [Prepared.make(rival, batch) for batch in batches]
    call = Prepared.forward if what == FORWARD else Prepared.forward_backward
    figures = errors_of(call(prepared[0]), what, exact[rival.question])
    free()
    figures["peak_bytes"] = peak_bytes(lambda: call(prepared[0]), run.device)
    return figures | times(lambda i: call(prepared[i % INPUT_SETS]), run.device)


def measure_plan(run: Run, cell: Cell, batches: Sequence[Batch]) -> None:
    def figures() -> dict[str, Any]:
        rivals.make_plan(batches[0])
        peak = peak_bytes(lambda: rivals.make_plan(batches[0]), run.device)
        timed = times(lambda i: rivals.make_plan(batches[i % INPUT_SETS]), run.device)
        return {"peak_bytes": peak} | timed

    run.add(described(run, cell, rivals.PLAN, "plan", batches[0], attempt(figures)))


def errors_of(got: Any, what: str, exact: Exact | None) -> dict[str, Any]:
    if exact is None:
        return {}
    if what == FORWARD:
        return {"logprob_error": exact.logprob_error(got)}
    logprobs, dh, dw = got
    return {
        "logprob_error": exact.logprob_error(logprobs),
        "dh_error": exact.dh_error(dh),
        "dw_error": exact.dw_error(dw),
    }


def described(
    run: Run, cell: Cell, rival: Rival, what: str, batch: Batch, figures: dict[str, Any]
) -> dict[str, Any]:
    """The row: what was measured and how it compares."""
    key = (str(cell.shape), str(cell.num_tokens), cell.supports, what)
    time_ms = figures.get("time_ms")
    if time_ms is not None and rival.name in ("score_support", rivals.PRODUCT_ONLY.name):
        run.ours_ms[*key, rival.question] = time_ms
    # score_full is held against the product that it cannot do without, all others against ours
    base = rivals.PRODUCT if rival is rivals.OURS_FULL else rivals.SUPPORT
    base_ms = run.ours_ms.get((*key, base))
    row = {
        "hidden_size": cell.shape.hidden_size,
        "vocab_size": cell.shape.vocab_size,
        "num_tokens": cell.num_tokens,
        "supports": cell.supports,
        "num_ids": len(batch.supports.ids),
        "pass": what,
        "how": rival.name,
        "question": rival.question,
        "ratio": time_ms / base_ms if time_ms and base_ms else None,
        "ratio_to": base if time_ms and base_ms else None,
        "note": rival.note,
    }
    if time_ms is not None and what != "plan" and rival.question == rivals.SUPPORT:
        gather_ms, floor_ms = (1e3 * x / run.copy_bytes_per_s for x in fewest_bytes(batch, what))
        row |= {"gather_ms": gather_ms, "gather_share": gather_ms / time_ms}
        row |= {"floor_ms": floor_ms, "floor_share": floor_ms / time_ms}
    return row | figures


def fewest_bytes(batch: Batch, what: str) -> tuple[int, int]:
    """Of the gather alone, and of all that the pass must move; supports of one id cost nothing."""
    sizes = batch.supports.sizes
    several = sizes > 1
    num_ids, num_tokens = int(sizes[several].sum()), int(several.sum())
    row_bytes = batch.weight.shape[1] * batch.weight.element_size()
    gather_bytes = (num_ids + num_tokens) * row_bytes
    backward_bytes = (3 * num_tokens + num_ids + len(batch.weight)) * row_bytes
    return gather_bytes, gather_bytes + (backward_bytes if what == BOTH else 0)


def lost(device: torch.device) -> bool:
    """Whether a kernel that read out of bounds, say, has ended all work on the device."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def versions() -> dict[str, str | None]:
    installed = {d.name.replace("_", "-"): d.version for d in importlib.metadata.distributions()}
    return {name: installed.get(name) for name in WHEELS}


def line(row: dict[str, Any]) -> str:
    def number(name: str, pattern: str, width: int, scale: float = 1) -> str:
        value = row.get(name)
        return f"{'-' if value is None else format(scale * value, pattern):>{width}}"

    figures = [
        number("time_ms", ".3f", 9),
        number("ratio", ".2f", 8),
        number("gather_share", ".1%", 7),
        number("floor_share", ".0%", 6),
        number("wall_ms", ".2f", 8),
        number("peak_bytes", ".0f", 8, 1e-6),
        number("logprob_error", ".1e", 8),
        number("dh_error", ".0e", 7),
        number("dw_error", ".0e", 7),
    ]
    head = f"{row['hidden_size']}x{row['vocab_size']}"
    place = f"{head:>12} {row['num_tokens']:>6} {row['supports']:<17} {row['pass']:<16}"
    other = "another question: the whole vocabulary" if row["question"] == rivals.VOCABULARY else ""
    notes = "; ".join(note for note in (other, row["note"]) if note)
    return f"{place} {row['how']:<23} {' '.join(figures)} {notes}".rstrip()


if __name__ == "__main__":
    main()

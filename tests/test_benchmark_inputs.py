"""The inputs of the scoring benchmark are what they say, and every rival gives the right answer."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
NAMES = ("inputs", "exact", "timing", "plot", "markdown", "rivals")
SHAPE = (32, 211)  # D, V
# products and sums in float32; those who round to the dtype of the head do so to float32 here
EXACT = 2e-5


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The modules of the benchmark, which is a script beside them and no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        found = {name: importlib.import_module(f"support_{name}") for name in NAMES}
        yield SimpleNamespace(main=importlib.import_module("score_support"), **found)
        for name in ("score_support", *(f"support_{name}" for name in NAMES)):
            sys.modules.pop(name)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def make_batch(bench: SimpleNamespace, generator: torch.Generator, count: int = 40) -> Any:
    shape = bench.inputs.Shape(*SHAPE)
    supports = bench.inputs.make_supports("real", count, shape.vocab_size, generator)
    weight = bench.inputs.make_weight(shape, torch.float32, generator)
    return bench.inputs.make_batch(supports, weight, generator)


def test_real_sizes_have_the_published_quantiles(
    bench: SimpleNamespace, generator: torch.Generator
) -> None:
    sizes = bench.inputs.real_sizes(400_000, generator).double()
    assert (sizes == 1).double().mean().item() == pytest.approx(0.465, abs=0.005)
    assert sizes.median() == 2
    assert sizes.mean().item() == pytest.approx(8.1, abs=0.3)
    assert sizes.quantile(0.90).item() == pytest.approx(20, abs=2)
    assert sizes.quantile(0.99).item() == pytest.approx(83, abs=4)
    assert sizes.max() == 512


def test_frequent_ids_are_as_frequent_as_zipf_says(
    bench: SimpleNamespace, generator: torch.Generator
) -> None:
    ids = bench.inputs.zipf_ids(1000, generator)(200_000)
    counts = torch.bincount(ids, minlength=1000).sort(descending=True).values.double()
    total = sum(rank**-1.05 for rank in range(1, 1001))
    assert counts[0].item() / 200_000 == pytest.approx(1 / total, rel=0.05)
    assert counts[0].item() / counts[9].item() == pytest.approx(10**1.05, rel=0.1)
    assert ids.bincount().argmax() != 0, "permuted"


@pytest.mark.parametrize(
    "kind", ["real", "real, top_k 50", "real, uniform ids", "20 each", "512 each", "recorded"]
)
def test_supports_hold_distinct_ids_and_the_target(
    bench: SimpleNamespace, generator: torch.Generator, kind: str
) -> None:
    supports = bench.inputs.make_supports(kind, 60, 50_000, generator)
    rows = supports.ids.split(supports.sizes.tolist())
    for target, row in zip(supports.targets, rows, strict=True):
        assert len(row.unique()) == len(row)
        assert target in row
        assert row.min() >= 0 and row.max() < 50_000


def test_two_draws_differ_and_a_seed_repeats(bench: SimpleNamespace) -> None:
    def ids(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return bench.inputs.make_supports("real", 50, 1000, generator).ids.tolist()

    assert ids(1) == ids(1)
    assert ids(1) != ids(2)


def test_supports_of_chosen_tokens_and_padded(bench: SimpleNamespace) -> None:
    offsets = torch.tensor([0, 2, 3, 6])
    supports = bench.inputs.Supports(torch.tensor([8, 5, 1]), torch.arange(9, 3, -1), offsets)
    chosen = supports.of(torch.tensor([2, 0]))
    assert (chosen.ids.tolist(), chosen.offsets.tolist()) == ([6, 5, 4, 9, 8], [0, 3, 5])
    assert supports.padded().tolist() == [[9, 8, -1], [7, -1, -1], [6, 5, 4]]


def test_exact_values_equal_autograd_on_dense_logits_in_float64(
    bench: SimpleNamespace, generator: torch.Generator
) -> None:
    batch = make_batch(bench, generator)
    supports = batch.supports
    hidden, weight = (x.double().requires_grad_() for x in (batch.hidden, batch.weight))
    logits = hidden @ weight.T
    inside = torch.zeros(logits.shape, dtype=torch.bool)
    inside[supports.rows, supports.ids] = True
    for make, z in (
        (bench.exact.exact_over_supports, logits.masked_fill(~inside, -torch.inf)),
        (bench.exact.exact_over_vocabulary, logits),
    ):
        exact = make(batch, generator)
        dense = z.log_softmax(1).gather(1, supports.targets[:, None]).squeeze(1)
        dh, dw = torch.autograd.grad(
            dense @ batch.gradient.double(), (hidden, weight), retain_graph=True
        )
        assert exact.logprob_error([dense]) < 1e-12
        assert exact.dh_error([dh]) < 1e-12
        assert (exact.dw_error(dw) or 0) < 1e-12


slow = pytest.mark.stress
OF_TORCH = [
    *("OURS", "EAGER", "PRIME_RL", "PADDED", "OURS_FULL"),
    *(pytest.param(name, marks=slow) for name in ("OURS_DENSE", "COMPILED", "SKYRL", "TRL")),
]


@pytest.mark.parametrize(
    "token_chunk", [16, pytest.param(None, marks=slow)], ids=["chunks", "whole"]
)
@pytest.mark.parametrize("name", OF_TORCH)
@pytest.mark.filterwarnings("ignore")  # of the wheels
def test_rivals_equal_float64(
    bench: SimpleNamespace,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    token_chunk: int | None,
) -> None:
    rival = getattr(bench.rivals, name)
    rival = rival.__class__(**(vars(rival) | {"token_chunk": token_chunk}))
    monkeypatch.setattr(bench.rivals, "VOCAB_CHUNK", 100)
    monkeypatch.setattr(bench.rivals, "PAIR_CHUNKS", (1000,))
    batch = make_batch(bench, generator)
    over = rival.question == bench.rivals.VOCABULARY
    make = bench.exact.exact_over_vocabulary if over else bench.exact.exact_over_supports
    exact = make(batch, generator)
    prepared = bench.rivals.Prepared.make(rival, batch)
    try:
        eager = torch.compiler.set_stance("force_eager") if name == "COMPILED" else nullcontext()
        with eager:
            logprobs = prepared.forward()
            both = prepared.forward_backward()
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")
    assert exact.logprob_error(logprobs) < EXACT
    assert exact.logprob_error(both[0]) < EXACT
    assert exact.dh_error(both[1]) < EXACT
    assert (exact.dw_error(both[2]) or 0) < EXACT


def test_a_run_reports_rows_and_failures(
    bench: SimpleNamespace,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench.timing, "REPETITIONS", 2)
    monkeypatch.setattr(bench.main, "free", lambda: None)  # it walks all objects of the test run

    def broken(*arguments: Any) -> torch.Tensor:
        raise RuntimeError("no such kernel\nand more")

    def too_large(*arguments: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("much")

    def missing(*arguments: Any) -> torch.Tensor:
        return importlib.import_module("no_such_wheel")

    rivals = bench.rivals
    failing = [rivals.Rival(f.__name__, f) for f in (broken, too_large, missing)]
    shape = bench.inputs.Shape(*SHAPE)
    how = (rivals.PLAN, rivals.OURS, *failing, rivals.EAGER)
    cells = [bench.main.Cell(shape, 16, "real", how), bench.main.Cell(shape, 16, "20 each", how)]
    run = bench.main.Run(torch.device("cpu"), tmp_path, minutes=1, seed=3, copy_bytes_per_s=1e9)
    bench.main.measure(run, cells[:1])
    run.minutes = 0
    bench.main.measure(run, cells[1:])

    report = json.loads((tmp_path / "score_support.json").read_text())
    assert report["left_out"] == ["32x211 16 20 each"]
    rows = {(row["how"], row["pass"]): row for row in report["rows"]}
    assert len(rows) == 11
    assert rows["broken", "forward"]["note"] == "RuntimeError: no such kernel"
    assert rows["too_large", "forward"]["note"] == "out of memory"
    assert rows["missing", "forward"]["note"] == "not installed (no_such_wheel)"
    ours, eager = rows["score_support", "forward"], rows["masked logits", "forward"]
    assert ours["ratio"] == 1
    assert eager["ratio"] == eager["time_ms"] / ours["time_ms"]
    assert eager["gather_share"] > 0 and eager["logprob_error"] < EXACT
    assert rows["masked logits", "forward+backward"]["dw_error"] < EXACT
    assert len(capsys.readouterr().out.splitlines()) == 11
    picture = bench.plot.draw(report["rows"], "the <CPU>")
    assert picture.count("<rect") == 1 + 4 and "&lt;CPU&gt;" in picture
    tables = bench.markdown.tables(report)
    assert f"| masked logits | {eager['time_ms']:.3g} (" in tables
    assert f"| 32 × 211 | forward | {ours['time_ms']:.3f} | " in tables

"""Results as tables on stdout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from replay.report import Report


def print_stats(stats: Mapping[str, Any]) -> None:
    """The end of a collect."""
    sizes, latency, session = stats["support_size"], stats["latency_ms"], stats["session"]
    rows = {
        "rollouts": stats["rollouts"],
        "output tokens": stats["output_tokens"],
        "tokens/s (this session)": f"{session['output_tokens_per_s']:,.0f}",
        "finish reasons": _counts(stats["finish_reasons"]),
        "latency p50 / p95 / p99": " / ".join(f"{latency[p]:,.0f} ms" for p in latency),
        "support size": f"mean {sizes['mean']:.1f}, median {sizes['median']:.0f}, "
        f"p99 {sizes['p99']:.0f}, max {sizes['max']}",
        "singletons": sizes["singletons"],
        "above top_k (ties)": sizes["above_top_k"],
        "on disk": f"{stats['bytes_per_token']:.0f} bytes/token",
        "failed": _counts(stats["failed"]),
        "rejected": _counts(stats["rejected"]),
    }
    _print("collected", rows)


def print_report(report: Report) -> None:
    """What the verdict rests on, and the verdict as the last line."""
    numbers = report.numbers
    table = Table(box=None)
    table.add_column("per token")
    table.add_column("over the support", justify="right")
    table.add_column("whole vocabulary", justify="right")
    without = numbers["without_support"]
    for label, *path in (
        ("mean |log_ratio|", "log_ratio_abs", "mean"),
        ("p50", "log_ratio_abs", "p50"),
        ("p99", "log_ratio_abs", "p99"),
        ("max", "log_ratio_abs", "max"),
        ("mean log_ratio", "log_ratio", "mean"),
        ("mismatch_kl", "mismatch_kl"),
        ("ratio outside [0.9, 1.1]", "ratio_outside"),
    ):
        table.add_row(label, _number(numbers, path), _number(without, path))
    table.add_row("support_kl (exact)", _number(numbers, ["support_kl"]), "")
    _console().print(table)
    sizes = numbers["support_size"]
    rows = {
        "tokens scored": f"{numbers['scored_tokens']} of {numbers['tokens']} "
        f"in {numbers['rollouts']} rollouts",
        "kept mass, engine / trainer": f"{_number(numbers, ['kept_mass'])} / "
        f"{_number(numbers, ['replay_kept_mass'])}",
        "support size": f"mean {sizes['mean']:.1f}, max {sizes['max']}, "
        f"{sizes['singletons']} singletons, {sizes['above_top_k']} above top_k",
        "precision": ", ".join(f"{k} {v}" for k, v in report.precision.items()),
    }
    _print(None, rows)
    for finding in report.findings:
        click.echo(f"finding {finding.code}: {finding.count} tokens; first {finding.first}")
    for gate in report.failed_gates:
        click.echo(f"gate {gate.name}: {gate.value:.4g} is above {gate.limit:g}")
    click.echo(f"{'PASS' if report.verdict == 'consistent' else 'FAIL'}  {report.verdict}")


def _print(title: str | None, rows: Mapping[str, Any]) -> None:
    table = Table(title=title, title_justify="left", box=None, show_header=False)
    for label, value in rows.items():
        table.add_row(label, str(value))
    _console().print(table)


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True, width=120)


def _number(numbers: Mapping[str, Any], path: list[str]) -> str:
    value: Any = numbers
    for key in path:
        value = value[key]
    return "not recorded" if value is None else f"{value:.4g}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"

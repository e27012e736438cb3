"""Results as tables on stdout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from rollout.inspection import view_rollout
from rollout.words import counts_in_words, engine_facts

if TYPE_CHECKING:
    from replay.report import Report
    from rollout.diff import Diff, Difference
    from rollout.dry_run import DryRun
    from rollout.engines.sglang.doctor import Examination
    from rollout.repair import Repair


def print_stats(stats: Mapping[str, Any]) -> None:
    """The end of a collect."""
    _print("collected", _stats_rows(stats))


def print_stats_of(runs: Mapping[str, Mapping[str, Any]]) -> None:
    """One column per run, under its name."""
    columns = [_stats_rows(stats) for stats in runs.values()]
    table = _table("", *runs)
    for label in columns[0]:
        table.add_row(label, *(str(column[label]) for column in columns))
    _console().print(table)


def _stats_rows(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Label and text of each line; an empty run has no sizes and no latencies."""
    sizes, latency, last = stats["support_size"], stats["latency_ms"], stats.get("last_command")
    attempts, reward, tokens = stats["attempts"], stats["reward"], stats["output_tokens"]
    unknown = tokens - sum(stats["weight_versions"].values())
    versions = stats["weight_versions"] | ({"unknown": unknown} if unknown > 0 else {})
    of_command = {}
    if last:
        of_command["tokens/s (this command)"] = f"{last['output_tokens_per_s']:,.0f}"
        of_command["retried (this command)"] = counts_in_words(last.get("retried", {}))
    return {
        "rollouts": stats["rollouts"],
        "output tokens": tokens,
        **of_command,
        "finish reasons": counts_in_words(stats["finish_reasons"]),
        "latency p50 / p95 / p99": " / ".join(f"{latency[p]:,.0f} ms" for p in latency) or "none",
        "support size": f"mean {sizes['mean']:.1f}, median {sizes['median']:.0f}, "
        f"p99 {sizes['p99']:.0f}, max {sizes['max']}"
        if sizes
        else "none",
        "singletons": sizes.get("singletons", 0),
        "above top_k (ties)": sizes.get("above_top_k", 0),
        **dict(engine_facts(stats["engine_check"])),
        "weight versions": ", ".join(f"{n} tokens {v}" for v, n in versions.items()) or "none",
        "attempts": f"{attempts['total']}, {attempts['retried']} rollouts asked again, "
        f"at most {attempts['max']} times",
        "reward": f"mean {reward['mean']:.4g} of {reward['count']}" if reward else "none",
        "on disk": f"{stats['bytes_per_token']:.0f} bytes/token" if tokens else "no tokens",
        "failed": counts_in_words(stats["failed"]),
        "rejected": counts_in_words(stats["rejected"]),
    }


def print_run(view: Mapping[str, Any]) -> None:
    """What a run is, and its first rollouts."""
    _print(None, {name: _plain(value) for name, value in view["run"].items()})
    table = _table("id", "tokens", "finish", "reward", "mean support", "text")
    for row in view["first"]:
        table.add_row(
            _plain(row["rollout_id"]),
            str(row["output_tokens"]),
            row["finish_reason"],
            _or_dash(row["reward"], ".4g"),
            _or_dash(row["mean_support_size"], ".1f"),
            "-" if row["text"] is None else repr(row["text"]),
        )
    _console().print(table)
    click.echo(f"{len(view['first'])} of {view['rollouts']} rollouts")


def print_rollout(view: Mapping[str, Any]) -> None:
    """One rollout, a line per output token; token texts are quoted, control characters escaped."""
    facts = view["rollout"].items()
    _print(None, {name: _plain(value) for name, value in facts if value is not None})
    table = _table(
        "at", "id", "text", "support", "logprob", "kept mass", "likeliest of the support"
    )
    for token in view["tokens"]:
        likeliest = (
            f"{entry['id']}{_quoted(entry['text'], ' ')} {entry['probability']:.3f}"
            for entry in token["top"] or ()
        )
        table.add_row(
            str(token["position"]),
            str(token["id"]),
            _quoted(token["text"]),
            "forced" if token["forced"] else str(token["support_size"]),
            _or_dash(None if token["forced"] else token["sampling_logprob"], ".4f"),
            _or_dash(token["kept_mass"], ".4f"),
            ", ".join(likeliest),
        )
    _console().print(table)


def print_report(report: Report) -> None:
    """Numbers, gates and facts, then what the verdict rests on; the verdict is the last line."""
    from replay import sections  # cli loads no torch

    summary = report.as_dict()
    _print_numbers(sections.NUMBERS_HEAD, sections.number_rows(summary))
    _print_numbers(sections.GATES_HEAD, sections.gate_rows(summary))
    _print(None, dict(sections.facts_of(summary)))
    for reason in sections.reasons_of(summary):
        click.echo(f"{reason.head}: {_plain(reason.text)}")
        for label, text in reason.facts:
            sign = "->" if label == sections.ADVICE else f"{label}:"
            click.echo(f"  {sign} {_plain(text)}")
    click.echo("  ".join(sections.verdict_words(summary)))


def _print_numbers(head: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
    """The second and third columns are numbers."""
    table = Table(box=None)
    for i, label in enumerate(head):
        table.add_column(label, justify="right" if i in (1, 2) else "left")
    for row in rows:
        table.add_row(*row)
    _console().print(table)


def print_diff(found: Diff) -> None:
    """Settings, numbers and tokens that differ, and what that means as the last line."""
    click.echo(f"A  {_plain(found.a)}\nB  {_plain(found.b)}")
    _print_differences("settings", found.settings)
    _print_differences("numbers", found.numbers)
    if found.tokens is not None:
        tokens = found.tokens
        words = f"tokens: {tokens.tokens} scored in both, {tokens.unmatched} not"
        if tokens.mean is not None:
            words += f"; their replay_logprobs differ by {tokens.mean:.4g} nats in the mean, "
            words += f"{tokens.max:.4g} at most"
        click.echo(words)
        for place in tokens.worst if tokens.differs else ():
            where = f"{_plain(place['rollout_id'])} token {place['position']}"
            click.echo(f"  {where}: id {place['token_id']}, A {place['a']:.4f}, B {place['b']:.4f}")
    tolerance = f"within {found.rtol:g} of the value + {found.atol:g}"
    if found.same:
        click.echo(f"SAME  {found.compared} numbers {tolerance}")
    else:
        click.echo(f"DIFFERS  {len(found.numbers)} of {found.compared} numbers are not {tolerance}")


def _print_differences(title: str, differences: Sequence[Difference]) -> None:
    if not differences:
        return
    table = _table(title, "A", "B", "B - A")
    for entry in differences:
        values = (_value(entry.a), _value(entry.b))
        table.add_row(_plain(entry.key), *values, _or_dash(entry.change, "+.4g"))
    _console().print(table)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else _plain(value)


def print_dry_run(found: DryRun) -> None:
    """The endpoints, and the rollout with its first tokens."""
    for endpoint in found.endpoints:
        print_examination(endpoint)
    if found.rollout is not None:
        print_rollout(view_rollout(found.rollout, limit=8))


def print_examination(found: Examination) -> None:
    """A line per probe, and the config block to paste where there is one."""
    table = Table(box=None, show_header=False)
    for probe in found.probes:
        mark = {True: "", False: "!", None: "?"}[probe.ok]
        table.add_row(mark, probe.name, _plain(probe.value), _plain(probe.detail))
    _console().print(table)
    if found.config is not None:
        click.echo("\n" + found.as_yaml(), nl=False)


def print_repair(done: Repair) -> None:
    """One line per file that was looked at or written."""
    for shard in done.shards:
        words = f"{shard.file}  {shard.action}, {shard.rows} rows"
        if shard.original is not None:
            words += f"; {shard.bytes_cut} bytes left out, the whole is {shard.original}"
        elif shard.bytes_cut:
            words += f"; {shard.bytes_cut} bytes cut"
        click.echo(words)
    for name, size in done.lines_cut.items():
        click.echo(f"{name}  {size} bytes of a torn last line cut")
    for name in done.files_written:
        click.echo(f"{name}  written")


def _print(title: str | None, rows: Mapping[str, Any]) -> None:
    table = Table(title=title, title_justify="left", box=None, show_header=False)
    for label, value in rows.items():
        table.add_row(label, str(value))
    _console().print(table)


def _table(*headers: str) -> Table:
    table = Table(box=None)
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def _console() -> Console:
    # texts of tokens and names of files are data: "[b]" and ":smile:" mean themselves
    return Console(highlight=False, soft_wrap=True, width=120, markup=False, emoji=False)


def _plain(value: Any) -> str:
    """A value that cannot move the cursor of a terminal."""
    return str(value) if str(value).isprintable() else repr(value)


def _quoted(text: str | None, before: str = "") -> str:
    return "" if text is None else before + repr(text)


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)

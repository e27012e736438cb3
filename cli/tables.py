"""Results as tables on stdout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from rollout.view import view_rollout

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
        of_command["retried (this command)"] = _counts(last.get("retried", {}))
    return {
        "rollouts": stats["rollouts"],
        "output tokens": tokens,
        **of_command,
        "finish reasons": _counts(stats["finish_reasons"]),
        "latency p50 / p95 / p99": " / ".join(f"{latency[p]:,.0f} ms" for p in latency) or "none",
        "support size": f"mean {sizes['mean']:.1f}, median {sizes['median']:.0f}, "
        f"p99 {sizes['p99']:.0f}, max {sizes['max']}"
        if sizes
        else "none",
        "singletons": sizes.get("singletons", 0),
        "above top_k (ties)": sizes.get("above_top_k", 0),
        **_engine_rows(stats["engine_check"]),
        "weight versions": ", ".join(f"{n} tokens {v}" for v, n in versions.items()) or "none",
        "attempts": f"{attempts['total']}, {attempts['retried']} rollouts asked again, "
        f"at most {attempts['max']} times",
        "reward": f"mean {reward['mean']:.4g} of {reward['count']}" if reward else "none",
        "on disk": f"{stats['bytes_per_token']:.0f} bytes/token" if tokens else "no tokens",
        "failed": _counts(stats["failed"]),
        "rejected": _counts(stats["rejected"]),
    }


def _engine_rows(check: Mapping[str, Any]) -> dict[str, str]:
    """What the recorded numbers say about the engine, with the evidence in tokens or pairs."""

    def fact(name: str, evidence: str) -> str:
        return check[name] if check[name] == "unknown" else f"{check[name]} ({evidence})"

    rows = check["order_rows"]
    return {
        "filter order, as seen": fact(
            "filter_order",
            f"of {rows} tokens, {check['joint_violated']} contradict joint, "
            f"{check['sequential_violated']} sequential",
        ),
        "ties at top_k, as seen": fact(
            "tie_policy", f"{check['above_top_k']} of {check['top_k_rows']} tokens above top_k"
        ),
        "head, as seen": fact(
            "head", f"{check['on_grid']} of {check['grid_pairs']} logit pairs on the bf16 grid"
        ),
        "full logprobs, as seen": fact(
            "full_logprobs",
            f"of {check['temperature_rows']} tokens, {check['after_temperature_violated']} "
            f"contradict after, {check['before_temperature_violated']} before",
        ),
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
    if report.engine is not None:
        rows |= _engine_rows(report.engine)
    if report.audit is not None:
        rows |= _audit_rows(report.audit)
    _print(None, rows)
    for finding in report.findings:
        click.echo(f"finding {finding.code}: {finding.count} tokens; first {finding.first}")
    for gate in report.failed_gates:
        click.echo(f"gate {gate.name}: {gate.value:.4g} is above {gate.limit:g}")
    for diagnosis in report.diagnoses:
        same = f" (the same data: {', '.join(diagnosis.also)})" if diagnosis.also else ""
        click.echo(f"{diagnosis.code}: {diagnosis.sentence}{same}")
        if diagnosis.advice:
            click.echo(f"  -> {diagnosis.advice}")
    click.echo(f"{'PASS' if report.verdict == 'consistent' else 'FAIL'}  {report.verdict}")


def _audit_rows(audit: Mapping[str, Any]) -> dict[str, str]:
    """What the audit of the supports found, and what it left out."""
    if not audit["tokens"]:
        return {"support audit": "no token that could be audited"}
    tolerance, words = audit["tolerance"], []
    partial = sum(count["tokens"] for count in audit["without_prefix_and_mass"].values())
    if partial:
        settings = ", ".join(audit["without_prefix_and_mass"])
        words.append(f"{partial} without prefix and mass ({settings})")
    skipped = sum(count["tokens"] for count in audit["skipped"].values())
    if skipped:
        words.append(f"{skipped} skipped ({', '.join(audit['skipped'])})")
    if audit["repair_fingerprints"]:
        words.append(f"{audit['repair_fingerprints']} explained without the drawn token")
    return {
        "support audit": f"{_counts(audit['classes'])} of {audit['tokens']} tokens",
        "audit tolerance": "; ".join(
            [f"{tolerance['logits']:.3g} logits, from {tolerance['source']}", *words]
        ),
    }


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


def _number(numbers: Mapping[str, Any], path: list[str]) -> str:
    value: Any = numbers
    for key in path:
        value = value[key]
    return "not recorded" if value is None else f"{value:.4g}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"

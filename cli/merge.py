"""rollout merge"""

from __future__ import annotations

from pathlib import Path

import click

from cli.options import echo_json, json_option, reports_errors


@click.command()
@click.argument("out", metavar="OUT", type=click.Path(file_okay=False, path_type=Path))
@click.argument("runs", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@json_option
@reports_errors
def merge(out: Path, runs: tuple[Path, ...], as_json: bool) -> None:
    """Make one new run directory OUT from several, which are only read.

    A rollout that is in several is stored once. Runs of different tokenizers are refused, and so is
    an id that stands for two different rollouts. A rollout that breaks a rule goes to
    OUT/rejected.jsonl, and the exit code is 3.

    \b
    Example:
      rollout merge runs/all runs/first runs/second
    """
    from rollout.merge import merge_runs

    merged = merge_runs(out, runs)
    rejected = sum(merged.rejected.values())
    if as_json:
        echo_json(merged.as_dict())
    else:
        click.echo(
            f"{merged.rollouts} rollouts of {len(runs)} runs into {out}, {merged.duplicates} "
            f"duplicates, {merged.annotations} annotations, {rejected} rejected"
        )
    for reason, count in merged.rejected.items():
        click.echo(f"rejected: {count} x {reason}, see {out}/rejected.jsonl", err=True)
    if rejected or not merged.rollouts:
        raise click.exceptions.Exit(3)

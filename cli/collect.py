"""rollout collect"""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cli.interrupts import run_until_interrupted
from cli.options import (
    INTERRUPTED,
    echo_json,
    json_option,
    needs_torch,
    override_option,
    reports_errors,
)
from cli.progress import ProgressReport, no_bars_in_logs

if TYPE_CHECKING:
    from rollout.config import CollectConfig


@click.command()
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@override_option
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Run directory; runs/<name of CONFIG> unless given.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Examine the endpoints, collect one rollout, write nothing.",
)
@json_option
@reports_errors
def collect(
    config: Path, overrides: tuple[str, ...], out: Path | None, dry_run: bool, as_json: bool
) -> None:
    """Collect rollouts with their supports into a run directory.

    The same command again goes on where it stopped. Ctrl-C finishes what is in flight, a second one
    stops at once. Every key of CONFIG can be set with -o.

    \b
    Example:
      rollout collect configs/sglang.yaml -o engine.url=http://localhost:30000 --dry-run
      rollout collect configs/sglang.yaml -o engine.url=http://localhost:30000 --out runs/first
    """
    from cli.tables import print_stats
    from rollout.config import CollectConfig, EmbeddedConfig
    from rollout.job import collect_run
    from rollout.keeper import Progress

    settings = CollectConfig.load(config, overrides)
    if isinstance(settings.engine, EmbeddedConfig):
        needs_torch()
    no_bars_in_logs("datasets", "transformers")
    sys.path.insert(0, "")  # the module of a reward may lie in the current directory
    out = out or Path("runs") / config.stem
    if dry_run:
        _dry_run(settings, as_json)
        return
    with ProgressReport("collect") as report:

        def show(progress: Progress) -> None:
            note = f"({progress.lost} lost)" if progress.lost else ""
            if progress.overflowed:
                note += f" ({progress.overflowed} over the server's cap)"
            report.update(progress.finished, progress.total, progress.output_tokens, note)

        stats = run_until_interrupted(
            lambda stop: collect_run(settings, out, show, stop, report.note)
        )
    if as_json:
        echo_json(stats)
    else:
        print_stats(stats)
    if stats["duplicate_groups"]:
        click.echo(
            f"note: {stats['duplicate_groups']} prompts have only identical rollouts", err=True
        )
    if not stats["complete"]:
        click.echo(f"interrupted; to go on: {shlex.join(['rollout', *sys.argv[1:]])}", err=True)
        raise click.exceptions.Exit(INTERRUPTED)
    click.echo(f"next: rollout replay {out} --model {settings.model}", err=True)


def _dry_run(settings: CollectConfig, as_json: bool) -> None:
    from cli.tables import print_dry_run
    from rollout.dry_run import dry_run

    found = asyncio.run(dry_run(settings, lambda note: click.echo(f"note: {note}", err=True)))
    if as_json:
        echo_json(found.as_json())
    else:
        print_dry_run(found)
    for endpoint in found.endpoints:
        if not endpoint.usable:
            click.echo(f"{endpoint.url}: not usable: {endpoint.reason}", err=True)
    if not found.usable:
        raise click.exceptions.Exit(4)
    again = [word for word in sys.argv[1:] if word != "--dry-run"]
    click.echo(f"nothing was written; next: {shlex.join(['rollout', *again])}", err=True)

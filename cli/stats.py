"""rollout stats"""

from __future__ import annotations

from pathlib import Path

import click

from cli.options import echo_json, json_option, reports_errors


@click.command()
@click.argument("runs", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@json_option
@reports_errors
def stats(runs: tuple[Path, ...], as_json: bool) -> None:
    """Count what is in run directories, side by side.

    Every number is of the whole run, over all commands that wrote it; a collect may be at work.

    \b
    Example:
      rollout stats runs/first runs/second
    """
    from cli.tables import print_stats_of
    from rollout.stats import run_stats

    found = {str(run): run_stats(run) for run in runs}
    if as_json:
        echo_json({"runs": [{"run": name, **numbers} for name, numbers in found.items()]})
    else:
        print_stats_of(found)

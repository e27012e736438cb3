"""rollout repair"""

from __future__ import annotations

from pathlib import Path

import click

from cli.options import echo_json, json_option, reports_errors


@click.command()
@click.argument("run", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--dry-run", is_flag=True, help="Say what would be done, and change nothing.")
@json_option
@reports_errors
def repair(run: Path, dry_run: bool, as_json: bool) -> None:
    """Make the run directory of a killed writer final.

    Torn tails are cut, the manifest is completed, and a shard that breaks off keeps its whole
    batches; its own bytes stay beside it as NAME.damaged. What only a copy from elsewhere can bring
    back is reported, and the exit code is 3. To go on with `rollout collect`, repair is needed only
    where a shard breaks off.

    \b
    Example:
      rollout repair runs/first --dry-run
    """
    from cli.tables import print_repair
    from rollout.repair import repair as repair_run

    done = repair_run(run, dry_run=dry_run)
    if as_json:
        echo_json(done.as_dict())
    else:
        print_repair(done)
    if dry_run:
        click.echo("dry run: nothing was changed", err=True)
    for shard in done.problems:
        click.echo(
            f"Error: {run / shard.file}: {shard.action}, restore it from where it was copied",
            err=True,
        )
    if done.problems:
        raise click.exceptions.Exit(3)

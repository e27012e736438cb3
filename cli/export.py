"""rollout export"""

from __future__ import annotations

from pathlib import Path

import click

from cli.options import echo_json, json_option, needs_torch, reports_errors
from cli.progress import ProgressReport
from rollout.adapters.formats import FORMATS, WRITABLE, writer
from rollout.words import counts_in_words


@click.command()
@click.argument("run", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--to", "name", type=click.Choice(WRITABLE), required=True)
@click.option("--out", metavar="PATH", type=click.Path(path_type=Path), required=True)
@click.option("--overwrite", is_flag=True, help="Replace PATH if it is there.")
@click.option("--without-aborted", is_flag=True, help="Leave out rollouts that were aborted.")
@click.option("--temperature", type=float, help="Only rollouts sampled at it.")
@click.option("--pad-id", type=click.IntRange(min=0), help="The id that fills rows (verl only).")
@json_option
@reports_errors
def export(
    run: Path,
    name: str,
    out: Path,
    overwrite: bool,
    without_aborted: bool,
    temperature: float | None,
    pad_id: int | None,
    as_json: bool,
) -> None:
    """Write the rollouts of DIR as a file that a trainer reads.

    What each trainer does with it, and what its format cannot say: docs/integrations.md. The file
    appears as a whole or not at all.

    \b
    Example:
      rollout export runs/first --to slime --out dump/rollout_0.pt
    """
    from rollout.adapters.exporting import export_run

    if FORMATS[name].needs_torch:
        needs_torch()
    with ProgressReport("export") as progress:
        result = export_run(
            writer(name, pad_id),
            run,
            out,
            overwrite=overwrite,
            without_aborted=without_aborted,
            temperature=temperature,
            progress=progress.update,
        )
        for note in result.notes:
            progress.note(note)
    if as_json:
        echo_json(result.as_dict())
    else:
        click.echo(
            f"{result.rollouts} rollouts, {result.output_tokens} output tokens into {out}, "
            f"{result.bytes:,} bytes"
        )
    if result.left_out:
        click.echo(f"left out: {counts_in_words(result.left_out)}", err=True)

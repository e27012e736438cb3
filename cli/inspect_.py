"""rollout inspect"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cli.options import echo_json, json_option, reports_errors


@click.command("inspect")
@click.argument("run", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("rollout_id", metavar="[ID]", required=False)
@click.option("--model", metavar="PATH_OR_ID", help="Tokenizer; that of run.json unless given.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    help="Rollouts to list, or tokens of ID.  [default: 10 rollouts, every token]",
)
@json_option
@reports_errors
def inspect(
    run: Path, rollout_id: str | None, model: str | None, limit: int | None, as_json: bool
) -> None:
    """Show what a run directory holds, or one rollout token by token.

    \b
    Example:
      rollout inspect runs/first
      rollout inspect runs/first 0:0
    """
    from cli.tables import print_rollout, print_run
    from rollout.inspection import find_rollout, make_decode, view_rollout, view_run
    from rollout.reader import open_run

    opened = open_run(run)
    if rollout_id is None:
        listing = view_run(opened, 10 if limit is None else limit)
        echo_json(listing) if as_json else print_run(listing)
        return
    rollout = find_rollout(opened, rollout_id)
    tokenizer = _tokenizer(opened, model)
    view = view_rollout(rollout, make_decode(tokenizer) if tokenizer else None, limit)
    echo_json(view) if as_json else print_rollout(view)


def _tokenizer(run: Any, model: str | None) -> Any:
    """The one that was asked for, or that of run.json; None, with a note, where there is none."""
    from rollout.errors import ConfigError
    from rollout.inspection import is_other_vocabulary, named_tokenizer
    from rollout.prompts import load_tokenizer

    path = model or named_tokenizer(run)
    if path is None:
        click.echo("note: run.json names no tokenizer; for text give --model", err=True)
        return None
    try:
        tokenizer = load_tokenizer(path)
    except ConfigError as error:
        if model is not None:
            raise
        click.echo(f"note: {error}; for text give --model", err=True)
        return None
    if is_other_vocabulary(run, tokenizer):
        click.echo(
            f"note: {path} has another vocabulary than the run: its texts are wrong", err=True
        )
    return tokenizer

"""rollout doctor"""

from __future__ import annotations

import asyncio

import click

from cli.options import echo_json, json_option, reports_errors


@click.command()
@click.argument("url", metavar="URL")
@json_option
@reports_errors
def doctor(url: str, as_json: bool) -> None:
    """Say whether rollouts can be collected from an SGLang endpoint, and how.

    A few requests of a few tokens each; nothing is stored. Exits with 4 where collecting would
    fail. Rows marked "!" keep rollouts from being collected or cost them something, rows marked
    "?" could not be found out.

    \b
    Example:
      rollout doctor http://localhost:30000
    """
    from cli.tables import print_examination
    from rollout.engines.sglang.doctor import examine

    found = asyncio.run(examine(url))
    if as_json:
        echo_json(found.as_json())
    else:
        print_examination(found)
    if not found.usable:
        click.echo(f"not usable: {found.reason}", err=True)
        raise click.exceptions.Exit(4)
    click.echo("next: paste the blocks into a config, rollout collect CONFIG", err=True)

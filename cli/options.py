"""What every command shares: options, and errors as exit codes."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import click

from rollout.errors import (
    ConfigError,
    DataError,
    DiskFull,
    EngineError,
    OverBudget,
    RolloutError,
)

P = ParamSpec("P")
R = TypeVar("R")

TOO_LITTLE_MEMORY = 2
INTERRUPTED = 130

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document instead of a table."
)
override_option = click.option(
    "-o",
    "--override",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set one config key, for example -o sampling.top_k=50. Repeatable.",
)


def exit_code(error: RolloutError) -> int:
    """The exit code of `rollout --help` for an error."""
    match error:
        case DataError():
            return 3
        case EngineError():
            return 4
        case OverBudget() | DiskFull():
            return 5
        case _:
            return 2


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Library errors become one line and their exit code; a bug keeps its traceback."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except RolloutError as error:
            click.echo(f"Error: {error}", err=True)
            raise click.exceptions.Exit(exit_code(error)) from error
        except MemoryError as error:  # a traceback would end with 1, which is a verdict
            click.echo(f"Error: too little memory: {error}", err=True)
            raise click.exceptions.Exit(TOO_LITTLE_MEMORY) from error
        except KeyboardInterrupt:
            click.echo("interrupted; what was committed is kept", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None

    return wrapped


def needs_torch() -> None:
    """Say what to install where the trainer side is not there."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ConfigError("this needs the trainer side: pip install 'rollout[torch]'") from error


def echo_json(value: Mapping[str, Any]) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))

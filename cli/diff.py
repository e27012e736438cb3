"""rollout diff"""

from __future__ import annotations

from pathlib import Path

import click

from cli.options import echo_json, json_option, needs_torch, override_option, reports_errors
from cli.progress import ProgressReport, no_bars_in_logs


@click.command()
@click.argument("paths", metavar="A [B]", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="PATH_OR_ID",
    help="Given twice, with one run: replay it under both and compare the reports.",
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False),
    help="Of both replays, see configs/replay.yaml.",
)
@override_option
@click.option(
    "--rtol",
    type=click.FloatRange(min=0),
    default=0.01,
    show_default=True,
    help="Share of the larger value by which two may differ.",
)
@click.option(
    "--atol",
    type=click.FloatRange(min=0),
    default=1e-6,
    show_default=True,
    help="And by this much at any size.",
)
@json_option
@reports_errors
def diff(
    paths: tuple[Path, ...],
    models: tuple[str, ...],
    config: str | None,
    overrides: tuple[str, ...],
    rtol: float,
    atol: float,
    as_json: bool,
) -> None:
    """Compare two runs, two reports, or one run under two models.

    Settings that differ come first, then the numbers that differ by more than the tolerance, then
    the tokens that both reports have. Exits 0 if numbers and tokens are the same within the
    tolerance and 1 if not; settings decide nothing. Counts must be equal.

    \b
    Example:
      rollout diff runs/monday runs/tuesday
      rollout diff runs/a/reports/20260801T120000-1a2b3c runs/a/reports/20260802T120000-4d5e6f
      rollout diff runs/first --model checkpoints/100 --model checkpoints/200
    """
    from cli.tables import print_diff
    from rollout.diff import compare, load_side, with_reports

    if len(paths) == 1 and len(models) == 2:
        reports = [_replayed(paths[0], model, config, overrides) for model in models]
        a, b = (load_side(report) for report in reports)
    elif len(paths) == 2 and not models and not config and not overrides:
        a, b = with_reports(load_side(paths[0]), load_side(paths[1]), *paths)
    else:
        raise click.UsageError("give two runs or reports, or one run and --model twice")
    found = compare(a, b, rtol, atol)
    if as_json:
        echo_json(found.as_dict())
    else:
        print_diff(found)
    raise click.exceptions.Exit(0 if found.same else 1)


def _replayed(run: Path, model: str, config: str | None, overrides: tuple[str, ...]) -> Path:
    """The folder of a new report."""
    needs_torch()
    from replay.config import ReplayConfig
    from replay.job import replay_run
    from rollout.blocks import apply_overrides, read_yaml

    settings = apply_overrides(read_yaml(config) if config else {}, overrides)
    checked = ReplayConfig.build(settings, str(config or "replay"))
    no_bars_in_logs("transformers")
    with ProgressReport("replay") as progress:
        _, folder = replay_run(run, model, checked, progress.update)
    click.echo(f"report: {folder}", err=True)
    return folder

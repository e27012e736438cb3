"""rollout replay"""

from __future__ import annotations

from pathlib import Path

import click

from cli.options import echo_json, json_option, needs_torch, override_option, reports_errors
from cli.progress import ProgressReport, no_bars_in_logs

DTYPES = click.Choice(["float32", "bfloat16", "float16"])


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--model", required=True, metavar="PATH_OR_ID", help="The trainer's policy.")
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False),
    help="Gates and precision, see configs/replay.yaml.",
)
@click.option("--dtype", type=DTYPES, help="Of the policy's body. [default: bfloat16]")
@click.option("--head-dtype", type=DTYPES, help="Logits are rounded to it. [default: float32]")
@click.option("--device", help="[default: the GPU if there is one]")
@click.option("--max-tokens", type=int, help="Packed into one forward pass. [default: 4096]")
@click.option(
    "--audit",
    "audit_tokens",
    type=int,
    metavar="N",
    help="Tokens whose supports are audited; 0 = none. [default: 512]",
)
@click.option("--trust-remote-code", is_flag=True, default=None, help="Run the model's own code.")
@override_option
@json_option
@reports_errors
def replay(
    run: Path,
    model: str,
    config: Path | None,
    overrides: tuple[str, ...],
    as_json: bool,
    **flags: str | int | bool | None,
) -> None:
    """Recompute every sampled token's logprob over its support, and judge.

    Exits 0 if both sides are consistent and 1 if not. Numbers go to RUN/reports/<id>/summary.json,
    one row per token to tokens.arrow beside it.

    \b
    Example:
      rollout replay runs/first --model Qwen/Qwen3-0.6B --dtype bfloat16
    """
    needs_torch()
    from cli.tables import print_report
    from replay.config import ReplayConfig
    from replay.job import replay_run
    from rollout.blocks import apply_overrides, read_yaml

    settings = read_yaml(config) if config else {}
    settings = apply_overrides(settings, overrides)
    settings |= {name: value for name, value in flags.items() if value is not None}
    checked = ReplayConfig.build(settings, str(config or "replay"))
    no_bars_in_logs("transformers")
    with ProgressReport("replay") as progress:
        report, folder = replay_run(run, model, checked, progress.update)
    click.echo(f"report: {folder}", err=True)
    if as_json:
        echo_json(report.as_dict())
    else:
        print_report(report)
    raise click.exceptions.Exit(0 if report.verdict == "consistent" else 1)

"""rollout replay"""

from __future__ import annotations

from pathlib import Path

import click

from cli.fail_on import FailOn
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
@click.option(
    "--fail-on",
    multiple=True,
    metavar="WHAT",
    help="Exit 1 only for this: findings, gates, never. Or GATE=LIMIT sets a gate, as in "
    "mismatch_kl=0.001. Repeatable.",
)
@override_option
@json_option
@click.option("--md", "as_markdown", is_flag=True, help="Print Markdown, for a CI job's summary.")
@reports_errors
def replay(
    run: Path,
    model: str,
    config: Path | None,
    overrides: tuple[str, ...],
    fail_on: tuple[str, ...],
    as_json: bool,
    as_markdown: bool,
    **flags: str | int | bool | None,
) -> None:
    """Recompute every sampled token's logprob over its support, and judge.

    Exits 0 if both sides are consistent and 1 if not. RUN/reports/<id>/ gets report.html, the page
    to look at, summary.json with the numbers, and tokens.arrow with one row per token.

    \b
    Example:
      rollout replay runs/first --model Qwen/Qwen3-0.6B --dtype bfloat16
      rollout replay runs/first --model M --md --fail-on mismatch_kl=0.001 >> $GITHUB_STEP_SUMMARY
    """
    if as_json and as_markdown:
        raise click.UsageError("--json or --md, not both")
    needs_torch()
    from cli.tables import print_report
    from replay.config import ReplayConfig
    from replay.job import replay_run
    from replay.markdown import markdown
    from rollout.blocks import apply_overrides, read_yaml

    settings = read_yaml(config) if config else {}
    settings = apply_overrides(settings, overrides)
    settings |= {name: value for name, value in flags.items() if value is not None}
    fails = FailOn.parse(fail_on, ReplayConfig().gates.model_dump())
    settings = apply_overrides(settings, fails.overrides)
    checked = ReplayConfig.build(settings, str(config or "replay"))
    no_bars_in_logs("transformers")
    with ProgressReport("replay") as progress:
        report, folder = replay_run(run, model, checked, progress.update)
    click.echo(f"report: {folder / 'report.html'}", err=True)
    summary = report.as_dict()
    if as_json:
        echo_json(summary)
    elif as_markdown:
        click.echo(markdown(summary, run.resolve().name), nl=False)
    else:
        print_report(report)
    code = fails.exit_code(summary)
    if code == 0 and report.verdict != "consistent":
        click.echo(f"exit 0: --fail-on {', '.join(sorted(fails.words))}", err=True)
    raise click.exceptions.Exit(code)

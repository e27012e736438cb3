"""The command group, nothing else."""

from __future__ import annotations

import click

from cli.collect import collect
from cli.diff import diff
from cli.doctor import doctor
from cli.export import export
from cli.import_ import import_
from cli.inspect_ import inspect
from cli.merge import merge
from cli.repair import repair
from cli.replay import replay
from cli.stats import stats


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rollout")
def cli() -> None:
    """Record what the sampler chose from, replay it under the trainer's policy, compare.

    \b
    Exit codes:
      0    consistent; no difference; collected within the error budget; imported whole
      1    replay: inconsistent; diff: a difference
      2    usage: an option, a config key or a model that cannot be used, or does not fit
      3    data: a run, a file or a line that breaks the format, or nothing in it
      4    engine: unreachable, or it does not return the sampling mask
      5    stopped early: more failures than the error budget allows, or a full disk
      130  interrupted
    """


cli.add_command(collect)
cli.add_command(diff)
cli.add_command(doctor)
cli.add_command(export)
cli.add_command(import_)
cli.add_command(inspect)
cli.add_command(merge)
cli.add_command(repair)
cli.add_command(replay)
cli.add_command(stats)

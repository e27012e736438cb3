"""rollout import"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cli.options import echo_json, json_option, needs_torch, reports_errors
from cli.progress import ProgressReport
from rollout.adapters.formats import FORMATS, READABLE

SAMPLED = "What it was sampled with, where the file does not say it"


@click.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--from", "name", type=click.Choice(READABLE), required=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True)
@click.option("--tokenizer", metavar="PATH_OR_ID", help="Check ids against its model's vocabulary.")
@click.option("--vocab-size", type=click.IntRange(min=1), help="Check ids against this vocabulary.")
@click.option("--temperature", type=float, help=f"{SAMPLED}.")
@click.option("--top-p", type=float, help=f"{SAMPLED}; 1 = off.")
@click.option("--top-k", type=int, help=f"{SAMPLED}; -1 = no limit.")
@click.option("--min-p", type=float, help=f"{SAMPLED}; 0 = off.")
@click.option("--max-new-tokens", type=int, help=f"{SAMPLED}.")
@click.option("--finish-reason", type=click.Choice(["stop", "length"]), help="Why all of it ended.")
@click.option("--reward-key", metavar="NAME", help="Which of several rewards is the reward.")
@json_option
@reports_errors
def import_(
    file: Path,
    name: str,
    out: Path,
    tokenizer: str | None,
    vocab_size: int | None,
    as_json: bool,
    **said: Any,
) -> None:
    """Import what another tool recorded into a run directory.

    The formats, and what each leaves for the options to say: docs/integrations.md. sglang-jsonl has
    one {"sampling_params": ..., "response": <body of /generate>} per line. What breaks a rule goes
    to rejected.jsonl with the reason, and the exit code is 3. The same command again goes on where
    it stopped.

    \b
    Example:
      rollout import --from sglang-jsonl dump.jsonl --out runs/imported
      rollout import --from slime rollout_0.pt --out runs/imported \\
          --temperature 1 --top-p 0.95 --top-k -1 --min-p 0 --max-new-tokens 1024
    """
    from rollout.adapters.facts import Facts
    from rollout.adapters.importing import import_file
    from rollout.prompts import describe_tokenizer, load_tokenizer, vocabulary_size

    if tokenizer is not None and vocab_size is not None:
        raise click.UsageError("give --tokenizer or --vocab-size, not both")
    format = FORMATS[name]
    assert format.read is not None, "only formats that can be read are offered"
    if format.needs_torch:
        needs_torch()
    identity = None
    if tokenizer is not None:
        loaded = load_tokenizer(tokenizer)
        identity = describe_tokenizer(loaded, tokenizer)
        vocab_size = vocabulary_size(loaded, tokenizer)
    with ProgressReport("import") as progress:
        result = import_file(
            format.read,
            file,
            out,
            name=name,
            facts=Facts(**said),
            vocab_size=vocab_size,
            tokenizer=identity,
            progress=progress.update,
        )
    rejected = sum(result.rejected.values())
    if as_json:
        echo_json(result.as_dict())
    else:
        click.echo(
            f"{result.rollouts} rollouts, {result.output_tokens} output tokens into {out}, "
            f"{rejected} rejected"
        )
    if result.already_stored:
        click.echo(
            f"{result.already_stored} rollouts of this file were stored in {out} already, by an "
            "earlier import of it; they were left as they are",
            err=True,
        )
    for reason, count in result.rejected.items():
        click.echo(f"rejected: {count} x {reason}, see {out}/rejected.jsonl", err=True)
    for diagnosis in result.diagnoses:
        click.echo(f"{diagnosis.code}: {diagnosis.sentence}\n  -> {diagnosis.advice}", err=True)
    if rejected or not (result.rollouts or result.already_stored):
        raise click.exceptions.Exit(3)
    click.echo(f"next: rollout replay {out} --model PATH_OR_ID", err=True)

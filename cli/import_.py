"""rollout import"""

from __future__ import annotations

from pathlib import Path

import click

from cli.options import echo_json, json_option, reports_errors


@click.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--from", "layout", type=click.Choice(["sglang-jsonl"]), required=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True)
@click.option("--tokenizer", metavar="PATH_OR_ID", help="Check ids against its model's vocabulary.")
@click.option("--vocab-size", type=click.IntRange(min=1), help="Check ids against this vocabulary.")
@json_option
@reports_errors
def import_(
    file: Path,
    layout: str,
    out: Path,
    tokenizer: str | None,
    vocab_size: int | None,
    as_json: bool,
) -> None:
    """Import recorded replies of other tools into a run directory.

    sglang-jsonl: one {"sampling_params": ..., "response": <body of /generate>} per line. A line
    that breaks a rule goes to rejected.jsonl with the reason, and the exit code is 3.

    \b
    Example:
      rollout import --from sglang-jsonl dump.jsonl --out runs/imported
    """
    from rollout.adapters.sglang_jsonl import import_sglang_jsonl
    from rollout.prompts import describe_tokenizer, load_tokenizer, vocabulary_size

    if tokenizer is not None and vocab_size is not None:
        raise click.UsageError("give --tokenizer or --vocab-size, not both")
    identity = None
    if tokenizer is not None:
        loaded = load_tokenizer(tokenizer)
        identity = describe_tokenizer(loaded, tokenizer)
        vocab_size = vocabulary_size(loaded, tokenizer)
    result = import_sglang_jsonl(file, out, vocab_size=vocab_size, tokenizer=identity)
    rejected = sum(result.rejected.values())
    if as_json:
        echo_json(result.as_dict())
    else:
        click.echo(
            f"{result.rollouts} rollouts, {result.output_tokens} output tokens into {out}, "
            f"{rejected} rejected"
        )
    for reason, count in result.rejected.items():
        click.echo(f"rejected: {count} x {reason}, see {out}/rejected.jsonl", err=True)
    for diagnosis in result.diagnoses:
        click.echo(f"{diagnosis.code}: {diagnosis.sentence}\n  -> {diagnosis.advice}", err=True)
    if rejected or not result.rollouts:
        raise click.exceptions.Exit(3)
    click.echo(f"next: rollout replay {out} --model PATH_OR_ID", err=True)

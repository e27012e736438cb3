"""Progress on stderr: a bar on a terminal, a line every ten seconds in a log."""

from __future__ import annotations

import importlib
import time
from types import TracebackType
from typing import Self

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY_S = 10.0


def no_bars_in_logs(*libraries: str) -> None:
    """Where stderr is no terminal, keep the bars of the libraries we call out of it."""
    if Console(stderr=True).is_terminal:
        return
    for name in libraries:
        importlib.import_module(f"{name}.utils.logging").disable_progress_bar()


class ProgressReport:
    """Shows done, total, tokens per second and whatever else is worth a word."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._start = self._last_line = time.monotonic()
        self._console = Console(stderr=True)
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=self._console,
            )
            self._task = self._bar.add_task(self._label, total=None, note="")
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def note(self, text: str) -> None:
        """A line beside the progress, above a bar."""
        if self._bar is not None:
            self._bar.console.print(f"note: {text}", markup=False, highlight=False)
        else:
            click.echo(f"note: {text}", err=True)

    def update(self, done: int, total: int, tokens: int, note: str = "") -> None:
        now = time.monotonic()
        speed = f"{tokens / max(now - self._start, 1e-9):,.0f} tokens/s {note}".rstrip()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, note=speed)
        elif now - self._last_line >= LINE_EVERY_S or done == total:
            self._last_line = now
            click.echo(f"{self._label} {done}/{total} rollouts, {speed}", err=True)

"""Ctrl-C on a long collect: the first finishes what is in flight, the second stops at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar

import click

R = TypeVar("R")


def run_until_interrupted(job: Callable[[asyncio.Event], Awaitable[R]]) -> R:
    """Run ``job(stop)``; SIGINT or SIGTERM sets `stop`, a second one raises KeyboardInterrupt."""

    async def run() -> R:
        stop = asyncio.Event()
        task = asyncio.ensure_future(job(stop))

        def interrupted() -> None:
            if stop.is_set():
                task.cancel()
            else:
                click.echo("stopping: finishing what is in flight; again to stop now", err=True)
                stop.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupted)
        return await task

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None

"""What is needed next, made ahead of time in a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Key = TypeVar("Key")
Made = TypeVar("Made")


def prefetched(make: Callable[[Key], Made], keys: Iterable[Key], ahead: int) -> Iterator[Made]:
    """`map(make, keys)`, with `ahead` results made or in the making while the caller has one.

    An error of `make` is raised where its result is due. The thread ends with the iterator: at its
    end, at an error, and when it is closed or dropped. With `ahead` 0 there is no thread.
    """
    if not ahead:
        yield from map(make, keys)
        return
    with ThreadPoolExecutor(1, "rollout-prefetch") as thread:
        waiting: deque[Future[Made]] = deque()
        try:
            for key in keys:
                waiting.append(thread.submit(make, key))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            thread.shutdown(cancel_futures=True)

"""Results made ahead in a thread: in order, no further than asked, and the thread ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from replay.prefetch import prefetched

NAME = "rollout-prefetch"


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert threads() == 0


def threads() -> int:
    return sum(thread.name.startswith(NAME) for thread in threading.enumerate())


@pytest.mark.parametrize("ahead", [0, 1, 3, 100])
def test_results_come_in_order(ahead: int) -> None:
    assert list(prefetched(str, range(9), ahead)) == list("012345678")


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_no_more_is_made_than_asked_for(ahead: int) -> None:
    made: list[int] = []
    results = prefetched(lambda key: made.append(key), range(99), ahead)
    assert (made, threads()) == ([], 0)  # nothing before the first is asked for
    for taken in range(1, 5):
        next(results)
        assert len(made) <= taken + ahead
    results.close()
    assert len(made) <= 4 + ahead


def test_it_works_while_the_consumer_does() -> None:
    begun = threading.Event()

    def make(key: int) -> int:
        if key == 1:
            begun.set()
        return key

    results = prefetched(make, range(3), 1)
    next(results)
    assert begun.wait(30)
    results.close()


def test_an_error_is_raised_where_its_result_is_due() -> None:
    results = prefetched(lambda key: 1 // (2 - key), range(9), 3)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert list(results) == []


def test_a_dropped_iterator_ends_its_thread() -> None:
    results = prefetched(str, range(9), 3)
    next(results)
    assert threads() == 1
    del results
    assert threads() == 0

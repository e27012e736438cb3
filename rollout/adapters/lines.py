"""Lines: a text file that may be larger than memory, line by line, as often as wanted."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from rollout.errors import ConfigError


class Lines(Collection[tuple[int, bytes]]):
    """The lines of a file that are not blank, each with its number from 1 and without its end.

    Raises `ConfigError` for a file that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._count = sum(1 for _ in self)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        try:
            with self._path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield number, line.rstrip(b"\r\n")
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be read ({error.strerror})") from error

    def __len__(self) -> int:
        return self._count

    def __contains__(self, line: object) -> bool:
        return any(line == own for own in self)

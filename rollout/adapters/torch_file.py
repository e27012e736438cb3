"""Files of `torch.save` that hold tensors and plain containers, and nothing else."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.errors import ConfigError, FormatError

# what damaged files raise: 5,000 dumps with some bytes changed raised these
DAMAGED = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AssertionError,
    AttributeError,
)


def write(path: Path, content: Mapping[str, Any]) -> None:
    """`torch.save`, the file of which `read` reads."""
    import torch

    torch.save(dict(content), path)


def load(path: Path, needs: Sequence[str]) -> dict[str, Any]:
    """The dict in the file, which has the keys that it `needs`. No code of the file runs.

    Raises `ConfigError` if it cannot be opened and `FormatError` if it is no such file, or needs a
    class other than tensors and plain containers.
    """
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except DAMAGED as error:
        raise FormatError(f"{path}: {_explain(path, error)}") from error
    if not isinstance(content, dict) or (missing := [key for key in needs if key not in content]):
        wanted = ", ".join(map(repr, needs))
        got = type(content).__name__ if not isinstance(content, dict) else f"no {missing[0]!r}"
        raise FormatError(f"{path}: must be a dict with {wanted}, got {got}")
    return content


def read(path: Path, key: str) -> list[Any]:
    """The list under `key`, as `load` reads it; `FormatError` if there is another thing."""
    found = load(path, (key,))[key]
    if not isinstance(found, list):
        raise FormatError(f"{path}: must have a list under {key!r}, got {type(found).__name__}")
    return found


def _explain(path: Path, error: Exception) -> str:
    """Which classes the file needs, where that is what is wrong."""
    import torch

    try:
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except DAMAGED:
        foreign = []
    if not foreign:
        # what torch says of a pickle that it refuses is to load it with weights_only=False
        told = [] if isinstance(error, pickle.UnpicklingError) else str(error).splitlines()
        return f"not a file of torch.save ({told[0] if told else type(error).__name__})"
    return (
        f"needs {', '.join(foreign)}; only tensors and plain containers are read, because reading "
        "anything else can run code. Turn these into lists where the file was written "
        "(array.tolist()), and save it again"
    )

"""Stands in for SGLang's compiled kernels, which cannot load without a GPU driver.

The CPU engine imports names from here at start-up; a dense model with torch-native attention and
the pytorch sampler never calls them. A call is an error, never a silently wrong result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def not_here(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs SGLang's compiled kernels")

    return not_here

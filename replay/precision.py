"""InPrecision: a model as if it had been loaded in another dtype, without a second copy of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.parameter import Parameter
from torch.overrides import TorchFunctionMode


class InPrecision(TorchFunctionMode):
    """Within this context every parameter is read in `dtype`: one at a time, where it is used.

    What a model computes is what it would if its parameters had been loaded in `dtype`; the model
    itself, its memory and its gradients stay as they are. Buffers and parameters that are no plain
    floating tensors (quantised, sharded) are read as they are.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.embedding:  # the same numbers, without a copy of the table
            found: Tensor = func(*args, **kwargs)
            return found.to(self.dtype)
        return func(*map(self._read, args), **{k: self._read(v) for k, v in kwargs.items()})

    def _read(self, value: Any) -> Any:
        if type(value) is Parameter and value.is_floating_point():
            return value.to(self.dtype)
        return value

"""Loading and stepping a transformers model."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from rollout.errors import ConfigError, PolicyError
from rollout.files import is_missing_folder

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def load_model(path: str, *, dtype: str, device: str, trust_remote_code: bool) -> PreTrainedModel:
    """The causal language model at `path` (folder or hub id) in eval mode on `device`.

    Attention is sdpa where the model supports it, which is what transformers picks unless told.
    Raises `ConfigError` for a path, dtype or device that cannot be used and for code that may not
    run, `PolicyError` for weights that are damaged or incomplete: transformers would fill what is
    missing with random numbers.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: got {dtype!r}, must be one of {', '.join(DTYPES)}")
    target = _device(device)
    auto: Any = AutoModelForCausalLM
    try:
        model, loading = auto.from_pretrained(
            path,
            dtype=DTYPES[dtype],
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except SafetensorError as error:
        raise PolicyError(f"{path}: the weights cannot be read: {error}") from error
    except (OSError, ValueError) as error:
        raise _cannot_load(path, error) from error
    if missing := sorted(loading["missing_keys"]):
        raise PolicyError(
            f"{path}: {len(missing)} weights are missing, the first is {missing[0]}; "
            "the folder holds another architecture or an unfinished download"
        )
    return cast(PreTrainedModel, model.to(target).eval())


class GrowingBatch:
    """B sequences of tokens on the model's device, decoded a step at a time with a cache.

    Prompts are padded on the left; the mask hides the padding and positions start after it.
    """

    def __init__(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)
        arguments = _arguments(model)
        self._cache_argument = _cache_argument(arguments)
        self._optional = arguments & {"position_ids", "logits_to_keep"}
        widest = max(map(len, prompts))
        padding = [widest - len(prompt) for prompt in prompts]
        ids = [[0] * n + list(prompt) for n, prompt in zip(padding, prompts, strict=True)]
        mask = [[0] * n + [1] * (widest - n) for n in padding]
        self._input_ids = torch.tensor(ids, device=model.device)
        self._mask = torch.tensor(mask, device=model.device)
        self._position_ids = (self._mask.cumsum(dim=1) - 1).clamp(min=0)

    def logits(self) -> Tensor:
        """Logits [B, V], in the model's dtype, after the last token of each row; call once."""
        optional = {"position_ids": self._position_ids, "logits_to_keep": 1}
        output = self._model(
            input_ids=self._input_ids,
            attention_mask=self._mask,
            use_cache=True,
            **{self._cache_argument: self._cache},
            **{name: optional[name] for name in self._optional},
        )
        return cast(Tensor, output.logits[:, -1])

    def append(self, tokens: Tensor) -> None:
        """Add one token per row, int64 [B]."""
        self._input_ids = tokens[:, None]
        self._position_ids = self._position_ids[:, -1:] + 1
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)

    def take(self, rows: Tensor) -> None:
        """Go on with the rows of `rows`, an int64 index, alone."""
        self._cache.batch_select_indices(rows)
        self._input_ids = self._input_ids[rows]
        self._position_ids = self._position_ids[rows]
        self._mask = self._mask[rows]


def check_batchable(path: str, model: PreTrainedModel) -> None:
    """`ConfigError` for a model whose state a `GrowingBatch` cannot hold or cannot split."""
    layers = DynamicCache(config=model.config).layers
    has_rows = all(hasattr(layer, "batch_select_indices") for layer in layers)
    arguments = _arguments(model)
    if not has_rows or _cache_argument(arguments) not in arguments:
        raise ConfigError(
            f"{path}: {type(model).__name__} keeps another state than keys and values, which "
            "cannot be batched here; use the sglang engine"
        )


def _arguments(model: PreTrainedModel) -> frozenset[str]:
    return frozenset(inspect.signature(model.forward).parameters)


def _cache_argument(arguments: Collection[str]) -> str:
    # transformers renamed it in 5
    return "cache" if "cache" in arguments else "past_key_values"


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device: {error}") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device: got {name!r}, but torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA devices"
        )
    return device


def _cannot_load(path: str, error: OSError | ValueError) -> ConfigError:
    if "trust_remote_code" in str(error):
        return ConfigError(
            f"{path}: the model needs code from its own folder; read that code, then set "
            "trust_remote_code: true"
        )
    why = "no such folder" if is_missing_folder(path) else error
    return ConfigError(f"{path}: no model could be loaded: {why}")

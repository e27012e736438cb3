"""Block: the base of every configuration class; YAML files and overrides become blocks here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from rollout.errors import ConfigError


class Block(BaseModel):
    """One block of settings: frozen, strictly typed, unknown keys refused by name."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            for key in data:
                if key not in cls.model_fields:
                    raise ValueError(f"unknown key {key!r}{_suggest(str(key), cls.model_fields)}")
        return data

    @classmethod
    def build(cls, data: Mapping[str, Any], where: str) -> Self:
        """Check `data` and build the block; `ConfigError` names the place and what was wanted."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError(f"{where}: {explain(error)}") from error

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Self:
        """Read a YAML file, apply ``block.key=value`` overrides and check the result."""
        return cls.build(apply_overrides(read_yaml(path), overrides), str(path))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        data = _parse(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must hold a mapping of blocks, got {type(data).__name__}")
    return data


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`data` with each ``a.b=value`` set; values are YAML scalars."""
    for override in overrides:
        path, equals, text = override.partition("=")
        *parents, leaf = path.split(".")
        if not equals or not all([*parents, leaf]):
            raise ConfigError(f"-o {override}: must look like block.key=value")
        node = data
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ConfigError(f"-o {override}: {parent!r} is a value, not a block")
        try:
            node[leaf] = _parse(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"-o {override}: the value is not YAML: {error}") from error
    return data


class _Loader(yaml.SafeLoader):
    """YAML 1.2 numbers: PyYAML takes 1e-3 for text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _parse(text: str) -> Any:
    return yaml.load(text, _Loader)


def _suggest(key: str, known: Mapping[str, Any]) -> str:
    if close := get_close_matches(key, known, n=1):
        return f"; did you mean {close[0]!r}?"
    return f"; known keys: {', '.join(known)}"


def explain(error: ValidationError) -> str:
    """Pydantic's findings on one line each, without its links."""
    lines = []
    for finding in error.errors(include_url=False):
        place = ".".join(str(part) for part in finding["loc"])
        message = finding["msg"].removeprefix("Value error, ")
        got = "" if finding["type"] == "value_error" else f", got {finding['input']!r}"
        lines.append(f"{place}: {message}{got}" if place else f"{message}{got}")
    return "\n  ".join(lines)

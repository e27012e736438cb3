"""Files of torch.save: tensors and plain containers are read, nothing of the file is run."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout import errors
from rollout.adapters import torch_file


class Mask:
    """A class of a trainer's own, as a dump of its samples may hold."""


class Harmful:
    """Unpickling this would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_tensors_and_plain_containers_come_back(tmp_path: Path) -> None:
    content = [{"a": torch.tensor([1, 2], dtype=torch.int32), "b": (1, 2.5, None, "x", b"y")}]
    torch_file.write(tmp_path / "f.pt", {"samples": content})
    (back,) = torch_file.read(tmp_path / "f.pt", "samples")
    assert back["a"].dtype == torch.int32
    assert (back["a"].tolist(), back["b"]) == ([1, 2], (1, 2.5, None, "x", b"y"))


def test_a_foreign_class_is_refused_by_name(tmp_path: Path) -> None:
    torch.save({"samples": [{"mask": Mask()}]}, tmp_path / "f.pt")
    with pytest.raises(errors.FormatError, match=r"f.pt: needs .*\.Mask; only tensors and plain"):
        torch_file.read(tmp_path / "f.pt", "samples")


def test_a_numpy_array_is_refused_with_what_to_do(tmp_path: Path) -> None:
    torch.save({"samples": [{"experts": np.zeros(3)}]}, tmp_path / "f.pt")
    with pytest.raises(errors.FormatError, match=r"numpy.*Turn these into lists .*array.tolist"):
        torch_file.read(tmp_path / "f.pt", "samples")


def test_code_of_a_file_does_not_run(tmp_path: Path) -> None:
    torch.save({"samples": [Harmful(tmp_path / "made")]}, tmp_path / "f.pt")
    with pytest.raises(errors.FormatError, match="mkdir"):
        torch_file.read(tmp_path / "f.pt", "samples")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"PK\x03\x04 no", id="cut"),
        pytest.param(b"{}", id="JSON"),
    ],
)
def test_what_is_no_file_of_torch_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "f.pt").write_bytes(content)
    with pytest.raises(errors.FormatError, match="not a file of torch.save"):
        torch_file.read(tmp_path / "f.pt", "samples")


@pytest.mark.parametrize(
    "content", [pytest.param({"data": []}, id="key"), pytest.param([1], id="list")]
)
def test_a_file_without_samples_is_refused(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "f.pt")
    with pytest.raises(errors.FormatError, match="must be a dict with 'samples'"):
        torch_file.read(tmp_path / "f.pt", "samples")


@pytest.mark.parametrize(
    "name", [pytest.param("nowhere", id="missing"), pytest.param("", id="dir")]
)
def test_what_cannot_be_opened_is_a_config_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="cannot be read"):
        torch_file.read(tmp_path / name, "samples")


def test_no_message_says_to_load_a_file_unsafely(tmp_path: Path) -> None:
    (tmp_path / "f.pt").write_bytes(b'{"rollouts": []}')
    with pytest.raises(errors.FormatError, match=r"not a file of torch.save \(UnpicklingError\)$"):
        torch_file.read(tmp_path / "f.pt", "samples")

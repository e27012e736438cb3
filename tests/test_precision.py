"""A policy read in another precision is the one that would have been loaded in it, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from test_policy import ARCHITECTURES

from replay.policy import Policy
from replay.precision import InPrecision

WIDE = {"hidden_size": 64}  # Gemma scales embeddings by its root, which bfloat16 holds exactly


@pytest.fixture(params=list(ARCHITECTURES))
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A small random checkpoint with weights that bfloat16 holds exactly."""
    name, options = ARCHITECTURES[request.param]
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    config = model_class.config_class(**options | WIDE)
    model_class(config).bfloat16().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("loaded", "wanted"), [("bfloat16", "float32"), ("float32", "bfloat16")], ids=["up", "down"]
)
def test_hidden_states_are_those_of_a_policy_that_was_loaded_so(
    checkpoint: Path, loaded: str, wanted: str
) -> None:
    policy = Policy.load(str(checkpoint), dtype=loaded, device="cpu")
    other = Policy.load(str(checkpoint), dtype=wanted, device="cpu")
    ids, positions = torch.arange(5, 25), torch.arange(20) % 12  # two packed rollouts
    before = policy.hidden(ids, positions)
    read = policy.in_precision(getattr(torch, wanted))
    got = read.hidden(ids, positions)
    assert got.dtype == getattr(torch, wanted)
    assert torch.equal(got, other.hidden(ids, positions))
    assert torch.equal(read.weight.to(other.weight.dtype), other.weight)
    assert torch.equal(policy.hidden(ids, positions), before), "the policy itself is as it was"


def test_parameters_alone_are_read_in_another_precision() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    buffer, counts = torch.ones(2, dtype=torch.float64), torch.nn.Parameter(torch.ones(2), False)
    with InPrecision(torch.float32):
        assert (weight.dtype, weight.mul(1).dtype) == (torch.float32, torch.float32)
        assert torch.nn.functional.linear(torch.ones(2), weight=weight).dtype == torch.float32
        assert buffer.mul(1).dtype == torch.float64
    assert weight.dtype == torch.bfloat16
    whole = torch.nn.Parameter(counts.data.to(torch.int8), requires_grad=False)
    with InPrecision(torch.float32):
        assert whole.mul(1).dtype == torch.int8, "quantised weights are read as they are"

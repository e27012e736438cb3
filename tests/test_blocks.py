"""Configuration: YAML, overrides, and errors that name the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.blocks import apply_overrides
from rollout.config import CollectConfig, EmbeddedConfig, SGLangConfig
from rollout.errors import ConfigError

GOOD = """
model: m
prompts: {dataset: d}
sampling: {top_k: 20}
engine: {kind: embedded}
"""


def load(tmp_path: Path, text: str, *overrides: str) -> CollectConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return CollectConfig.load(path, overrides)


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD, "sampling.top_k=50", "sampling.temperature=0.7", "seed=null")
    assert (config.sampling.top_k, config.sampling.temperature, config.seed) == (50, 0.7, None)


def test_engine_block_is_chosen_by_kind(tmp_path: Path) -> None:
    assert isinstance(load(tmp_path, GOOD).engine, EmbeddedConfig)
    served = GOOD.replace("{kind: embedded}", "{kind: sglang, url: 'http://x:1'}")
    assert isinstance(load(tmp_path, served).engine, SGLangConfig)


def test_home_is_expanded_in_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert load(tmp_path, GOOD, "model=~/m").model == "/home/someone/m"


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        pytest.param(GOOD, ["sampling.top_kk=5"], "sampling: unknown key 'top_kk'; did you mean "
                     "'top_k'?", id="misspelt key in an override"),
        pytest.param(GOOD + "sampilng: {}", [], "unknown key 'sampilng'; did you mean 'sampling'",
                     id="misspelt block"),
        pytest.param(GOOD, ["sampling.top_k='20'"], "sampling.top_k.int: Input should be a valid "
                     "integer, got '20'", id="wrong type"),
        pytest.param(GOOD, ["engine.kind=vlllm"], "engine: .* 'embedded', 'sglang'",
                     id="unknown engine"),
        pytest.param(GOOD, ["sampling.sampling_seed=3"], "every rollout the same seed",
                     id="one seed for all"),
        pytest.param(GOOD, ["engine={kind: sglang, url: 'http://x', route: chat}",
                     "prompts.format=text"], "route: chat sends messages", id="chat without them"),
        pytest.param(GOOD, ["top_k"], "must look like block.key=value", id="override without ="),
        pytest.param(GOOD, ["model.x=1"], "'model' is a value, not a block", id="value as block"),
        pytest.param(GOOD, ["seed=[1"], "value is not YAML", id="override is not YAML"),
        pytest.param("- a", [], "must hold a mapping of blocks, got list", id="not a mapping"),
        pytest.param("a: [", [], "not YAML", id="not YAML"),
    ],
)  # fmt: skip
def test_a_bad_config_is_refused_by_name(
    tmp_path: Path, text: str, overrides: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, text, *overrides)


def test_a_password_in_a_url_is_refused_without_showing_it(tmp_path: Path) -> None:
    override = "engine={kind: sglang, url: ['http://a', 'http://me:s3cret@b:30000']}"
    with pytest.raises(ConfigError, match="SGLANG_API_KEY") as caught:
        load(tmp_path, GOOD, override)
    assert "s3cret" not in str(caught.value)


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.yaml: cannot be read"):
        CollectConfig.load(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "0.1e-2", "1.e-3", "+1e-3", "0.001"])
def test_numbers_are_written_as_anywhere_else(text: str) -> None:
    assert apply_overrides({}, [f"a={text}"]) == {"a": 0.001}


@pytest.mark.parametrize("text", ["1e", "e3", "1e-3x", "v1"])
def test_words_stay_words(text: str) -> None:
    assert apply_overrides({}, [f"a={text}"]) == {"a": text}


def test_overrides_create_blocks() -> None:
    assert apply_overrides({}, ["a.b.c=1", "a.d=x"]) == {"a": {"b": {"c": 1}, "d": "x"}}

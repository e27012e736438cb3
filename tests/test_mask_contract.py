"""`rollout collect` and the contract of sampling masks: what is refused, recorded, noticed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from chaos import fake_reply, fake_server, make_reply, running
from faults import Asked, settings_file, status, stored
from test_cli import run

from rollout.files import read_lines
from rollout.schema import ERRORS_FILE, REJECTED_FILE

OVERFLOW = (
    "Sampling support exceeds --sampling-mask-max-tokens=4096, commonly because of cutoff ties. "
    "Lower top_k to leave more headroom or increase the server limit."
)


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return list(read_lines(folder / name))


@pytest.mark.parametrize(
    ("top_k", "words"),
    [
        pytest.param(-1, "must be finite", id="no limit"),
        pytest.param(0, "must be at least 1", id="none"),
        pytest.param(5000, "got 5000, the engine allows at most 4096", id="over the servers cap"),
        pytest.param(200_000, "got 200000, the engine allows at most 4096", id="over everything"),
    ],
)
def test_a_top_k_that_gives_no_masks_stops_before_a_rollout_is_asked_for(
    tmp_path: Path, tiny_model_path: Path, top_k: int, words: str
) -> None:
    with running(fake_server()) as server:
        settings = settings_file(tmp_path, tiny_model_path, server.url, 2)
        result = run(
            "collect", settings, "--out", tmp_path / "run", "-o", f"sampling.top_k={top_k}"
        )
    assert result.exit_code == 2 and words in result.stderr, result.output
    assert server.requests == []
    assert not (tmp_path / "run").exists()


def test_a_top_k_that_truncates_nothing_is_refused_where_the_server_has_no_cap(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    with running(fake_server(version="0.5.19")) as server:
        settings = settings_file(tmp_path, tiny_model_path, server.url, 2)
        result = run("collect", settings, "--out", tmp_path / "run", "-o", "sampling.top_k=1024")
    assert result.exit_code == 2 and "must be below the vocabulary of 1024" in result.stderr


@pytest.mark.parametrize(
    ("top_p", "is_noted"), [("0.99999999", True), ("0.99999997", False)], ids=str
)
def test_a_top_p_that_is_one_in_float32_is_told(
    tmp_path: Path, tiny_model_path: Path, top_p: str, is_noted: bool
) -> None:
    with running(fake_server()) as server:
        settings = settings_file(tmp_path, tiny_model_path, server.url, 1)
        out = tmp_path / "run"
        result = run("collect", settings, "--out", out, "-o", f"sampling.top_p={top_p}")
    assert result.exit_code == 0, result.output
    assert (f"note: top_p {top_p} is 1 in float32 and has no effect" in result.stderr) is is_noted
    (rollout,) = stored(out).values()
    assert json.loads(rollout.sampling_params)["top_p"] == float(top_p)


def test_auto_says_which_number_it_took(tmp_path: Path, tiny_model_path: Path) -> None:
    with running(fake_server(sampling_mask_max_tokens=1000)) as server:
        settings = settings_file(tmp_path, tiny_model_path, server.url, 1)
        out = tmp_path / "run"
        result = run("collect", settings, "--out", out, "-o", "sampling.top_k=auto")
    assert "note: top_k auto is 512 here" in result.stderr
    assert [r.top_k for r in stored(out).values()] == [512]


def reply_for(mask: list[list[int]], output_ids: list[int], logprobs: list[float]) -> Any:
    """Answers every request with these rows."""
    return lambda asked: make_reply(asked, output_ids, mask, logprobs)


def test_a_set_of_more_ids_than_top_k_is_data_and_stored_as_it_is(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    """p = [.4, .3, .2, .1], top_k 2, and the server says {0, 1, 2} for y = 2."""
    answer = reply_for([[0, 1, 2]], [2], [math.log(0.2 / 0.9)])
    with running(fake_server(answer)) as server:
        settings = settings_file(tmp_path, tiny_model_path, server.url, 1)
        result = run("collect", settings, "--out", tmp_path / "run", "-o", "sampling.top_k=2")
    assert result.exit_code == 0, result.output
    (rollout,) = stored(tmp_path / "run").values()
    assert rollout.support.ids.tolist() == [0, 1, 2]
    assert rollout.sampling_logprobs.tolist() == pytest.approx([-1.504077], abs=1e-6)


def test_a_sampled_id_outside_its_set_is_rejected_and_never_put_back(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    answer = reply_for([[0, 1]], [2], [math.log(0.2 / 0.9)])
    with running(fake_server(answer)) as server:
        settings = settings_file(tmp_path, tiny_model_path, server.url, 1)
        result = run("collect", settings, "--out", tmp_path / "run", "-o", "sampling.top_k=2")
    assert result.exit_code == 5, result.output
    (line,) = lines(tmp_path / "run", REJECTED_FILE)
    assert line["reason"] == "sampled_outside_support"
    assert json.loads(line["body"])["output_ids"] == [2]


def without_mask(asked: Asked) -> Asked:
    reply = fake_reply(asked)
    del reply["meta_info"]["output_token_sampling_mask"]
    return reply


def null_in_it(asked: Asked) -> Asked:
    reply = fake_reply(asked)
    reply["meta_info"]["output_token_sampling_mask"][1] = None
    return reply


def test_an_endpoint_that_never_returns_masks_stops_at_the_probe(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    with running(fake_server(probe=without_mask)) as server:
        settings = settings_file(tmp_path, tiny_model_path, server.url, 8)
        result = run("collect", settings, "--out", tmp_path / "run")
    assert result.exit_code == 4, result.output
    assert f"{server.url}/generate: the reply has no sampling mask" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("spoiled", [without_mask, null_in_it], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("budget", "code"), [("0", 5), ("1", 0)], ids=["no budget", "budget 1"])
def test_one_reply_without_a_mask_is_one_failure(
    tmp_path: Path, tiny_model_path: Path, spoiled: Any, budget: str, code: int
) -> None:
    replies = iter([fake_reply] * 5 + [spoiled] + [fake_reply] * 2)
    with running(fake_server(lambda asked: next(replies)(asked))) as server:
        settings = settings_file(tmp_path, tiny_model_path, server.url, 8)
        out = tmp_path / "run"
        options = ("-o", "concurrency=1", "-o", f"error_budget={budget}")
        result = run("collect", settings, "--out", out, *options)
    assert result.exit_code == code, result.output
    assert len(stored(out)) == (7 if code == 0 else 5)
    assert [line["reason"] for line in lines(out, ERRORS_FILE)] == ["sampling_mask_missing"]


@pytest.mark.parametrize("policy", ["skip", "lower_top_k"])
def test_ties_above_the_cap_are_counted_apart(
    tmp_path: Path, tiny_model_path: Path, policy: str
) -> None:
    def answer(asked: Asked) -> Any:
        if asked["sampling_params"]["top_k"] > 300:
            return status(400, json.dumps({"error": {"message": OVERFLOW}}))(asked)
        return fake_reply(asked)

    with running(fake_server(answer)) as server:
        settings = settings_file(tmp_path, tiny_model_path, server.url, 2)
        out = tmp_path / "run"
        options = ("-o", f"on_overflow={policy}", "-o", "error_budget=0")
        result = run("collect", settings, "--out", out, *options, "--json")
    if policy == "skip":
        assert result.exit_code == 3, "nothing came, and no budget is spent"
        assert [line["reason"] for line in lines(out, ERRORS_FILE)] == ["support_overflow"] * 2
        assert "lower sampling.top_k" in lines(out, ERRORS_FILE)[0]["message"]
    else:
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["last_command"]["retried"] == {"support_overflow": 2}
        assert [r.top_k for r in stored(out).values()] == [300, 300]


def test_the_api_key_stands_nowhere_on_the_disk_and_in_no_message(
    tmp_path: Path, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "sk-7c1f0a"
    monkeypatch.setenv("SGLANG_API_KEY", key)
    with running(fake_server()) as server:
        settings = settings_file(tmp_path, tiny_model_path, server.url, 2)
        result = run("collect", settings, "--out", tmp_path / "run")
        dead = run("collect", settings, "--out", tmp_path / "b", "-o", "engine.url=http://[::1]:9")
    assert (result.exit_code, dead.exit_code) == (0, 4), result.output
    assert set(server.authorizations) == {f"Bearer {key}"}
    written = [p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()]
    assert written and not any(key.encode() in content for content in written)
    assert key not in result.output + result.stderr + dead.output + dead.stderr

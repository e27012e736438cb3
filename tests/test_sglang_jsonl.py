"""Import of recorded replies: whole sets, and one broken line per rule."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import RECORDED, recorded_lines, write_lines

from rollout import errors
from rollout.adapters.sglang_jsonl import import_sglang_jsonl, parse_line, recorded_params
from rollout.reader import open_run
from rollout.stats import run_stats

TOKENS = {
    "sglang_0.5.21_h200_flashinfer": (979, 303),
    "sglang_0.5.21_h200_pytorch": (1003, 0),
    "sglang_0.5.23_cpu_pytorch": (1009, 0),
}


@pytest.mark.parametrize("recorded_file", RECORDED, indirect=True)
def test_recorded_sets_import_whole(
    recorded_file: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["recorded_file"]
    tokens, above_top_k = TOKENS[name]
    result = import_sglang_jsonl(recorded_file, tmp_path / "run", vocab_size=49152)
    assert (result.rollouts, result.output_tokens, result.rejected) == (36, tokens, {})
    assert run_stats(tmp_path / "run")["support_size"]["above_top_k"] == above_top_k


def test_a_line_becomes_a_rollout_with_the_recorded_values() -> None:
    line = recorded_lines(RECORDED[0])[0]
    rollout = parse_line(json.dumps(line).encode(), "unused")
    meta = line["response"]["meta_info"]
    assert (rollout.rollout_id, rollout.prompt_text) == ("train-0000:0", line["prompt"])
    assert rollout.prompt_ids.tolist() == line["response"]["prompt_token_ids"]
    assert rollout.support[3].tolist() == meta["output_token_sampling_mask"][3]
    assert (rollout.temperature, rollout.top_k, rollout.top_p) == (1.0, 50, 0.95)
    assert json.loads(rollout.sampling_params) == line["sampling_params"]


def test_greedy_without_top_k_is_stored_as_the_sampler_ran() -> None:
    params = recorded_params({"temperature": 0, "max_new_tokens": 8})
    assert params.sampler[:3] == (1.0, 1.0, 1)


def test_a_top_p_only_recording_is_imported_without_a_limit() -> None:
    assert recorded_params({"temperature": 1.0, "top_p": 0.9, "top_k": -1}).sampler.top_k == -1


def test_settings_that_are_not_known_or_not_of_their_type_are_all_named() -> None:
    with pytest.raises(errors.NotReplayable, match=r"^sampling_params: unknown key 'top_q'; did"):
        recorded_params({"temperature": 1.0, "top_q": 1})
    with pytest.raises(errors.NotReplayable, match=r"temperature: .*\n  top_p: .*got 2") as caught:
        recorded_params({"temperature": "1.0", "top_p": 2})
    assert "Value error" not in str(caught.value)


def test_settings_of_the_text_alone_are_known() -> None:
    sent = {"temperature": 1.0, "top_k": 5, "spaces_between_special_tokens": False}
    assert not recorded_params(sent).spaces_between_special_tokens


def _sampled_id_missing(line: dict[str, Any]) -> None:
    meta, output = line["response"]["meta_info"], line["response"]["output_ids"]
    mask, logprobs = meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"]
    t = next(t for t, row in enumerate(mask) if len(row) > 2)
    at = mask[t].index(output[t])
    del mask[t][at], logprobs[t][at]


def _masks_one_short(line: dict[str, Any]) -> None:
    line["response"]["meta_info"]["output_token_sampling_mask"].pop()


def _id_twice(line: dict[str, Any]) -> None:
    mask = line["response"]["meta_info"]["output_token_sampling_mask"]
    row = next(row for row in mask if len(row) > 2)
    row[-1] = row[-2]


def _support_cut(line: dict[str, Any]) -> None:
    meta, output = line["response"]["meta_info"], line["response"]["output_ids"]
    mask, logprobs = meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"]
    t = next(t for t, row in enumerate(mask) if len(row) > 2 and row[0] == output[t])
    del mask[t][1], logprobs[t][1]


def _logprob_null(line: dict[str, Any]) -> None:
    line["response"]["meta_info"]["output_token_logprobs"][0][0] = None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(_sampled_id_missing, "sampled_outside_support", id="sampled id missing"),
        pytest.param(_masks_one_short, "length_mismatch", id="masks one short"),
        pytest.param(_id_twice, "duplicate_ids", id="id twice"),
        pytest.param(_support_cut, "support_truncated", id="support cut"),
        pytest.param(_logprob_null, "nonfinite_logprob", id="logprob null"),
        pytest.param(
            lambda line: line["response"].pop("prompt_token_ids"),
            "empty_prompt",
            id="no prompt ids",
        ),
        pytest.param(
            lambda line: line["sampling_params"].pop("temperature"),
            "not_replayable",
            id="no temperature",
        ),
        pytest.param(
            lambda line: line["sampling_params"].update(repetition_penalty=1.2),
            "not_replayable",
            id="penalty",
        ),
        pytest.param(
            lambda line: line["sampling_params"].update(top_q=1),
            "not_replayable",
            id="unknown setting",
        ),
        pytest.param(
            lambda line: line["response"]["meta_info"].pop("output_token_sampling_mask"),
            "sampling_mask_missing",
            id="no mask",
        ),
        pytest.param(lambda line: line.pop("response"), "reply_malformed", id="no response"),
        pytest.param(
            lambda line: line["response"]["output_ids"].__setitem__(0, 49152),
            "sampled_outside_support",
            id="another output id",
        ),
    ],
)
def test_a_broken_line_is_rejected_with_reason_and_body(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], reason: str
) -> None:
    good = recorded_lines(RECORDED[2])[:3]
    broken = copy.deepcopy(good)
    change(broken[1])
    file = write_lines(tmp_path / "dump.jsonl", broken)
    result = import_sglang_jsonl(file, tmp_path / "run")
    assert (result.rollouts, result.rejected) == (2, {reason: 1})
    rejected = json.loads((tmp_path / "run" / "rejected.jsonl").read_text())
    assert (rejected["reason"], rejected["line"]) == (reason, 2)
    assert json.loads(rejected["body"]) == broken[1]
    assert [r.rollout_id for r in open_run(tmp_path / "run")] == ["train-0000:0", "train-0002:0"]


def _shifted(line: dict[str, Any]) -> None:
    """Supports and their logprobs one token late."""
    meta = line["response"]["meta_info"]
    for key in ("output_token_sampling_mask", "output_token_sampling_logprobs"):
        meta[key] = [*meta[key][1:], meta[key][-1]]


def rejected_reasons(run: Path) -> dict[int, str]:
    lines = (run / "rejected.jsonl").read_text().splitlines()
    return {line["line"]: line["reason"] for line in map(json.loads, lines)}


def test_the_reason_is_what_is_wrong_with_the_whole_file(tmp_path: Path) -> None:
    """Every line breaks rules of its own; one cause explains them all."""
    lines = recorded_lines(RECORDED[2])
    for line in lines:
        _shifted(line)
    result = import_sglang_jsonl(write_lines(tmp_path / "d", lines), tmp_path / "run")
    assert (result.rollouts, result.rejected) == (0, {"shifted_by_one": 36})
    (got,) = result.as_dict()["diagnoses"]
    assert (got["code"], got["scope"]["kind"]) == ("shifted_by_one", "all")
    assert "sampled_outside_support" in got["also"]
    assert rejected_reasons(tmp_path / "run") == dict.fromkeys(range(1, 37), "shifted_by_one")
    first = json.loads((tmp_path / "run" / "rejected.jsonl").read_text().splitlines()[0])
    assert first["rule"] == "sampled_outside_support"
    assert "sampled id" in first["message"]
    assert json.loads(first["body"]) == lines[0]


def test_each_line_has_the_reason_of_its_own_fault(tmp_path: Path) -> None:
    """Shifted, an id missing and an id twice, in lines that are not the same."""
    lines = recorded_lines(RECORDED[2])[:12]
    for line in lines[:4]:
        _shifted(line)
    _sampled_id_missing(lines[6])
    _id_twice(lines[9])
    result = import_sglang_jsonl(write_lines(tmp_path / "d", lines), tmp_path / "run")
    counts = {"shifted_by_one": 4, "sampled_outside_support": 1, "duplicate_ids": 1}
    assert (result.rollouts, result.rejected) == (6, counts)
    assert rejected_reasons(tmp_path / "run") == {
        **dict.fromkeys(range(1, 5), "shifted_by_one"),
        7: "sampled_outside_support",
        10: "duplicate_ids",
    }
    assert {d.code: d.scope["first"] for d in result.diagnoses} == {
        "shifted_by_one": [f"train-000{i}:0" for i in range(4)],
        "sampled_outside_support": ["train-0006:0"],
        "support_truncated": ["train-0006:0"],  # its probability is missing too
        "duplicate_ids": ["train-0009:0"],
    }
    assert all(" of 12 rollouts" in d.scope["where"] for d in result.diagnoses), "stored ones count"


def test_a_clean_file_has_no_diagnosis(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "d", recorded_lines(RECORDED[1]))
    result = import_sglang_jsonl(file, tmp_path / "run")
    assert (result.rollouts, result.diagnoses) == (36, ())
    assert not (tmp_path / "run" / "rejected.jsonl").exists()


def test_an_aborted_reply_is_kept_but_is_not_the_rollout(tmp_path: Path) -> None:
    line = recorded_lines(RECORDED[2])[0]
    line["response"]["meta_info"]["finish_reason"] = {"type": "abort", "message": "Aborted"}
    import_sglang_jsonl(write_lines(tmp_path / "d", [line]), tmp_path / "run")
    (rollout,) = open_run(tmp_path / "run")
    assert (rollout.rollout_id, rollout.finish_reason) == ("train-0000:0#abort0", "abort")


def test_an_id_too_large_for_a_shard_is_rejected(tmp_path: Path) -> None:
    line = recorded_lines(RECORDED[2])[0]
    line["response"]["prompt_token_ids"][0] = 2**31
    result = import_sglang_jsonl(write_lines(tmp_path / "d", [line]), tmp_path / "run")
    assert result.rejected == {"reply_malformed": 1}


def test_a_repeated_rid_is_rejected_not_merged(tmp_path: Path) -> None:
    line = recorded_lines(RECORDED[2])[0]
    result = import_sglang_jsonl(write_lines(tmp_path / "d", [line, line]), tmp_path / "run")
    assert (result.rollouts, result.rejected) == (1, {"bad_rollout_id": 1})


def test_ids_beyond_a_known_vocabulary_are_rejected(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "d", recorded_lines(RECORDED[2])[:2])
    result = import_sglang_jsonl(file, tmp_path / "run", vocab_size=1000)
    assert result.rejected == {"id_outside_vocabulary": 2}


def test_a_pipe_is_a_config_error(tmp_path: Path) -> None:
    """The lines that were rejected are read again at the end."""
    read, write = os.pipe()
    os.close(write)
    with pytest.raises(errors.ConfigError, match="read twice, got a pipe"):
        import_sglang_jsonl(Path(f"/dev/fd/{read}"), tmp_path / "run")
    os.close(read)
    assert not (tmp_path / "run").exists()


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="cannot be read"):
        import_sglang_jsonl(tmp_path / "nowhere", tmp_path / "run")
    assert not (tmp_path / "run").exists()

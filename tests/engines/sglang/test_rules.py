"""The rules of each SGLang release, and every row of its rejection table."""

from __future__ import annotations

from typing import Any

import pytest

from rollout import errors
from rollout.engines.sglang.reply import parse_chat_reply, parse_reply
from rollout.engines.sglang.rules import ServerRules
from rollout.sampling import SamplingParams


def rules(version: str, **info: Any) -> ServerRules:
    return ServerRules.of({"version": version, **info})


@pytest.mark.parametrize(
    ("version", "captures", "cap"),
    [
        ("0.5.16", False, None),
        ("0.5.19", False, None),
        ("0.5.20", True, 4096),
        ("0.5.23.post1", True, 4096),
        ("0.6.0", True, 4096),
    ],
)
def test_what_each_release_can_do(version: str, captures: bool, cap: int | None) -> None:
    got = rules(version, sampling_backend="flashinfer")
    assert (got.captures, got.cap) == (captures, cap)
    assert got.keeps_ties is captures


@pytest.mark.parametrize("version", ["", "unknown", "0.0.0.dev1+g12ab34c"])
def test_a_build_from_source_is_like_the_newest_if_it_has_a_cap(version: str) -> None:
    got = rules(version, sampling_mask_max_tokens=512)
    assert (got.captures, got.has_support_mode, got.cap) == (True, True, 512)
    with pytest.raises(errors.ReplyMalformed, match="what this server does .* is not known"):
        rules(version)


def test_settings_that_a_server_adds_must_be_readable() -> None:
    with pytest.raises(errors.ReplyMalformed, match="preferred_sampling_params"):
        rules("0.5.23", preferred_sampling_params="{")


def test_speculative_verification_filters_in_sequence_and_cuts_ties() -> None:
    got = rules("0.5.23", sampling_backend="flashinfer", speculative_algorithm="DFLASH")
    assert (got.filter_order(0.0), got.keeps_ties) == ("sequential", False)


def test_a_release_without_masks_is_refused() -> None:
    with pytest.raises(errors.EngineError, match="0.5.15 has no sampling masks"):
        rules("0.5.15")


@pytest.mark.parametrize(
    ("cap", "top_k"),
    [(4096, 512), (512, 448), (1024, 512), (640, 512), (600, 525), (100, 36), (64, 1), (1, 1)],
    ids=str,
)
def test_auto_leaves_room_for_ties_below_the_cap(cap: int, top_k: int) -> None:
    resolved = rules("0.5.23", sampling_mask_max_tokens=cap).resolve(SamplingParams(top_k="auto"))
    assert resolved.top_k == min(512, top_k)
    rules("0.5.23", sampling_mask_max_tokens=cap).check(resolved)


def test_a_number_is_left_alone() -> None:
    assert rules("0.5.23").resolve(SamplingParams(top_k=7)).top_k == 7


@pytest.mark.parametrize(
    ("info", "settings", "error", "words"),
    [
        pytest.param({}, {}, errors.NotReplayable, "must be finite", id="top_k missing"),
        pytest.param({}, {"top_k": -1, "top_p": 0.9}, errors.NotReplayable, "top_p bounds",
                     id="top_p only"),
        pytest.param({}, {"top_k": 4097}, errors.NotReplayable, "at most 4096", id="over the cap"),
        pytest.param({"speculative_algorithm": "EAGLE"}, {"top_k": 5}, errors.EngineRefused,
                     "decodes speculatively", id="speculative decoding"),
        pytest.param({"speculative_algorithm": "DFLASH"}, {"top_k": 5, "min_p": 0.1},
                     errors.NotReplayable, "min_p: not with", id="DFlash with min_p"),
        pytest.param({"sampling_backend": "ascend"}, {"top_k": 5}, errors.EngineRefused,
                     "ascend", id="ascend"),
        pytest.param({}, {"top_k": 5, "n": 2}, errors.NotReplayable, "sampling.n", id="n 2"),
        pytest.param({}, {"top_k": 5, "max_new_tokens": 0}, errors.NotReplayable,
                     "max_new_tokens", id="no token"),
        pytest.param({"sampling_backend": "pytorch"}, {"top_k": 5, "min_p": 0.2},
                     errors.NotReplayable, "min_p: not on a shared", id="min_p, shared"),
        pytest.param({"enable_deterministic_inference": True}, {"top_k": 5, "min_p": 0.1},
                     errors.NotReplayable, "min_p: a deterministic", id="min_p, deterministic"),
        pytest.param({"enable_custom_logit_processor": False}, {"top_k": 5,
                     "disallowed_token_ids": [3]}, errors.EngineRefused,
                     "--enable-custom-logit-processor", id="bans without the flag"),
        pytest.param({"enable_custom_logit_processor": True}, {"top_k": 5,
                     "disallowed_token_ids": [3]}, errors.NotReplayable,
                     "ban different tokens", id="bans, shared"),
        pytest.param({"watermark_default_enabled": True}, {"top_k": 5}, errors.EngineRefused,
                     "watermarks every request", id="watermark by default"),
        pytest.param({"preferred_sampling_params": '{"logit_bias": {"3": 1.0}}'}, {"top_k": 5},
                     errors.EngineRefused, "adds logit_bias", id="bias by default"),
    ],
)  # fmt: skip
def test_what_the_server_would_refuse_is_refused_before(
    info: dict[str, Any], settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    shared = settings.get("min_p") == 0.2 or info.get("enable_custom_logit_processor") is True
    with pytest.raises(error, match=words):
        rules("0.5.23", **info).check(SamplingParams(**settings), shared=shared)


@pytest.mark.parametrize(
    ("version", "info"),
    [
        pytest.param("0.5.19", {}, id="no cap before 0.5.20"),
        pytest.param("0.5.22", {"speculative_algorithm": "DFlash"}, id="DFlash since 0.5.22"),
    ],
)
def test_what_the_server_takes_is_let_through(version: str, info: dict[str, Any]) -> None:
    limit = 100_000 if version == "0.5.19" else 4096
    rules(version, **info).check(SamplingParams(top_k=limit))


def test_preferred_settings_that_a_request_overrides_are_no_harm() -> None:
    given = rules("0.5.23", preferred_sampling_params={"top_k": 20, "temperature": 0.6})
    given.check(SamplingParams(top_k=5))


@pytest.mark.parametrize(
    ("version", "info", "route", "words"),
    [
        pytest.param("0.5.17", {}, "chat", "0.5.17 ignores return_sampling_mask", id="old chat"),
        pytest.param("0.5.23", {"frontend": "rust"}, "generate", "rust front end", id="Rust"),
    ],
)
def test_a_route_that_loses_the_mask_is_refused(
    version: str, info: dict[str, Any], route: str, words: str
) -> None:
    with pytest.raises(errors.EngineRefused, match=words):
        rules(version, **info).check_route(route)


@pytest.mark.parametrize(
    ("version", "route"), [("0.5.18", "chat"), ("0.5.16", "generate"), ("0.5.23", "chat")]
)
def test_a_route_that_knows_the_mask_is_let_through(version: str, route: str) -> None:
    rules(version, frontend="python").check_route(route)


@pytest.mark.parametrize(
    ("version", "spans", "support_mode"),
    [("0.5.18", False, False), ("0.5.19", True, False), ("0.5.21", True, True)],
)
def test_what_a_reply_tells(version: str, spans: bool, support_mode: bool) -> None:
    got = rules(version)
    assert (got.has_spans, got.has_support_mode) == (spans, support_mode)


@pytest.mark.parametrize(
    ("backend", "min_p", "shared", "order"),
    [
        ("pytorch", 0.1, True, "joint"),
        ("flashinfer", 0.0, False, "joint"),
        ("flashinfer", 0.1, False, "sequential"),
        ("flashinfer", 0.0, True, None),
    ],
)
def test_the_order_of_filters_is_told_where_it_is_known(
    backend: str, min_p: float, shared: bool, order: str | None
) -> None:
    assert rules("0.5.23", sampling_backend=backend).filter_order(min_p, shared=shared) == order


def test_dflash_before_masks_came_is_refused() -> None:
    with pytest.raises(errors.EngineRefused, match="decodes speculatively"):
        rules("0.5.21", speculative_algorithm="DFLASH").check(SamplingParams(top_k=5))


REJECTIONS = {  # the server's words: (status, error)
    "return_sampling_mask requires finite top_k; top_p-only sampling is valid but": (
        400, errors.EngineRefused),
    "return_sampling_mask cannot return the full vocabulary; set top_p < 1 or a finite top_k.": (
        400, errors.EngineRefused),
    "return_sampling_mask requires top_k=1 for greedy sampling or finite 1 < top_k <= 4096; got": (
        400, errors.EngineRefused),
    "return_sampling_mask with disaggregation requires SGLANG_DISAGGREGATION_SAMPLING_MASK_MAX": (
        400, errors.EngineRefused),
    "return_sampling_mask requires SGLANG_ENABLE_DISAGG_SAMPLING_MASK=1 on both prefill and": (
        400, errors.EngineRefused),
    "return_sampling_mask is not supported with speculative decoding.": (
        400, errors.EngineRefused),
    "return_sampling_mask is not supported with the ascend sampling backend.": (
        400, errors.EngineRefused),
    "return_sampling_mask only supports DisallowedTokensLogitsProcessor among custom logit": (
        400, errors.EngineRefused),
    "sampling_logprobs_mode can only be set when return_sampling_mask=true.": (
        400, errors.EngineRefused),
    "Beam search does not support sampling-mask/routed-experts returns.": (
        400, errors.EngineRefused),
    "return_sampling_mask with speculative decoding does not support min_p.": (
        400, errors.EngineRefused),
    "return_sampling_mask is not supported with simulated speculative acceptance.": (
        400, errors.EngineRefused),
    "return_sampling_mask with DFlash requires acceptance thresholds of 1.0.": (
        400, errors.EngineRefused),
    "return_sampling_mask with non-greedy DFlash decoding requires sampling verification support.":
        (400, errors.EngineRefused),
    "The server is not configured to enable custom logit processor. Please set": (
        400, errors.EngineRefused),
    "Input should be 'selected' or 'support'": (400, errors.EngineRefused),
    "does not support request-level return_sampling_mask": (400, errors.EngineRefused),
    "return_sampling_mask requires return_meta_info=true.": (400, errors.EngineRefused),
    "return_meta_info is not supported with streaming. Please set stream=false when using": (
        400, errors.EngineRefused),
    "Sampling support exceeds --sampling-mask-max-tokens=4096, commonly because of cutoff ties.": (
        400, errors.SupportOverflow),
    "The sampling backend selected a token outside its captured sampling support.": (
        500, errors.EngineFailed),
    "The sampling backend did not return captured sampling support.": (500, errors.EngineFailed),
    "The request queue is full.": (503, errors.EngineBusy),
}  # fmt: skip


@pytest.mark.parametrize("words", list(REJECTIONS))
@pytest.mark.parametrize("envelope", ['{"error": {"message": "%s"}}', '{"error": "%s"}'])
def test_every_rejection_is_told_apart_with_the_servers_words(words: str, envelope: str) -> None:
    status, error = REJECTIONS[words]
    with pytest.raises(error) as caught:
        parse_reply(status, (envelope % words).encode())
    assert type(caught.value) is error
    assert words in str(caught.value)
    with pytest.raises(error):
        parse_chat_reply(status, (envelope % words).encode())

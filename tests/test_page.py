"""The page without a browser: what is in it, binned numbers, and which rollouts it shows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from builders import make_rollout
from pages import VOCAB_SIZE, decode, outside_the_vocabulary, page, synthetic

from replay import GatesConfig, Verified
from replay.bins import by_position, by_support_size, by_version, density, log_ratio_histogram
from replay.html import visible
from replay.strips import ALTERNATIVES, TOKENS, strip_data
from replay.tokens import TokenTable, recorded
from rollout.record import WeightSpan
from rollout.rules import find_faults


@pytest.fixture(scope="module")
def made() -> Any:
    return synthetic(rollouts=60, tokens=30)


def embedded(html: str) -> dict[str, Any]:
    """The data of the strips."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


class Tags(HTMLParser):
    """Names of the elements, and the text outside of scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.addresses += [v or "" for name, v in attributes if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self.names[-1:] != ["script"]:
            self.text += f" {data}"


def test_the_verdict_and_the_numbers_are_in_the_page_itself(made: Any) -> None:
    rollouts, verified, collector = made
    html = page(rollouts, verified, collector.strips(), GatesConfig(mismatch_kl=1e-6))
    text = " ".join(Tags(html).text.split())
    assert "FAIL inconsistent" in text
    assert re.search(r"gate mismatch_kl 0\.000\d+ is above 1e-06 nats", text)
    assert "tokens scored" in text and "1,800 of 1,800 in 60 rollouts" in text


def test_the_page_asks_for_nothing_from_outside(made: Any) -> None:
    rollouts, verified, collector = made
    tags = Tags(page(rollouts, verified, collector.strips()))
    assert all(address.startswith(("#", "data:")) for address in tags.addresses)
    assert tags.names.count("script") == 2


def test_texts_of_tokens_are_text(made: Any) -> None:
    rollouts, verified, collector = made
    html = page(rollouts, verified, collector.strips())
    tags = Tags(html)
    assert "img" not in tags.names and tags.names.count("script") == 2
    assert "49" not in embedded(html)["texts"].values()
    assert embedded(html)["texts"]["7"] == decode(7)
    assert embedded(html)["texts"]["9"] == "⏎"


def test_a_character_without_a_shape_is_escaped() -> None:
    assert visible("a\u202eb\ud800\n\x00") == "a\\u202eb\\ud800⏎\\x00"


def test_the_audit_is_shown_where_there_was_one(made: Any) -> None:
    rollouts, verified, collector = made
    audit = {
        "tokens": 100,
        "classes": {"robust": 90, "inconsistent": 10},
        "tolerance": {"logits": 0.3, "source": "log_ratio"},
        "without_prefix_and_mass": {},
        "skipped": {},
        "repair_fingerprints": 0,
        "worst": [{"rollout_id": "1:0", "rank": 12}],
    }
    html = page(rollouts, verified, collector.strips(), audit=audit)
    text = " ".join(Tags(html).text.split())
    assert "robust 90 (90.0%)" in text and "inconsistent 10 (10.0%)" in text
    assert "worst: 1 row" in text
    plain = page(rollouts, verified, collector.strips())
    assert "Support audit" not in plain and "No finding" in plain


def test_the_worst_rollouts_and_a_sample_are_shown_once_each(made: Any) -> None:
    rollouts, verified, collector = made
    strips = collector.strips()
    ids = [strip.rollout.rollout_id for strip in strips]
    assert len(ids) == len(set(ids)) <= 40
    means = {
        r.rollout_id: np.abs(verified.tokens.log_ratio[30 * i : 30 * i + 30]).mean()
        for i, r in enumerate(rollouts)
    }
    worst = sorted(means, key=lambda name: -means[name])[:20]
    assert [s.rollout.rollout_id for s in strips if s.why == "worst"] == worst
    assert {"0:0", "59:0"} <= set(ids), "the sample spans the run"


def test_a_long_rollout_is_cut_around_its_worst_token() -> None:
    rollouts, verified, collector = synthetic(rollouts=1, tokens=3 * TOKENS)
    (strip,) = collector.strips()
    worst = int(np.abs(verified.tokens.log_ratio).argmax())
    assert strip.end - strip.start == TOKENS
    assert strip.start <= worst < strip.end
    data = strip_data(strip, decode)
    assert {len(column) for column in data.values() if isinstance(column, list)} >= {TOKENS}
    support = data["supports"][worst - strip.start]
    assert rollouts[0].output_ids[worst] in [row[0] for row in support]
    recorded_p = np.exp(rollouts[0].sampling_logprobs[worst])
    sampled = next(row for row in support if row[0] == rollouts[0].output_ids[worst])
    assert sampled[1] == pytest.approx(recorded_p, abs=1e-4)


def test_a_rollout_that_cannot_be_run_is_the_first_and_its_odd_ids_are_there() -> None:
    rollouts, verified, collector = synthetic(rollouts=30, tokens=20)
    odd, at = outside_the_vocabulary(3 * TOKENS)
    odd = replace(odd, rollout_id="99:0")
    table_of_odd = recorded(odd, find_faults(odd, VOCAB_SIZE))
    collector.add([odd], table_of_odd, np.full(len(odd.support.ids), np.nan, np.float32))
    first = collector.strips()[0]
    assert (first.rollout, first.faults, first.mean) == (odd, odd.num_output_tokens, None)
    data = strip_data(first, decode, VOCAB_SIZE)
    assert data["start"] <= at - 1 < at < data["start"] + TOKENS, "not the start of the rollout"
    assert data["ids"][at - data["start"]] == VOCAB_SIZE + 5
    assert data["finding"][at - data["start"]] == "id_outside_vocabulary"
    assert set(data["log_ratio"]) == {None}
    assert data["prompt_outside"] == [-3, VOCAB_SIZE]
    support = data["supports"][at - 1 - data["start"]]
    assert len(support) > ALTERNATIVES
    (row,) = [row for row in support if row[0] == VOCAB_SIZE]
    assert row[1] is not None and row[2] is None
    tokens = TokenTable.concatenate([verified.tokens, table_of_odd])
    whole = Verified(tokens, (), 31, vocab_size=VOCAB_SIZE)
    html = page([*rollouts, odd], whole, collector.strips())
    assert embedded(html)["vocab_size"] == VOCAB_SIZE
    assert embedded(html)["rollouts"][0]["id"] == "99:0"


def test_an_engine_without_support_logprobs_has_them_for_the_sampled_token_alone() -> None:
    rollouts, _, collector = synthetic(rollouts=1, tokens=5)
    (strip,) = collector.strips()
    bare = replace(strip, rollout=replace(rollouts[0], support_logprobs=None, full_logprobs=None))
    for token, support in zip(
        rollouts[0].output_ids, strip_data(bare, None)["supports"], strict=True
    ):
        for row in support:
            assert (row[1] is not None) == (row[0] == token)
            assert row[2] is not None


def test_a_token_without_a_score_is_among_the_worst_and_is_no_number() -> None:
    rollouts, verified, collector = synthetic(rollouts=2, tokens=5)
    scores = verified.tokens.replay_logprobs.copy()
    scores[7] = -np.inf
    tokens = replace(verified.tokens, replay_logprobs=scores)
    html = page(rollouts, Verified(tokens, (), 2), collector.strips())
    first = re.search(r'<table id="worst-tokens">.*?<tbody>\s*<tr>(.*?)</tr>', html, re.S)
    assert first and "−∞" in first[1] and 'data-position="2"' in first[1]
    json.dumps(embedded(html), allow_nan=False)


def table(**columns: Any) -> TokenTable:
    """Rows of one rollout, with these columns changed."""
    length = len(next(iter(columns.values())))
    rollout, *_ = synthetic(rollouts=1, tokens=length)[0]
    zeros = np.zeros(length, np.float32)
    plain = replace(recorded(rollout, []), sampling_logprobs=zeros, replay_full_logprobs=zeros)
    return replace(plain, **{n: np.array(v, getattr(plain, n).dtype) for n, v in columns.items()})


def test_the_histogram_holds_every_token_once() -> None:
    rows = log_ratio_histogram(table(replay_logprobs=[0, 1e-12, 0.05, -0.05, 50.0, np.nan]))
    assert sum(row["support"] for row in rows) == pytest.approx(1)
    assert rows[0] == {"from": 0.0, "to": 0.0, "support": 0.2, "whole": 1.0}
    (bin_of_005,) = [row for row in rows[1:] if row["from"] <= 0.05 < row["to"]]
    assert bin_of_005["support"] == pytest.approx(0.4)


def test_the_density_counts_tokens_with_a_choice() -> None:
    tokens = table(
        sampling_logprobs=[-1, -2, 0, -900],
        replay_logprobs=[-1, -2, 0, -1],
        support_size=[2, 2, 1, 2],
    )
    found = density(tokens)
    assert (found.tokens, found.singletons) == (3, 1)
    assert found.floor <= -2


def test_bins_by_position_and_size_have_the_means_of_their_tokens() -> None:
    tokens = table(
        replay_logprobs=[0.1, -0.3, 0.2, 0.5], position=[0, 1, 79, 80], support_size=[1, 2, 3, 4]
    )
    rows = by_position(tokens)
    assert [(r["from"], r["to"], r["tokens"]) for r in rows] == [(0, 2, 2), (78, 80, 2)]
    assert rows[0]["mean"] == pytest.approx(0.2)
    assert rows[1]["mismatch_kl"] == pytest.approx(
        np.mean([np.exp(0.2) - 1.2, np.exp(0.5) - 1.5]), abs=1e-6
    )
    assert [(r["from"], r["to"], r["tokens"]) for r in by_support_size(tokens)] == [
        (1, 1, 1),
        (2, 2, 1),
        (3, 4, 2),
    ]


def test_tokens_are_sorted_by_the_weights_that_sampled_them() -> None:
    tokens = table(replay_logprobs=[0.1, 0.1, 0.7, 0.1])
    spans = (WeightSpan("old", 0, 2), WeightSpan("new", 2, 3))
    rollout = make_rollout("0", weight_versions=spans)
    rows = by_version(tokens, {"0:0": rollout})
    assert {row["version"]: row["tokens"] for row in rows} == {
        "not recorded": 1,
        "old": 2,
        "new": 1,
    }
    assert rows[-1]["mean"] == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("replay", "sampling"),
    [
        pytest.param(np.nan, -1.0, id="nothing scored"),
        pytest.param(-np.inf, -np.inf, id="no number on either side"),
        pytest.param(-1.0, -9999.0, id="a sentinel"),
        pytest.param(0.0, 0.0, id="only singletons"),
    ],
)
def test_a_page_can_be_drawn_of_any_scores(replay: float, sampling: float) -> None:
    rollouts, verified, _ = synthetic(rollouts=2, tokens=6)
    scores = {
        "replay_logprobs": np.full(12, replay, np.float32),
        "sampling_logprobs": np.full(12, sampling, np.float32),
    }
    with np.errstate(all="ignore"):  # of the numbers themselves
        html = page(rollouts, Verified(replace(verified.tokens, **scores), (), 2), [])
    assert "Worst tokens" in html
    assert "nan" not in Tags(html).text

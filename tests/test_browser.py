"""The page in a headless Chromium: opened, pointed at, clicked, read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser import Browser
from pages import HOSTILE, VOCAB_SIZE, outside_the_vocabulary, page, synthetic

from replay import GatesConfig, Verified
from replay.strips import StripCollector
from replay.tokens import recorded
from replay.verify import Finding
from rollout.rules import find_faults

pytestmark = pytest.mark.browser

LIMIT_BYTES, LIMIT_S = 10_000_000, 2.0
STRICT = GatesConfig(log_ratio_abs_mean=1e-4)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 rollouts, the first of which begins with every hostile token."""
    rollouts, verified, collector = synthetic(rollouts=50, tokens=40)
    attack = np.array([*HOSTILE] * 3, np.int32)
    strips = collector.strips()
    strips[0].rollout.output_ids.flags.writeable = True
    strips[0].rollout.output_ids[: len(attack)] = attack
    finding = Finding("sampled_outside_support", 1, 1, f"0:0: {HOSTILE[7]}")
    verified = Verified(verified.tokens, (finding,), verified.rollouts)
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(rollouts, verified, strips, STRICT), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser: Browser, small: Path) -> Browser:
    browser.run_scripts(True)
    browser.prefer("light")
    browser.open(small)
    return browser


def count(browser: Browser, selector: str) -> int:
    return int(browser.ask(f"document.querySelectorAll({selector!r}).length"))


def shown(browser: Browser) -> list[str]:
    """Ids of the rollouts, in the order of the page."""
    found: list[str] = browser.ask(
        "[...document.querySelectorAll('.rollout h3')].map((head) => head.textContent)"
    )
    return found


def test_it_opens_without_an_error_and_asks_for_nothing(opened: Browser, small: Path) -> None:
    assert opened.errors == []
    assert opened.requests == [small.resolve().as_uri()]


def test_the_verdict_and_its_reasons_come_first(opened: Browser) -> None:
    first = opened.text("body")[:400]
    assert "FAIL" in first and "inconsistent" in first
    assert "finding sampled_outside_support" in first
    assert "gate log_ratio_abs_mean" in first


def test_pointing_at_a_token_shows_both_logprobs_and_the_support(opened: Browser) -> None:
    assert opened.ask("document.querySelector('#card').hidden")
    opened.hover(".strip .t:nth-child(25)")
    lines = opened.text("#card").splitlines()
    (masked,) = [line.split("\t") for line in lines if line.startswith("over the support")]
    engine, trainer, difference = (float(cell.replace("−", "-")) for cell in masked[1:])
    assert engine <= 0 and trainer - engine == pytest.approx(difference, abs=2e-4)
    assert any(line.startswith("whole vocabulary") for line in lines)
    assert count(opened, "#card .support tr.sampled") == 1
    total = opened.ask(
        "[...document.querySelectorAll('#card .support tr')].slice(1)"
        ".reduce((sum, row) => sum + Number(row.cells[1].textContent), 0)"
    )
    assert 0 < total <= 1.001
    opened.hover("h1")
    assert opened.ask("document.querySelector('#card').hidden")


def test_a_click_keeps_the_card_and_escape_closes_it(opened: Browser) -> None:
    opened.click(".strip .t:nth-child(20)")
    opened.hover("#rollouts h2")
    assert not opened.ask("document.querySelector('#card').hidden")
    opened.press("Escape")
    assert opened.ask("document.querySelector('#card').hidden")


def test_arrow_keys_walk_along_a_strip(opened: Browser) -> None:
    opened.ask("document.querySelector('.strip .t').focus()")
    opened.press("ArrowRight")
    opened.press("ArrowRight")
    assert "position 2 ·" in opened.text("#card")
    opened.press("End")
    assert "position 39 ·" in opened.text("#card")
    assert count(opened, ".rollout:first-child .t[tabindex='0']") == 1


def test_what_a_token_says_is_text_and_never_runs(opened: Browser) -> None:
    texts: list[str] = opened.ask(
        "[...document.querySelectorAll('.rollout:first-child .t')].map((t) => t.textContent)"
    )
    assert texts[:2] == [HOSTILE[7], HOSTILE[8]]
    assert HOSTILE[10] in texts and HOSTILE[11] in texts
    assert HOSTILE[7] in opened.text("#reasons")
    assert opened.ask("document.title").startswith("inconsistent")
    assert count(opened, "img") == 0
    opened.hover(".rollout:first-child .t")
    assert opened.text("#card .token") == HOSTILE[7]


def test_an_id_outside_the_vocabulary_is_marked_in_strip_support_and_head(
    browser: Browser, tmp_path: Path
) -> None:
    odd, at = outside_the_vocabulary(120)
    collector = StripCollector([odd])
    rows = recorded(odd, find_faults(odd, VOCAB_SIZE))
    collector.add([odd], rows, np.full(len(odd.support.ids), np.nan, np.float32))
    path = tmp_path / "report.html"
    verified = Verified(rows, (), 1, vocab_size=VOCAB_SIZE)
    path.write_text(page([odd], verified, collector.strips()), encoding="utf-8")
    browser.run_scripts(True)
    browser.open(path)
    assert browser.errors == []
    assert browser.ask("document.querySelector('.t.outside').dataset.i") == str(at)
    browser.hover(".t.outside")
    assert "prompt holds ids outside the vocabulary: -3, 1000" in browser.text(".rollout .about")
    assert "outside the policy's vocabulary of 1000 ids" in browser.text("#card")
    browser.hover(f".t:nth-child({at})")  # the token before
    assert count(browser, "#card .support .outside") == 1


def test_filters_and_orders(opened: Browser) -> None:
    every = shown(opened)
    assert len(every) > 20
    assert opened.text("#count") == f"{len(every)} of {len(every)} shown"
    opened.choose("#show", "sample")
    sample = shown(opened)
    opened.choose("#show", "worst")
    assert {*sample, *shown(opened)} == {*every} and len(shown(opened)) == 20
    opened.choose("#show", "")
    opened.choose("#order", "id")
    assert shown(opened) == sorted(every, key=lambda name: int(name.split(":")[0]))
    opened.choose("#search", "49:")
    assert shown(opened) == ["49:0"]
    opened.choose("#search", "nothing")
    assert shown(opened) == []


def test_colours_can_be_of_the_support_size(opened: Browser) -> None:
    before = count(opened, ".t.n1")
    opened.choose("#colour", "size")
    assert before > 0 and count(opened, ".t.n1") == 0
    assert "65 and more" in opened.text("#scale")


def test_worst_tokens_sort_and_lead_to_their_strip(opened: Browser) -> None:
    cells = "[...document.querySelectorAll('#worst-tokens tbody tr')].map((r) => r.cells[6])"
    given = opened.ask(f"{cells}.map((c) => Math.abs(Number(c.dataset.value)))")
    assert given == sorted(given, reverse=True)
    opened.click("#worst-tokens th:nth-child(7) button")
    assert count(opened, "th[aria-sort=descending]") == 1
    values: list[float] = opened.ask(f"{cells}.map((c) => Number(c.dataset.value))")
    assert values == sorted(values, reverse=True)
    position = opened.ask("document.querySelector('#worst-tokens a').dataset.position")
    opened.click("#worst-tokens a")
    assert f"position {position} ·" in opened.text("#card")
    top = opened.ask("document.querySelector('.t.current').getBoundingClientRect().top")
    assert 0 <= top <= 900


def test_without_scripts_the_verdict_numbers_and_charts_are_there(
    browser: Browser, small: Path
) -> None:
    browser.run_scripts(False)
    browser.open(small)
    text = browser.text("body")
    assert "inconsistent" in text and "mean |log_ratio|" in text
    assert "The token strips need JavaScript" in text
    assert count(browser, "figure svg") == 5
    browser.run_scripts(True)


def test_dark_is_dark(opened: Browser) -> None:
    def luminance() -> float:
        colour: str = opened.ask("getComputedStyle(document.body).backgroundColor")
        return sum(int(part.strip(" rgb()")) for part in colour.split(",")) / 3

    assert luminance() > 230
    opened.prefer("dark")
    assert luminance() < 40


def test_a_million_tokens_open_at_once(browser: Browser, tmp_path: Path) -> None:
    """1,000 rollouts of 1,000 tokens."""
    rollouts, verified, collector = synthetic(rollouts=1000, tokens=1000)
    path = tmp_path / "report.html"
    started = time.monotonic()
    path.write_text(page(rollouts, verified, collector.strips()), encoding="utf-8")
    made_s = time.monotonic() - started
    browser.run_scripts(True)
    opened_s = browser.open(path)
    print(f"\n{path.stat().st_size:,} bytes, made in {made_s:.1f} s, opened in {opened_s:.2f} s")  # noqa: T201
    assert path.stat().st_size < LIMIT_BYTES
    assert opened_s < LIMIT_S
    assert browser.errors == []
    assert "1,000,000 of 1,000,000 in 1,000 rollouts" in browser.text("#numbers")
    browser.hover(".t:nth-child(3)")
    assert "over the support" in browser.text("#card")

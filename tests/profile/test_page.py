"""Tables and page of a profile."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from prefillcli.forecast.profile import Profile
from prefillcli.forecast.survey import Sharing
from prefillcli.profile.profile_job import (
    completion_table,
    law_table,
    length_table,
    memory_chart,
    print_profile,
    profile_html,
)
from prefillcli.report.section import Scale
from tests.profile.making import made_profile, made_survey
from tests.report.browser import CHROMIUM, browser

TEXTS_OUTSIDE = """
[...document.querySelectorAll("svg text")].filter(text => {
  const [own, whole] = [text.getBoundingClientRect(), text.closest("svg").getBoundingClientRect()];
  return own.left < whole.left - 1 || own.right > whole.right + 1 || own.bottom > whole.bottom + 1;
}).map(text => text.textContent)
"""


@pytest.fixture(scope="module")
def full() -> Profile:
    """With an input."""
    return made_profile(survey=made_survey())


class Balanced(HTMLParser):
    """Fails where a tag is closed that was not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_no_network_and_closes_its_tags() -> None:
    page = profile_html(made_profile())
    assert not re.findall(r"(?:https?:)?//|@import|url\(|<script|<link|<img|src=", page)
    assert "prefers-color-scheme: dark" in page
    reader = Balanced()
    reader.feed(page)
    assert not reader.open
    assert reader.seen.count("svg") == 2
    assert page.count('class="dot ') == 6
    assert page.count('class="confirmed"') == 2


def test_the_page_shows_the_input(full: Profile) -> None:
    page = profile_html(full)
    reader = Balanced()
    reader.feed(page)
    assert not reader.open
    for known in (
        "97 to score of 100", "300 - 999", '<span class="text">77</span>', "60.0%", "prefix-tree *",
        "2.0 h", "4.50", "An estimate",
    ):  # fmt: skip
        assert known in page, known


def test_an_input_without_prompts_has_a_page_too() -> None:
    survey = made_survey(lengths=None, sharing=Sharing(), keeps=[], prompt_tokens=0)
    page = profile_html(made_profile(survey=survey))
    assert "None." in page
    assert "Keep rates" not in page


def test_what_the_page_shows_is_escaped() -> None:
    page = profile_html(made_profile())
    assert "<models>" not in page
    assert "&lt;models&gt;/judge &amp; co" in page


def test_a_profile_with_nothing_found_has_a_page_too() -> None:
    profile = made_profile(traces=[])
    for each in profile.modes:
        each.points, each.confirmations, each.predicted_tokens, each.max_tokens = [], [], None, None
        each.fit_token = each.fit_base = each.fit_over_law = each.limited_by = None
        each.notes = ["the budget does not even hold short prompts in this mode"]
    page = profile_html(profile)
    assert "does not fit" in page
    assert "full: the budget does not even hold" in page
    assert memory_chart(profile) is None


def test_tables_say_what_was_found() -> None:
    profile = made_profile()
    lengths = {row[0]: row[1:] for row in length_table(profile)}
    assert lengths["hybrid"] == ["18,874", "memory", "18,874", "99", "99%", "2.5", "8.0x"]
    laws = {row[0]: row[1:] for row in law_table(profile)}
    assert laws["full"][:3] == ["40,000", "36,000", "1.11"]
    assert [row[0] for row in completion_table(profile)][1:] == ["one prompt, linear", "one prompt, proxy", "a plan"]


def test_a_capped_run_is_told_apart() -> None:
    profile = made_profile()
    profile.modes[0].capped, profile.modes[0].max_tokens = True, 900
    assert length_table(profile)[1][3] == "900 (capped)"


def test_tables_are_readable_at_80_columns(full: Profile, capsys: pytest.CaptureFixture[str]) -> None:
    assert not sys.stderr.isatty()
    print_profile(full)
    said = capsys.readouterr()
    assert said.out == ""
    own, _, survey = said.err.partition("\nInput\n")
    assert survey
    assert [line for line in own.splitlines() if len(line) > 80] == []
    for known in (
        "18,874",
        "as prefill score does it",
        "97 to score of 100",
        "2.0 h",
    ):
        assert known in said.err


@pytest.mark.parametrize(
    ("top", "end", "wanted"),
    [
        (100, 100, [0, 25, 50, 75, 100]),
        (0.9, 0.92, [0, 0.25, 0.5, 0.75]),
        (7, 7.2, [0, 2, 4, 6]),
        (7, None, [0, 2, 4, 6, 8]),
    ],
)
def test_ticks_are_round_and_within(top: float, end: float | None, wanted: list[float]) -> None:
    assert list(Scale.upto(top, "{:g}", end=end).texts) == wanted


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_the_page_fits_every_screen_and_complains_of_nothing(full: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.html"
    path.write_text(profile_html(full))
    with browser(tmp_path / "chromium") as tab:
        for width in (390, 1200):
            for dark in (False, True):
                tab.open(path, width=width, dark=dark)
                assert tab.evaluate("document.documentElement.scrollWidth") <= width
                assert tab.evaluate(TEXTS_OUTSIDE) == []
                assert tab.complaints() == []
                assert tab.requests() == [path.as_uri()]

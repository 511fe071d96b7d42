"""Tables and page of a profile."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser

import pytest

from prefillcli.profile.chart import ticks
from prefillcli.profile.page import memory_chart, to_html
from prefillcli.profile.tables import completion_table, law_table, length_table, print_profile
from tests.profile.making import made_profile


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
    page = to_html(made_profile())
    assert not re.findall(r"(?:https?:)?//|@import|url\(|<script|<link|<img|src=", page)
    assert "prefers-color-scheme: dark" in page
    reader = Balanced()
    reader.feed(page)
    assert not reader.open
    assert reader.seen.count("svg") == 2
    assert reader.seen.count("circle") == 6
    assert page.count('class="confirmed"') == 2


def test_what_the_page_shows_is_escaped() -> None:
    page = to_html(made_profile())
    assert "<models>" not in page
    assert "&lt;models&gt;/judge &amp; co" in page


def test_a_profile_with_nothing_found_has_a_page_too() -> None:
    profile = made_profile(traces=[])
    for each in profile.modes:
        each.points, each.confirmations, each.predicted_tokens, each.max_tokens = [], [], None, None
        each.fit_token = each.fit_base = each.fit_over_law = each.limited_by = None
        each.notes = ["the budget does not even hold short prompts in this mode"]
    page = to_html(profile)
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


def test_tables_are_readable_at_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert not sys.stderr.isatty()
    print_profile(made_profile())
    said = capsys.readouterr()
    assert said.out == ""
    assert all(len(line) <= 100 for line in said.err.splitlines())
    assert "18,874" in said.err


@pytest.mark.parametrize(
    ("top", "wanted"), [(100, [0, 25, 50, 75, 100]), (0.9, [0, 0.25, 0.5, 0.75]), (7, [0, 2, 4, 6])]
)
def test_ticks_are_round_and_within(top: float, wanted: list[float]) -> None:
    assert ticks(top) == wanted

"""Tables and page of a profile."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from prefillcli.forecast.profile import Profile
from prefillcli.report.section import Scale, print_section, stderr_console
from prefillcli.tools.profile.profile_job import profile_html, profile_sections
from tests.unit.report.browser import CHROMIUM, browser
from tests.unit.report.test_run_page import assert_fetches_nothing
from tests.unit.tools.profile.making import made_profile, made_survey


@pytest.fixture(scope="module")
def full() -> Profile:
    """With an input."""
    return made_profile(survey=made_survey())


def test_the_page_needs_no_network_and_closes_its_tags(full: Profile) -> None:
    page = profile_html(full)
    assert_fetches_nothing(page)
    assert "prefers-color-scheme: dark" in page


def test_the_page_shows_what_was_found_and_the_input(full: Profile) -> None:
    page = profile_html(full)
    for known in (
        "18,874", "8.0x", "Mean error 8%", "97 to score of 100", "300 - 999", "77", "in full", "2.0 h", "4.50",
        "An estimate",
    ):  # fmt: skip
        assert known in page, known
    survey = made_survey(lengths=None, keeps=[], prompt_tokens=0)
    assert "Keep rates" not in profile_html(made_profile(survey=survey))


def test_what_the_page_shows_is_escaped() -> None:
    page = profile_html(made_profile())
    assert "<models>" not in page
    assert "&lt;models&gt;/judge &amp; co" in page


def test_a_profile_with_nothing_found_has_a_page_too() -> None:
    profile = made_profile(no_completion="it was too busy")
    for each in profile.modes:
        each.confirmations, each.predicted_tokens, each.max_tokens = [], 0, None
        each.notes = ["the budget does not even hold short prompts in this mode"]
    page = profile_html(profile)
    assert "full: the budget does not even hold" in page
    assert "Nothing is predicted from this profile" in page
    assert "How long it takes" not in page


def test_tables_are_readable_at_80_columns(full: Profile, capsys: pytest.CaptureFixture[str]) -> None:
    assert not sys.stderr.isatty()
    full.modes[0].capped = True
    for section in profile_sections(full):
        print_section(stderr_console(), section)
    said = capsys.readouterr()
    assert said.out == ""
    own, _, survey = said.err.partition("\nInput\n")
    assert survey
    assert [line for line in own.splitlines() if len(line.rstrip()) > 80 and "machine" not in line] == []
    for known in ("18,874", "2,359 (capped)", "as prefill score does it", "97 to score of 100", "2.0 h"):
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
                assert tab.complaints() == []
                assert tab.requests() == [path.as_uri()]

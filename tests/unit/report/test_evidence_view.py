"""Evidence and rationales as the terminal and pages show them."""

from __future__ import annotations

import math

from prefillcli.followup.evidence import evidence_bars
from prefillcli.followup.rationale import rationale_facts, rationale_text
from prefillcli.report.section import Bar, Part
from prefillcli.rows.records import Rationale, SectionEffect
from prefillcli.tools.inspection import in_characters


def signed_bar_rows(bars: list[Bar]) -> list[list[str]]:
    table = in_characters(Part(bars=bars)).table
    assert table is not None
    return [[*row] for row in table]


EFFECTS = (SectionEffect("paragraph 2", -0.4), SectionEffect("turn\x1b[31m", 0.1), SectionEffect("title", 0.0))


def test_bars_are_as_long_as_changes_are_large_and_point_to_their_side() -> None:
    header, *rows = signed_bar_rows(evidence_bars(EFFECTS))
    assert header == ["section", "change", ""]
    assert [row[1] for row in rows] == ["-0.4000", "+0.1000", "+0.0000"]
    bars = [row[2].split("│") for row in rows]
    assert [(left.count("█"), right.count("█")) for left, right in bars] == [(20, 0), (0, 5), (0, 0)]
    shown = evidence_bars(EFFECTS)
    assert [(bar.length, bar.start, bar.kind) for bar in shown] == [(50, 0, "alarm"), (12.5, 50, "s0"), (0, 50, "s0")]


def test_names_of_sections_cannot_write_to_the_terminal() -> None:
    assert all("\x1b" not in cell for row in signed_bar_rows(evidence_bars(EFFECTS)) for cell in row)
    assert all("\x1b" not in bar.name for bar in evidence_bars(EFFECTS))


def test_effects_that_are_all_zero_have_no_bars() -> None:
    assert [bar.length for bar in evidence_bars([SectionEffect("a", 0.0)])] == [0.0]
    assert signed_bar_rows(evidence_bars([SectionEffect("a", 0.0)]))[1][2].strip() == "│"
    assert evidence_bars([]) == []


def test_a_rationale_is_shown_behind_the_words_it_begins_with() -> None:
    written = Rationale("the pain\x07 is gone.", 5, "stop", 0.25, "full")
    assert rationale_text(written, "positive because").startswith("positive because the pain")
    assert "\x07" not in rationale_text(written)
    assert rationale_facts(written) == (
        "5 tokens; ended: stop; from: full; smallest gap between the two best tokens: 0.25"
    )
    nothing = Rationale(None, 0, "memory", math.inf, "full")
    assert rationale_text(nothing, "positive because") == "nothing was written (memory)"
    assert rationale_facts(nothing) == "0 tokens; ended: memory; from: full"

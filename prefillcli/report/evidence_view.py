"""A row's rationale and the evidence beside it, as terminal and page show them. Both are untrusted text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from prefillcli.data.rows import Rationale, SectionEffect
from prefillcli.report.numbers import counted, signed_bar
from prefillcli.report.visible import visible

NO_REASON = "It is not the reason for the score: it is text that the model finds likely behind its answer."
WHAT_EVIDENCE_IS = (
    "Change: how far the score of the first label falls when the section is left out. Sections act together, so "
    "changes do not add up."
)
EVIDENCE_NUMBERS = ("change",)
"""Columns of `evidence_rows` that are numbers."""
_SIDE = 20  # characters of the longest bar


class EvidenceBar(NamedTuple):
    """A section and its change, safe to show: `share` is how long its bar is, in percent of the longest one."""

    section: str
    change: str
    share: float
    raises: bool
    """Whether the section raises the score."""


def evidence_bars(effects: Sequence[SectionEffect]) -> list[EvidenceBar]:
    """A bar for each section, in the order of the column: the largest change first."""
    longest = _longest(effects)
    return [
        EvidenceBar(
            visible(section, line=True), _change(change), 100 * abs(change) / longest if longest else 0.0, change > 0
        )
        for section, change in effects
    ]


def evidence_rows(effects: Sequence[SectionEffect]) -> list[list[str]]:
    """A header, and a line with a bar for each section, safe to show."""
    longest = _longest(effects)
    found = [["section", "change", ""]]
    for section, change in effects:
        found.append([visible(section, line=True), _change(change), signed_bar(change, longest, _SIDE)])
    return found


def rationale_text(rationale: Rationale, begins: str = "") -> str:
    """The text behind the words that it goes on, or why there is none; safe to show."""
    if rationale.text is None:
        return f"nothing was written ({rationale.finish_reason})"
    return visible(f"{begins} {rationale.text.strip()}".strip())


def rationale_facts(rationale: Rationale) -> str:
    """How the text ended and what it was written from, in a line that is safe to show."""
    parts = [counted(rationale.tokens, "token"), f"ended: {rationale.finish_reason}", f"from: {rationale.source}"]
    if math.isfinite(rationale.gap):
        parts.append(f"smallest gap between the two best tokens: {rationale.gap:.3g}")
    return visible("; ".join(parts), line=True)


def _longest(effects: Sequence[SectionEffect]) -> float:
    return max((abs(effect.change) for effect in effects), default=0.0)


def _change(change: float) -> str:
    return f"{change:+.4f}"

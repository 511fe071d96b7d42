"""What a run says of its evidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field

from prefillcli.core.further import first_rows
from prefillcli.data.rows import SectionEffect
from prefillcli.report.section import Bar, Part, Section, Strip, counted, row_name, visible

WHAT_EVIDENCE_IS = (
    "Change: how far the score of the first label falls when the section is left out. Sections act together, so "
    "changes do not add up."
)


class WeighedRow(BaseModel):
    """A row whose sections were weighed. All texts are untrusted."""

    row: int | None  # None where rows have ids
    id: str | None
    score: float
    prediction: str | None
    evidence: list[dict[str, Any]]  # sections, and by how much the score falls without them


class EvidenceUse(BaseModel):
    """Rows are those of the output."""

    evidence_rows: int = 0  # whose sections were weighed
    shown: list[WeighedRow] = Field(default_factory=list)  # with --show-text, the first ones


def weighed_rows(output: str, id_name: str | None) -> list[WeighedRow]:
    """The first rows of an output that are weighed."""
    return [WeighedRow.model_validate(each) for each in first_rows(output, ("evidence",), id_name)]


def section(use: EvidenceUse) -> Section:
    """What terminal, page and metrics say of a run's evidence: an `EvidenceUse`, or what has its fields."""
    found = Section(title="Evidence", summary={"rationales": {"evidence_rows": use.evidence_rows}})
    found.metric("evidence_rows", "Rows of the output whose sections were weighed.", use.evidence_rows)
    if use.evidence_rows:
        found.lines.append(("evidence", f"{counted(use.evidence_rows, 'row')} without each of their sections"))
        found.parts.append(Part(note=WHAT_EVIDENCE_IS))
    for row in use.shown:
        if row.evidence:
            title = f"{row_name(row.row, row.id)}: {row.prediction or ''}, score {row.score:.4f}"
            changes = [(each["section"], each["change"]) for each in row.evidence]
            found.parts.append(Part(title=title, bars=evidence_bars(changes)))
    return found


def inspected(effects: Sequence[SectionEffect]) -> Section:
    """What `prefill inspect` says of a row's evidence."""
    return Section(title="Evidence", parts=[Part(bars=evidence_bars(effects), note=WHAT_EVIDENCE_IS)])


def evidence_bars(effects: Sequence[tuple[str, float]]) -> list[Bar]:
    """A bar for each section from the middle of its track, in the order of the column: the largest change first."""
    longest = max((abs(change) for _, change in effects), default=0.0)
    found = []
    for name, change in effects:
        half = 50 * abs(change) / longest if longest else 0.0
        kind, start = ("alarm", 50 - half) if change < 0 else ("s0", 50.0)
        middle = Strip("middle", 50.0, 0.2)
        found.append(Bar(visible(name, line=True), half, f"{change:+.4f}", kind, start, more=(middle,)))
    return found

"""What the page of a run shows of its rationales."""

from __future__ import annotations

from typing import Any, NamedTuple

from prefillcli.data.rows import SectionEffect
from prefillcli.report.evidence_view import NO_REASON, WHAT_EVIDENCE_IS, EvidenceBar, evidence_bars
from prefillcli.report.rationale_lines import rationale_lines
from prefillcli.report.rationale_use import RationaleUse, WrittenRow
from prefillcli.report.visible import visible


class ShownText(NamedTuple):
    """A row's text and evidence as the page shows them; every text is safe to show."""

    row: WrittenRow
    text: str | None
    facts: str
    evidence: list[EvidenceBar]


def rationale_view(use: RationaleUse | None) -> dict[str, Any] | None:
    """What the page of a run shows of its rationales; None without any."""
    if use is None:
        return None
    return {
        "lines": list(rationale_lines(use)),
        "notes": [*([NO_REASON] if use.rows else []), *([WHAT_EVIDENCE_IS] if use.evidence_rows else [])],
        "shown": [_shown(row) for row in use.shown],
    }


def _shown(row: WrittenRow) -> ShownText:
    effects = [SectionEffect(each.section, each.change) for each in row.evidence or ()]
    facts = f"ended: {row.finish_reason}; from: {row.source}" if row.finish_reason is not None else ""
    text = None if row.rationale is None else visible(row.rationale)
    return ShownText(row, text, visible(facts, line=True), evidence_bars(effects))

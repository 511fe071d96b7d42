"""One prompt as one HTML page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from prefillcli.data.output.store import put_text
from prefillcli.report.evidence_view import (
    NO_REASON,
    WHAT_EVIDENCE_IS,
    evidence_bars,
    rationale_facts,
    rationale_text,
)
from prefillcli.report.html import render_page
from prefillcli.report.inspection import (
    FOLD,
    HEAT,
    MARKED,
    Inspection,
    TokenView,
    answer_columns,
    answer_rows,
    counts,
    facts,
    heat,
    importance_of,
    stretches,
)
from prefillcli.report.layer_margins import NUMBERS, margin_notes, margin_plot, margin_rows
from prefillcli.report.visible import preview, visible


def inspection_html(inspection: Inspection) -> str:
    """The page of an inspected prompt."""
    _, ranges = heat(inspection.tokens)
    curve = inspection.margins
    return render_page(
        "prefillcli.report",
        "inspection.html.j2",
        {"visible": lambda text: visible(str(text), line=True)},
        name=visible(inspection.row_id, line=True),
        facts=facts(inspection),
        heat=HEAT,
        ranges=ranges,
        counts=counts(inspection),
        pieces=_pieces(inspection.tokens),
        stretches=[(best, ", ".join(best.why), preview(best.text)) for best in stretches(inspection)],
        shared=inspection.shared,
        columns=answer_columns(inspection),
        answers=answer_rows(inspection),
        margins=None if curve is None else margin_rows(curve),
        margin_notes=[] if curve is None else margin_notes(curve),
        margin_plot=None if curve is None else margin_plot(curve),
        numbers=NUMBERS,
        rationale=None if inspection.rationale is None else rationale_text(inspection.rationale, inspection.begins),
        rationale_facts=None if inspection.rationale is None else rationale_facts(inspection.rationale),
        no_reason=NO_REASON,
        evidence=None if inspection.evidence is None else evidence_bars(inspection.evidence),
        what_evidence_is=WHAT_EVIDENCE_IS,
        settings=[(visible(k, line=True), visible(str(v), line=True)) for k, v in inspection.settings.items()],
    )


def write_html(inspection: Inspection, path: str) -> None:
    """Write the page of `inspection_html` to a local path or URL. Raises PrefillError."""
    put_text(path, inspection_html(inspection))


@dataclass(frozen=True, slots=True)
class _PageElement:
    """An element of the page: one kept token, or a whole dropped stretch."""

    text: str
    title: str
    classes: str = ""
    dropped: int = 0  # tokens
    folded: bool = False


def _pieces(tokens: Sequence[TokenView]) -> Iterator[_PageElement]:
    steps, _ = heat(tokens)
    at = 0
    for kept, run in groupby(tokens, key=lambda token: token.kept):
        part = list(run)
        if kept:
            for token, step in zip(part, steps[at : at + len(part)], strict=True):
                importance = "" if token.importance is None else f", importance {token.importance:.3g}"
                classes = [f"h{step}"] if step is not None else []
                classes += [token.why] if token.why in MARKED else []
                classes += ["newline"] if token.text and not token.text.strip("\n") else []
                title = f"token {token.position}, id {token.id}{importance}, {token.why}"
                yield _PageElement(visible(token.text), title, " ".join(classes))
        else:
            title = f"tokens {part[0].position}-{part[-1].position} dropped"
            values = [value for token in part if (value := importance_of(token)) is not None]
            if values:
                title += f", importance {math.fsum(values) / len(values):.3g} mean, {max(values):.3g} largest"
            text = "".join(visible(token.text) for token in part)
            yield _PageElement(text, title, dropped=len(part), folded=len(part) > FOLD)
        at += len(part)

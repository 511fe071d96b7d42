"""One prompt in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from prefillcli.report.evidence_view import (
    EVIDENCE_NUMBERS,
    NO_REASON,
    WHAT_EVIDENCE_IS,
    evidence_rows,
    rationale_facts,
    rationale_text,
)
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
    stretches,
)
from prefillcli.report.layer_margins import NUMBERS, margin_notes, margin_rows
from prefillcli.report.numbers import counted
from prefillcli.report.tables import pairs_table
from prefillcli.report.visible import preview, visible

# Cold to hot at middling lightness, as the terminal's background is not known.
_STYLES = (
    "#ffffff on #5b6b7a",
    "#ffffff on #7d7440",
    "#000000 on #c99a2e",
    "#000000 on #ee7f2d",
    "#ffffff on #c81e1e",
)
_EDGE = 8  # tokens shown at either end of a long dropped stretch


@dataclass(frozen=True, slots=True)
class Fold:
    """Neighbouring tokens that are counted, not shown."""

    tokens: int
    kept: int = 0

    def __str__(self) -> str:
        if not self.kept:
            return f"… {counted(self.tokens, 'token')} dropped"
        if self.kept == self.tokens:
            return f"… {counted(self.tokens, 'kept token')} not shown"
        return f"… {counted(self.tokens, 'token')} not shown, {self.kept:,} of them kept"


def print_inspection(inspection: Inspection, console: Console, *, most_tokens: int | None = None) -> None:
    """Write `inspection` to `console`: coloured on a terminal, else with brackets around what is kept.

    `most_tokens`: tokens of the text to show at most, from both ends; None shows all of it.
    """
    coloured = console.is_terminal and not console.no_color and console.color_system is not None

    def show(what: Table | Text) -> None:
        wide = isinstance(what, Text) and not console.is_terminal  # a file has no width to wrap text at
        console.print(what, soft_wrap=wide, highlight=False)

    def title(text: str) -> None:
        show(Text(f"\n{text}", style="bold"))

    show(pairs_table(facts(inspection)))
    title("prompt")
    show(_legend(inspection, coloured))
    show(Text())
    show(_coloured(inspection.tokens, most_tokens) if coloured else _bracketed(inspection.tokens, most_tokens))
    best = stretches(inspection)
    if best:
        title("most important stretches")
        table = _columns("tokens", "importance", "why", "text")
        for stretch in best:
            cells = (f"{stretch.first:,}-{stretch.last:,}", f"{stretch.importance:.3g}", ", ".join(stretch.why))
            table.add_row(*cells, Text(preview(stretch.text), no_wrap=True, overflow="ellipsis"))
        show(table)
    title("answer")
    table = _columns("", *answer_columns(inspection))
    for name, *values in answer_rows(inspection):
        table.add_row(Text(name), *map(Text, values))
    show(table)
    if inspection.rationale is not None:
        title("rationale")
        show(Text(rationale_text(inspection.rationale, inspection.begins)))
        show(Text(rationale_facts(inspection.rationale), style="dim"))
        show(Text(NO_REASON, style="dim"))
    if inspection.evidence is not None:
        title("evidence")
        show(_with_bars(evidence_rows(inspection.evidence)))
        show(Text(WHAT_EVIDENCE_IS, style="dim"))
    if inspection.margins is not None:
        title("layer by layer")
        show(_with_bars(margin_rows(inspection.margins)))
        for note in margin_notes(inspection.margins):
            show(Text(note, style="dim"))


def _legend(inspection: Inspection, coloured: bool) -> Text:
    parts = []
    for why, text, number in counts(inspection):
        style = "dim" if why == "dropped" else MARKED.get(why, "").strip()
        parts.append(Text(f"{text} {number:,}", style if coloured else ""))
    legend = Text("; ").join(parts)
    _, ranges = heat(inspection.tokens)
    if not coloured:
        dropped = any(not token.kept for token in inspection.tokens)
        return legend.append("\n⟦kept⟧ ⟦… dropped⟧") if dropped else legend
    if any(ranges):
        legend.append("\n")
        for style, values in zip(_STYLES, ranges, strict=True):
            if values:
                legend.append(f" {values[0]:.2g}-{values[1]:.2g} ", style)
        legend.append(f" importance; colour: {HEAT}")
    return legend


def _folded(tokens: Sequence[TokenView], edge: int, fold: int) -> Iterator[int | Fold]:
    """Indices of the tokens to show; of a dropped stretch of more than `fold`, `edge` at either end."""
    start = 0
    for kept, run in groupby(tokens, key=lambda token: token.kept):
        stop = start + sum(1 for _ in run)
        if kept or stop - start <= fold:
            yield from range(start, stop)
        else:
            yield from range(start, start + edge)
            yield Fold(stop - start - 2 * edge)
            yield from range(stop - edge, stop)
        start = stop


def _shortened(items: list[int | Fold], tokens: Sequence[TokenView], most: int | None) -> list[int | Fold]:
    """`items` with no more than `most` tokens, from both ends."""
    shown = [at for at, item in enumerate(items) if isinstance(item, int)]
    if most is None or len(shown) <= most:
        return items
    head, tail = (most + 1) // 2, most // 2
    start, stop = shown[head], shown[-tail - 1] + 1
    while start and isinstance(items[start - 1], Fold):
        start -= 1
    while stop < len(items) and isinstance(items[stop], Fold):
        stop += 1
    hidden = kept = 0
    for item in items[start:stop]:
        hidden += item.tokens if isinstance(item, Fold) else 1
        kept += isinstance(item, int) and tokens[item].kept
    return [*items[:start], Fold(hidden, kept), *items[stop:]]


def _coloured(tokens: Sequence[TokenView], most: int | None) -> Text:
    steps, _ = heat(tokens)
    text = Text()
    items = _shortened(list(_folded(tokens, _EDGE, FOLD)), tokens, most)
    for style, part in groupby(items, key=lambda item: _style(item, tokens, steps)):
        shown = (f" [{item}] " if isinstance(item, Fold) else visible(tokens[item].text) for item in part)
        text.append("".join(shown), style)
    return text


def _style(item: int | Fold, tokens: Sequence[TokenView], steps: Sequence[int | None]) -> str:
    if isinstance(item, Fold):
        return "dim reverse"
    token, step = tokens[item], steps[item]
    if not token.kept:
        return "dim"
    return ("" if step is None else _STYLES[step]) + MARKED.get(token.why, "")


def _bracketed(tokens: Sequence[TokenView], most: int | None) -> Text:
    text = Text()
    items = _shortened(list(_folded(tokens, 0, 0)), tokens, most)
    if all(isinstance(item, int) for item in items):
        return text.append("".join(visible(token.text) for token in tokens))  # all is kept: no need of brackets
    for folded, part in groupby(items, key=lambda item: isinstance(item, Fold)):
        if folded:
            text.append("".join(f"⟦{item}⟧" for item in part))
        else:
            inside = "".join(visible(tokens[item].text) for item in part if isinstance(item, int))
            text.append("⟦" + inside.replace("⟦", "⟨U+27E6⟩").replace("⟧", "⟨U+27E7⟩") + "⟧")
    return text


def _with_bars(rows: Sequence[Sequence[str]]) -> Table:
    """A table of a header and lines; a column without a name has bars."""
    header, *lines = rows
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in header:
        number = name in (*NUMBERS, *EVIDENCE_NUMBERS)
        table.add_column(Text(name), justify="right" if number else "left", no_wrap=number or not name)
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def _columns(*names: str) -> Table:
    """A table of texts."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in names:
        table.add_column(Text(name))
    return table

"""Tables in the terminal. What they show is text, never markup: names come from users' files."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Collection, Iterable
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import Environment, FunctionLoader, StrictUndefined
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from prefillcli.report.section import Part, Section

#: A header, and the rows below it.
TableRows = list[list[str]]


class Cell(str):
    """A text of a table that looks different on the page: `kind` is a class of its style."""

    def __new__(cls, text: str, kind: str) -> Cell:
        cell = super().__new__(cls, text)
        cell.kind = kind
        return cell

    kind: str


WIDTH = 80  # columns of the tables of results, however wide the terminal is


def stderr_console(width: int | None = None) -> Console:
    """Where tables go; without a `width`, lines are as long as they are."""
    return Console(stderr=True, highlight=False, markup=False, soft_wrap=width is None, width=width)


def pairs_table(rows: Iterable[tuple[str, str]]) -> Table:
    """A table of names and texts, which may be untrusted."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", min_width=10)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(Text(visible(name, line=True)), Text(visible(text)))
    return table


def numbers_table(rows: TableRows, *, words: Collection[int] = (0,), caption: str | None = None) -> Table:
    """A header and rows, which may be untrusted: numbers are aligned to the right, the columns of `words` are not."""
    table = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", caption=caption, caption_justify="left"
    )
    for at, name in enumerate(rows[0]):
        kind = getattr(rows[-1][at], "kind", "") if at < len(rows[-1]) else ""
        whole = at in words and kind not in ("prose", "name")  # its texts are no longer than they have to be
        side: Literal["left", "right"] = "left" if at in words else "right"
        table.add_column(Text(visible(name, line=True)), justify=side, no_wrap=whole)
    for row in rows[1:]:
        cells = [Text(visible(cell, line=True), overflow="ellipsis") for cell in row]
        for cell, own in zip(cells, row, strict=True):
            cell.no_wrap = isinstance(own, Cell) and own.kind == "prose"
        table.add_row(*cells)
    return table


# Untrusted text made safe to show.
#
# No character of it reaches the terminal or a page that could move the cursor, reorder the line or hide.


_PREVIEW = 240  # characters


def visible(text: str, *, line: bool = False) -> str:
    """`text` with control, escape, direction and other invisible characters spelled out.

    Newlines and tabs stay, unless it has to be one `line`. The joiners that scripts and emoji are written with stay.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _spelled(char, line) for char in text)


def preview(text: str) -> str:
    """The beginning of `text` in one line."""
    start = visible(text[: _PREVIEW + 1].lstrip(" "), line=True)
    return start if len(text) <= _PREVIEW else start[:-1] + "…"


def _spelled(char: str, line: bool) -> str:
    if char in "\n\t":
        return char if not line else "↵" if char == "\n" else " "
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)  # Unicode's control pictures
    if code == 0x7F:
        return "\u2421"
    if char in "\u200c\u200d" or unicodedata.category(char) in ("Zs", "Co", "Cn"):
        return char
    return f"⟨U+{code:04X}⟩"


# Numbers as tables, charts and pages show them; durations as one would say them are in `prefillcli.runtime.clock`.


_BAR = 40  # characters of the longest bar
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def three_digits(value: float) -> str:
    """Three digits, and all that are before the point: `0.0123`, `12.3`, `12,345`."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def abbreviated(number: float) -> str:
    """`1,234`, `12.3k`, `1.23M`."""
    for size, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if number >= size:
            return f"{number / unit:.3g}{letter}"
    return f"{number:,.0f}"


def counted(number: int, noun: str) -> str:
    """`1 token`, `1,234 tokens`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def row_name(row: int | None, own: str | None) -> str:
    """What a table calls a row: its id, else its number."""
    return own if own is not None else "" if row is None else f"row {row:,}"


def mebibytes(size: float) -> str:
    """Bytes in MiB, without the unit: `1,234`."""
    return f"{size / 2**20:,.0f}"


def byte_size(size: float) -> str:
    """`1.5 GiB`, `300 MiB`."""
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{mebibytes(size)} MiB"


def minutes_and_seconds(seconds: float) -> str:
    """`120 ms`, `12.3 s`, `4 min 05 s`, `2 h 07 min`."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 90:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def small_seconds(seconds: float, sign: str = "") -> str:
    """`3.1 ms`, `-12 us`; with `sign` "+" the sign is always there."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size:
            return f"{seconds / size:{sign}.3g} {unit}"
    return f"{seconds / 1e-9:{sign}.3g} ns"


def price(value: float) -> str:
    """In the currency of --price-per-hour: `12.34`, `0.0012`."""
    return f"{value:,.2f}" if value >= 1 else f"{value:.2g}"


def percent_interval(bounds: tuple[float, float]) -> str:
    """Bounds from 0 to 1: `1.2-3.4 %`."""
    return f"{100 * bounds[0]:.1f}-{100 * bounds[1]:.1f} %"


def percent_or_nothing(value: float | None) -> str:
    """`12.3%`; nothing where the value is not known."""
    return "" if value is None else f"{value:.1%}"


def bar(value: float, most: float, width: int = _BAR) -> str:
    """A bar of up to `width` characters, in eighths of one; whatever is above zero can be seen."""
    eighths = round(8 * width * value / most) if most else 0
    eighths = max(eighths, 1 if value > 0 else 0)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def signed_bar(value: float, most: float, side: int) -> str:
    """A bar of up to `side` characters to the left or the right of a line."""
    length = min(round(side * abs(value) / most), side) if most and math.isfinite(value) else 0
    left, right = ("█" * length, "") if value < 0 else ("", "█" * length)
    return f"{left:>{side}}│{right:<{side}}"


# Sections in the terminal, on a page, and as metrics.


def print_section(console: Console, section: Section, *, wide: bool | None = None) -> None:
    """A section as text: title, lines, then its parts, and what a reader must not miss.

    `wide`: lines of text are as long as they are, whatever the console does by itself.
    """

    def show(text: str, style: str = "") -> None:
        console.print(Text(visible(text), style), soft_wrap=wide, highlight=False)

    if section.title:
        show(f"\n{section.title}", "bold")
    if section.lines:
        console.print(pairs_table(section.lines))
    for part in section.parts:
        if part.shown:
            _print_part(console, part, show)
    for text in section.alarms:
        show(f"note: {text}")


def _print_part(console: Console, part: Part, show: Callable[..., None]) -> None:
    if part.title:
        show(f"\n{part.title}")
    if part.above:
        show(part.above, "dim")
    if part.text:
        show(part.text)
    if part.table:
        if part.above:
            console.print()
        console.print(numbers_table(part.table, words=part.words))
    width = max((len(each.name) for each in part.bars), default=0)
    for each in part.bars:
        show(f"  {each.name:>{width}} {bar(each.length, 100)} {each.text}")
    for name, text in part.lines:
        show(f"  {name}: {text}", "dim")
    if part.note:
        show(f"  {part.note}" if part.table or part.lines else part.note, "dim")


def page_html(
    head: Section,
    sections: Iterable[Section],
    *,
    title: str = "",
    verdict: tuple[str, str] | None = None,
    template: str = "page.html.j2",
    **values: Any,
) -> str:
    """A page that begins with the `head`, and with the tiles of all sections; texts in it are escaped.

    It needs nothing else: no network, no script, inline CSS for light and dark screens. `title` is the window's.
    `verdict` is how it ended, and a class of the page's style. `values` are for a `template` that extends the page.
    """
    found = list(sections)
    tiles = [tile for each in (head, *found) for tile in each.tiles]
    return (
        _environment()
        .get_template(template)
        .render(head=head, sections=found, title=title or head.title, verdict=verdict, tiles=tiles, **values)
    )


@cache
def _environment() -> Environment:
    # The templates in this folder; compiling one takes longer than most pages.
    folder = files("prefillcli.report")
    environment = Environment(
        loader=FunctionLoader(lambda name: folder.joinpath(name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(visible=lambda text: visible(str(text), line=True), visible_lines=visible)
    return environment


def metrics_text(sections: Iterable[Section]) -> str:
    """The gauges of all sections in Prometheus' text format, for the textfile collector of node_exporter.

    The format: https://prometheus.io/docs/instrumenting/exposition_formats/.
    """
    lines = []
    for name, text, samples in (each for section in sections for each in section.metrics):
        lines.append(f"# HELP prefill_{name} {text}\n# TYPE prefill_{name} gauge\n")
        for labels, value in samples:
            pairs = ",".join(f'{label}="{_escaped(own)}"' for label, own in labels.items())
            lines.append(f"prefill_{name}{f'{{{pairs}}}' if pairs else ''} {value!r}\n")
    return "".join(lines)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def page_of(path: str) -> str:
    """Where the page of a JSON file goes: `run.json` -> `run.html`, beside it."""
    return path.removesuffix(".json") + ".html"

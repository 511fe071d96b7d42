"""Sections of a report, for terminal, page and metrics; charts are in percent of a plot's width and height.

The shapes are stretched to the width of the screen and the texts beside them are not, so one chart reads on a laptop
and on a phone. The templates draw them.
"""

from __future__ import annotations

import math
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jinja2 import Environment, FunctionLoader, StrictUndefined
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prefillcli.errors import counted as counted
from prefillcli.images.thumbnails import Thumbnail
from prefillcli.rows.output.tallies import LENGTH_EDGES
from prefillcli.runtime import log

if TYPE_CHECKING:
    from prefillcli.report.run import Histogram, MemoryTrace


SERIES = 8  # distinguishable colours; if there are more series, the rest are drawn as one
OTHERS = "others"
_MOST_BINS = 64
_FEWEST_BINS = 12
_LEAST_HEIGHT = 0.8  # percent; one row among a million stays visible
_LEAST_GAP = 8.0  # percent between two ticks, for a phone
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


class Tick(NamedTuple):
    """A text at `at` percent of an axis."""

    at: float
    text: str


class Box(NamedTuple):
    """A bar of a plot; `y` is its upper edge, from the top."""

    x: float
    y: float
    width: float
    height: float
    series: int
    title: str


class Dot(NamedTuple):
    """A point of a plot, in percent from the left and the top."""

    x: float
    y: float
    series: int
    title: str
    hollow: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    """Boxes, lines and dots over an axis. The height is that of `top`, the highest tick of `y`."""

    x: list[Tick]
    y: list[Tick]
    series: list[tuple[str, str]]  # name and size of each
    boxes: list[Box] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # points as SVG wants them
    first_line: int = 0  # the series of the first line; boxes have those before it
    dots: list[Dot] = field(default_factory=list)


class Strip(NamedTuple):
    """A stretch of a bar's track, in percent of it."""

    kind: str
    start: float
    width: float


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of a list. Kinds are classes of the page's style."""

    name: str
    length: float  # percent
    text: str
    kind: str = "s0"
    start: float = 0.0
    more: tuple[Strip, ...] = ()  # drawn over it


def score_plot(histogram: Histogram) -> Plot:
    """Return a histogram of scores, stacked by prediction, the one with the highest scores first."""
    middle = {name: _mean_bin(bins) for name, bins in histogram.counts.items()}
    stacks = _merged({name: histogram.counts[name] for name in sorted(middle, key=lambda name: (-middle[name], name))})
    edges = histogram.edges
    titles = [f"{low:.2f} to {high:.2f}" for low, high in pairwise(edges)]
    ticks = [Tick(100 * at, f"{at:g}") for at in (0.0, 0.25, 0.5, 0.75, 1.0)]
    return _stacked(stacks, titles, ticks)


def length_plot(histogram: Histogram) -> Plot:
    """Return a histogram of lengths, stacked by the outcome of the rows. Bins have the same width on a logarithmic
    scale."""
    edges, counts = _coarser(histogram)
    titles = [f"{low:,.0f} to {high - 1:,.0f} tokens" for low, high in pairwise(edges)]
    width = 100 / max(len(titles), 1)
    ticks: list[Tick] = []
    for number in _round_numbers(edges):
        at = _place(number, edges) * width
        if not ticks or at - ticks[-1].at > _LEAST_GAP:
            ticks.append(Tick(at, f"{number:,.0f}"))
    order = [kind for kind in ("scored", "truncated", "error") if kind in counts]
    return _stacked({kind: counts[kind] for kind in order}, titles, ticks)


def memory_plot(trace: MemoryTrace) -> Plot | None:
    """Return lines of the memory in use; None unless there are two points in time."""
    if len(trace.seconds) < 2 or trace.seconds[-1] <= trace.seconds[0]:
        return None
    named = [("host", trace.host), ("device", trace.device)]
    lines = [(name, values) for name, values in named if any(values)]
    if not lines:
        return None
    unit, size = _unit(max(max(values) for _, values in lines))
    return line_plot(
        [
            (name, f"{max(values) / size:,.1f} {unit}", list(zip(trace.seconds, values, strict=True)))
            for name, values in lines
        ],
        Scale.upto(trace.seconds[-1], "{:g} s", end=trace.seconds[-1]),
        Scale.upto(max(max(values) for _, values in lines), f"{{:g}} {unit}", unit=size),
    )


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis from `low` to `high`, with texts at some values."""

    low: float
    high: float
    texts: Mapping[float, str]

    @classmethod
    def upto(cls, top: float, form: str, *, unit: float = 1.0, end: float | None = None) -> Scale:
        """Return the scale from 0 to a round number at or above `top`, or to the `end`. `form` turns a value in `unit`
        into a text."""
        marks = round_ticks(top / unit)
        high = marks[-1] * unit if end is None else end
        return cls(0.0, high, {at * unit: form.format(at) for at in marks if at * unit <= high * (1 + 1e-9)})

    def at(self, value: float) -> float:
        """Return the position of a value, in percent."""
        return 100 * (value - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> list[Tick]:
        """The texts, where they are."""
        return [Tick(self.at(value), text) for value, text in self.texts.items()]


def line_plot(
    lines: Sequence[tuple[str, str, Sequence[tuple[float, float]]]],
    x: Scale,
    y: Scale,
    dots: Sequence[tuple[int, float, float, str, bool]] = (),
) -> Plot:
    """Return a plot of lines, each with its name, its size as a text and points (x, y).

    `dots` are series, x, y, title, and whether it is hollow.
    """
    return Plot(
        x=x.ticks,
        y=y.ticks,
        series=[(name, size) for name, size, _ in lines],
        lines=[" ".join(f"{x.at(a):.2f},{100 - y.at(b):.2f}" for a, b in points) for _, _, points in lines],
        dots=[Dot(x.at(a), 100 - y.at(b), series, title, hollow) for series, a, b, title, hollow in dots],
    )


def bars(values: Mapping[str, float], texts: Mapping[str, str], kinds: Mapping[str, str] | None = None) -> list[Bar]:
    """Return bars with lengths in proportion to the values; the longest takes the whole track."""
    longest = max(values.values(), default=0) or 1
    return [
        Bar(name, 100 * value / longest, texts[name], (kinds or {}).get(name, "s0")) for name, value in values.items()
    ]


def _stacked(stacks: dict[str, list[int]], titles: list[str], x: list[Tick]) -> Plot:
    totals = [sum(column) for column in zip(*stacks.values(), strict=True)]
    y = round_ticks(max(totals, default=0) or 1, whole=True)
    width = 100 / max(len(titles), 1)
    boxes = []
    for at, title in enumerate(titles):
        filled = 0.0
        for series, (name, counts) in enumerate(stacks.items()):
            if counts[at]:
                height = max(100 * counts[at] / y[-1], _LEAST_HEIGHT)
                text = f"{title}: {name} {counts[at]:,}"
                filled += height
                boxes.append(Box(at * width, 100 - filled, width * 0.92, height, series, text))
    return Plot(
        x=x,
        y=[Tick(100 * at / y[-1], abbreviated(at)) for at in y],
        series=[(name, f"{sum(counts):,}") for name, counts in stacks.items()],
        boxes=boxes,
    )


def _mean_bin(bins: Sequence[int]) -> float:
    return sum(at * number for at, number in enumerate(bins)) / max(sum(bins), 1)


def _merged(stacks: dict[str, list[int]]) -> dict[str, list[int]]:
    # The largest series in their order, the rest as one.
    if len(stacks) <= SERIES:
        return stacks
    large = sorted(stacks, key=lambda name: -sum(stacks[name]))[: SERIES - 1]
    rest = [bins for name, bins in stacks.items() if name not in large]
    return {name: bins for name, bins in stacks.items() if name in large} | {
        OTHERS: [sum(column) for column in zip(*rest, strict=True)]
    }


def _coarser(histogram: Histogram) -> tuple[list[float], dict[str, list[int]]]:
    # As many bins as are visible: of many, neighbours are joined; few get empty ones on both sides.
    edges, counts = list(histogram.edges), {kind: list(bins) for kind, bins in histogram.counts.items()}
    while 1 < len(edges) <= _FEWEST_BINS:
        below, above = bisect_left(LENGTH_EDGES, edges[0]), bisect_right(LENGTH_EDGES, edges[-1])
        if below > 0:
            edges.insert(0, LENGTH_EDGES[below - 1])
            counts = {kind: [0, *bins] for kind, bins in counts.items()}
        edges.append(LENGTH_EDGES[above] if above < len(LENGTH_EDGES) else 2 * edges[-1])
        counts = {kind: [*bins, 0] for kind, bins in counts.items()}
    size = math.ceil(max(len(edges) - 1, 1) / _MOST_BINS)
    joined = {kind: [sum(bins[at : at + size]) for at in range(0, len(bins), size)] for kind, bins in counts.items()}
    ends = edges[size::size]
    return [*edges[:1], *ends, *(edges[-1:] if (len(edges) - 1) % size else [])], joined


def round_ticks(top: float, whole: bool = False) -> list[float]:
    """Return 0 and up to five more round numbers; the last is at or above `top`."""
    raw = top / 4
    size = 10 ** math.floor(math.log10(raw))
    step = next(step * size for step in _STEPS if step * size >= raw * 0.999)
    if whole:
        step = max(1.0, math.ceil(step))
    return [round(at * step, 10) for at in range(math.ceil(top / step - 1e-9) + 1)]


def _round_numbers(edges: Sequence[float]) -> list[float]:
    # At most six round numbers within the edges; of a range without two of them its ends.
    tens = [10.0**power for power in range(9)]
    for steps in ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 5), (1, 3), (1,)):
        found = [step * ten for ten in tens for step in steps if edges[0] <= step * ten <= edges[-1]]
        if 2 <= len(found) <= 6:
            return found
    return [edges[0], edges[-1]]


def _place(number: float, edges: Sequence[float]) -> float:
    # The place of a number among the edges: 1.5 is in the middle of the second bin.
    at = min(bisect_right(edges, number), len(edges) - 1) - 1
    return at + (number - edges[at]) / (edges[at + 1] - edges[at])


def _unit(size: float) -> tuple[str, int]:
    return ("GiB", 2**30) if size >= 2 * 2**30 else ("MiB", 2**20)


Samples = list[tuple[dict[str, str], float]]


@dataclass(kw_only=True)
class Part:
    """A part of a section, in this order: title, keys, note above, text, table, bars, plot, lines, note."""

    title: str = ""
    keys: Sequence[tuple[str, str]] = ()  # kinds of bars, and their meanings
    above: str = ""
    text: str = ""
    table: TableRows | None = None  # a header and rows; a row with one cell is text below the row before
    words: Collection[int] = (0,)  # columns of the table that are not numbers
    layout: str = ""  # a class of the page's style, for the table
    bars: Sequence[Bar] = ()
    plot: Plot | None = None
    lines: Sequence[tuple[str, str]] = ()
    note: str = ""

    @property
    def holds(self) -> bool:
        """True if there is more than notes."""
        return bool(self.text or self.table or self.bars or self.plot or self.lines)

    @property
    def shown(self) -> bool:
        """True if there is anything to show. A note without a title is enough."""
        return self.holds or not self.title


@dataclass(kw_only=True)
class Section:
    """Everything about one part of a run. Texts may be untrusted: the renderer makes them safe to show."""

    title: str = ""  # of its section on the page; without a title it has none there
    lines: list[tuple[str, str]] = field(default_factory=list)  # name and text, for the terminal and the page
    terminal: list[tuple[str, str]] = field(default_factory=list)  # the same, for the terminal alone
    tiles: list[tuple[str, str]] = field(default_factory=list)  # name and value, at the top of the page
    alarms: Sequence[str] = ()  # what a reader must not miss
    charts: list[Part] = field(default_factory=list)  # parts that stand beside one another
    parts: list[Part] = field(default_factory=list)
    folded: bool = False  # closed on the page until a reader opens it
    first: bool = False  # before the figures of a run, behind its verdict
    metrics: list[tuple[str, str, Samples]] = field(default_factory=list)  # name, help text, samples of gauges
    summary: dict[str, Any] = field(default_factory=dict)  # keys of the last line on stdout

    @property
    def shown(self) -> bool:
        """True if the page has it."""
        return bool(self.title and (self.lines or self.alarms or any(each.holds for each in self.charts + self.parts)))

    def metric(self, name: str, text: str, value: float | Mapping[str, float], label: str = "") -> None:
        """Add a gauge: a value, or with a `label` one for each of its values."""
        samples = (
            [({label: each}, own) for each, own in value.items()] if isinstance(value, Mapping) else [({}, value)]
        )
        self.metrics.append((name, text, samples))


def settings_section(settings: Mapping[str, Any]) -> Section:
    """Return a section with the given settings."""
    return Section(
        title="Settings",
        lines=[
            (name, ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value))
            for name, value in settings.items()
            if value not in (None, [], (), False, "")
        ],
    )


# The look of tables and sections in the terminal, on a page and as metrics. They show text only, never markup: names
# come from users' files.


#: A header, and the rows below it.
TableRows = list[list[str]]


class Cell(str):
    """A text of a table that looks different on the page: `kind` is a class of its style, and `images` stand below
    it."""

    def __new__(cls, text: str, kind: str, images: tuple[Thumbnail, ...] = ()) -> Cell:
        cell = super().__new__(cls, text)
        cell.kind, cell.images = kind, images
        return cell

    kind: str
    images: tuple[Thumbnail, ...]


WIDTH = 80  # columns of the tables of results, however wide the terminal is


def stderr_console(width: int | None = None) -> Console:
    """Return the console for tables, of this `width` or that of a narrower terminal; without, lines are not
    wrapped."""
    file: Any = log.AboveLive()
    found = Console(file=file, highlight=False, markup=False, soft_wrap=width is None)
    if width is not None:
        found.width = min(width, found.width) if found.is_terminal else width
    return found


def pairs_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and texts, which may be untrusted."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", min_width=10)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(Text(visible(name, line=True)), Text(visible(text)))
    return table


def numbers_table(
    rows: TableRows, *, words: Collection[int] = (0,), caption: str | None = None, gap: int = 2
) -> Table:
    """Return a header and rows, which may be untrusted, with `gap` spaces between columns: those are aligned to the
    right, except `words`."""
    table = Table(
        box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim", caption=caption, caption_justify="left"
    )
    for at, name in enumerate(rows[0]):
        kind = getattr(rows[-1][at], "kind", "") if at < len(rows[-1]) else ""
        whole = at in words and kind not in ("prose", "name")  # its texts are as short as possible
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
# No character that could move the cursor, reorder the line or hide reaches the terminal or a page.


_PREVIEW = 240  # characters


def visible(text: str, *, line: bool = False) -> str:
    """Return `text` with control, escape, direction and other invisible characters spelled out.

    Newlines and tabs stay, unless the result must be one `line`. The joiners that scripts and emoji need stay too.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _spelled(char, line) for char in text)


def quoted_token(text: str) -> str:
    """Return a token's text, which is untrusted, in one line: `` ` The` ``."""
    return f"`{visible(text, line=True)}`"


def preview(text: str) -> str:
    """Return the beginning of `text` in one line."""
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


# Numbers as tables, charts and pages show them; durations in words are in `prefillcli.runtime.clock`.


_BAR = 40  # characters of the longest bar
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def three_digits(value: float) -> str:
    """Return three digits, but all those before the point: `0.0123`, `12.3`, `12,345`."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def abbreviated(number: float) -> str:
    """Return a count in short: `1,234`, `12.3k`, `1.23M`."""
    for size, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if number >= size:
            return f"{number / unit:.3g}{letter}"
    return f"{number:,.0f}"


def row_name(row: int | None, own: str | None) -> str:
    """Return the name of a row in a table: its id, else its number."""
    return own if own is not None else "" if row is None else f"row {row:,}"


def mebibytes(size: float) -> str:
    """Return the bytes in MiB, without the unit: `1,234`."""
    return f"{size / 2**20:,.0f}"


def byte_size(size: float) -> str:
    """Return bytes as people read them: `1.5 GiB`, `300 MiB`."""
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{mebibytes(size)} MiB"


def minutes_and_seconds(seconds: float) -> str:
    """Return seconds as people read them: `120 ms`, `12.3 s`, `4 min 05 s`, `2 h 07 min`."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 90:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def price(value: float) -> str:
    """Return a price in the currency of --price-per-hour: `12.34`, `0.0012`."""
    return f"{value:,.2f}" if value >= 1 else f"{value:.2g}"


def percent(share: float) -> str:
    """Return a share from 0 to 1 in percent: `12.3 %`, `0.012 %`."""
    return f"{100 * share:.3g} %"


def percent_interval(bounds: tuple[float, float]) -> str:
    """Return bounds from 0 to 1 in percent: `1.2-3.4 %`, `0.0003-0.06 %`."""
    low, high = (100 * bound for bound in bounds)
    return f"{low:.{_decimals(low)}f}-{high:.{_decimals(high)}f} %"


def _decimals(percent: float) -> int:
    # One, or more where that would show 0.0.
    return max(1, -math.floor(math.log10(percent))) if percent > 0 else 1


def percent_or_nothing(value: float | None) -> str:
    """Return `12.3%`; nothing where the value is not known."""
    return "" if value is None else f"{value:.1%}"


def bar(value: float, most: float, width: int = _BAR) -> str:
    """Return a bar of up to `width` characters, in eighths of one; anything above zero is visible."""
    eighths = round(8 * width * value / most) if most else 0
    eighths = max(eighths, 1 if value > 0 else 0)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def signed_bar(value: float, most: float, side: int) -> str:
    """Return a bar of up to `side` characters to the left or the right of a line."""
    length = min(round(side * abs(value) / most), side) if most and math.isfinite(value) else 0
    left, right = ("█" * length, "") if value < 0 else ("", "█" * length)
    return f"{left:>{side}}│{right:<{side}}"


# Sections in the terminal, on a page, and as metrics.


def print_section(console: Console, section: Section, *, wide: bool | None = None) -> None:
    """Print a section as text: title, lines, then its parts, and its warnings.

    `wide`: lines of text are not wrapped, whatever the console does by default.
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
    """Return a page that begins with the `head`, and with the tiles of all sections; texts in it are escaped.

    It needs nothing else: no network, no script, inline CSS for light and dark screens. `title` is the window's.
    `verdict` is the outcome, and a class of the page's style. `values` are for a `template` that extends the page.
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
    # The templates in this folder; compiling one takes longer than rendering most pages.
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
    """Return the gauges of all sections in Prometheus' text format, for the textfile collector of node_exporter.

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
    """Return the path of the page of a JSON file, beside it: `run.json` -> `run.html`."""
    return path.removesuffix(".json") + ".html"

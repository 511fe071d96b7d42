"""Charts for pages: what to draw where, in percent of a plot's width and height.

The shapes are stretched to the width of the screen and the texts beside them are not, so one chart reads on a laptop
and on a phone. The templates draw them; nothing here knows HTML."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from prefillcli.data.output.counts import LENGTH_EDGES
from prefillcli.report.rendering import TableRows, abbreviated

if TYPE_CHECKING:
    from prefillcli.report.run import Histogram, MemoryTrace


SERIES = 8
"""Colours that can be told apart; if there are more series, the rest are drawn as one."""
OTHERS = "others"
_MOST_BINS = 64
_FEWEST_BINS = 12
_LEAST_HEIGHT = 0.8  # percent; one row among a million is still seen
_LEAST_GAP = 8.0  # percent between two ticks, for a phone
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Tick:
    """A text at `at` percent of an axis."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Box:
    """A bar of a plot; `y` is its upper edge, from the top."""

    x: float
    y: float
    width: float
    height: float
    series: int
    title: str


@dataclass(frozen=True, slots=True)
class Plot:
    """Boxes or lines over an axis. The height is that of `top`, the highest tick of `y`."""

    x: list[Tick]
    y: list[Tick]
    series: list[tuple[str, str]]
    """Name and size of each."""
    boxes: list[Box] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """Points as SVG wants them."""
    first_line: int = 0
    """The series of the first line; boxes have those before it."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of a list; `kind` is a class of the page's style."""

    name: str
    length: float  # percent
    text: str
    kind: str = "s0"


def score_plot(histogram: Histogram) -> Plot:
    """Stacked by prediction, the one with the highest scores first."""
    middle = {name: _mean_bin(bins) for name, bins in histogram.counts.items()}
    stacks = _merged({name: histogram.counts[name] for name in sorted(middle, key=lambda name: (-middle[name], name))})
    edges = histogram.edges
    titles = [f"{low:.2f} to {high:.2f}" for low, high in pairwise(edges)]
    ticks = [Tick(100 * at, f"{at:g}") for at in (0.0, 0.25, 0.5, 0.75, 1.0)]
    return _stacked(stacks, titles, ticks)


def length_plot(histogram: Histogram) -> Plot:
    """Stacked by what became of the rows; bins have the same width on a logarithmic scale."""
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
    """Lines of the memory in use; None unless there are two points in time."""
    if len(trace.seconds) < 2 or trace.seconds[-1] <= trace.seconds[0]:
        return None
    named = [("host", trace.host), ("device", trace.device)]
    lines = [(name, values) for name, values in named if any(values)]
    if not lines:
        return None
    end = trace.seconds[-1]
    unit, size = _unit(max(max(values) for _, values in lines))
    y = round_ticks(max(max(values) for _, values in lines) / size)
    top = y[-1] * size
    return Plot(
        x=[Tick(100 * at / end, f"{at:g} s") for at in round_ticks(end) if at <= end],
        y=[Tick(100 * at * size / top, f"{at:g} {unit}") for at in y],
        series=[(name, f"{max(values) / size:,.1f} {unit}") for name, values in lines],
        lines=[
            " ".join(
                f"{100 * at / end:.2f},{100 - 100 * value / top:.2f}"
                for at, value in zip(trace.seconds, values, strict=True)
            )
            for _, values in lines
        ],
    )


def bars(values: Mapping[str, float], texts: Mapping[str, str], kinds: Mapping[str, str] | None = None) -> list[Bar]:
    """Bars as long as the values ask for, the longest in full."""
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
    """The largest series in their order, the rest as one."""
    if len(stacks) <= SERIES:
        return stacks
    large = sorted(stacks, key=lambda name: -sum(stacks[name]))[: SERIES - 1]
    rest = [bins for name, bins in stacks.items() if name not in large]
    return {name: bins for name, bins in stacks.items() if name in large} | {
        OTHERS: [sum(column) for column in zip(*rest, strict=True)]
    }


def _coarser(histogram: Histogram) -> tuple[list[float], dict[str, list[int]]]:
    """As many bins as can be seen: many are joined, a few get empty ones on both sides."""
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
    """0 and up to five round numbers more; the last is at or above `top`."""
    raw = top / 4
    size = 10 ** math.floor(math.log10(raw))
    step = next(step * size for step in _STEPS if step * size >= raw * 0.999)
    if whole:
        step = max(1.0, math.ceil(step))
    return [round(at * step, 10) for at in range(math.ceil(top / step - 1e-9) + 1)]


def _round_numbers(edges: Sequence[float]) -> list[float]:
    """At most six round numbers within the edges; of a range without two of them its ends."""
    tens = [10.0**power for power in range(9)]
    for steps in ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 5), (1, 3), (1,)):
        found = [step * ten for ten in tens for step in steps if edges[0] <= step * ten <= edges[-1]]
        if 2 <= len(found) <= 6:
            return found
    return [edges[0], edges[-1]]


def _place(number: float, edges: Sequence[float]) -> float:
    """Where a number lies among the edges: 1.5 is in the middle of the second bin."""
    at = min(bisect_right(edges, number), len(edges) - 1) - 1
    return at + (number - edges[at]) / (edges[at + 1] - edges[at])


def _unit(size: float) -> tuple[str, int]:
    return ("GiB", 2**30) if size >= 2 * 2**30 else ("MiB", 2**20)


# Charts of lines and dots for the page of a profile, in SVG units.


WIDTH, HEIGHT = 480.0, 260.0
LEFT, RIGHT, TOP, BOTTOM = 56.0, WIDTH - 20.0, 18.0, HEIGHT - 42.0
"""The plot in its chart; the ticks' texts stand around it."""


@dataclass(frozen=True, slots=True)
class Axis:
    """From 0 to `top`; ticks count in `unit`."""

    name: str
    top: float
    unit: float = 1.0

    def at(self, value: float) -> float:
        """Where a value is, 0 to 1."""
        return value / self.top

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Round numbers, where they are and their texts."""
        return [(self.at(number * self.unit), f"{number:,g}") for number in ticks(self.top / self.unit)]


@dataclass(slots=True)
class Chart:
    """Lines and dots over two axes. `series` are names with the number of a colour."""

    x_axis: Axis
    y_axis: Axis
    lines: list[tuple[int, str]] = field(default_factory=list)
    dots: list[tuple[int, float, float, bool, str]] = field(default_factory=list)  # colour, x, y, hollow, title
    series: list[tuple[int, str]] = field(default_factory=list)

    def x(self, value: float) -> float:
        return round(LEFT + self.x_axis.at(value) * (RIGHT - LEFT), 1)

    def y(self, value: float) -> float:
        return round(BOTTOM - self.y_axis.at(value) * (BOTTOM - TOP), 1)

    def line(self, colour: int, points: Iterable[tuple[float, float]]) -> None:
        """Through `points`, in the values' own units."""
        self.lines.append((colour, " ".join(f"{self.x(x)},{self.y(y)}" for x, y in points)))

    def dot(self, colour: int, x: float, y: float, *, hollow: bool = False, title: str) -> None:
        self.dots.append((colour, self.x(x), self.y(y), hollow, title))

    @property
    def x_ticks(self) -> list[tuple[float, str]]:
        return [(round(LEFT + at * (RIGHT - LEFT), 1), text) for at, text in self.x_axis.ticks]

    @property
    def y_ticks(self) -> list[tuple[float, str]]:
        return [(round(BOTTOM - at * (BOTTOM - TOP), 1), text) for at, text in self.y_axis.ticks]


def ticks(top: float) -> list[float]:
    """0 and up to five round numbers more, none above `top`."""
    return [each for each in round_ticks(top) if each <= top * (1 + 1e-9)]


Samples = list[tuple[dict[str, str], float]]


@dataclass(kw_only=True)
class Part:
    """A part of a section on the page, in this order: title, note above, table, bars, plot or text, note below.

    Without any of the four it is left out, but for a note without a title.
    """

    title: str = ""
    above: str = ""
    table: TableRows | None = None
    """A header and rows; a row with one cell is text below the row before."""
    bars: Sequence[Bar] = ()
    plot: Plot | None = None
    text: str = ""
    note: str = ""

    @property
    def shown(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.table or self.bars or self.plot or self.text or not self.title)


@dataclass(kw_only=True)
class Section:
    """All that is said of a part of a run. Texts may be untrusted: who renders them makes them safe to show."""

    title: str = ""
    """Of its section on the page; without one it has none there."""
    lines: list[tuple[str, str]] = field(default_factory=list)
    """Name and text, for the terminal and the page."""
    tiles: list[tuple[str, str]] = field(default_factory=list)
    """Name and value, at the top of the page."""
    charts: list[Part] = field(default_factory=list)
    """Parts that stand beside one another."""
    parts: list[Part] = field(default_factory=list)
    metrics: list[tuple[str, str, Samples]] = field(default_factory=list)
    """Name, help text and samples of Prometheus' gauges."""
    summary: dict[str, Any] = field(default_factory=dict)
    """Keys of the last line on stdout."""

    def metric(self, name: str, text: str, value: float | Mapping[str, float], label: str = "") -> None:
        """Add a gauge: a value, or with a `label` one for each of its values."""
        samples = (
            [({label: each}, own) for each, own in value.items()] if isinstance(value, Mapping) else [({}, value)]
        )
        self.metrics.append((name, text, samples))

"""Charts of lines and dots for the page of a profile, in SVG units."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

WIDTH, HEIGHT = 480.0, 260.0
LEFT, RIGHT, TOP, BOTTOM = 56.0, WIDTH - 20.0, 18.0, HEIGHT - 42.0
"""The plot in its chart; the ticks' texts stand around it."""
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_MOST_TICKS = 6


@dataclass(frozen=True, slots=True)
class Axis:
    """From 0 to `top`, or logarithmic from `low` to `top`; ticks count in `unit`."""

    name: str
    top: float
    unit: float = 1.0
    low: float | None = None

    def at(self, value: float) -> float:
        """Where a value is, 0 to 1."""
        if self.low is None:
            return value / self.top
        return math.log(max(value, self.low) / self.low) / math.log(self.top / self.low)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Round numbers, where they are and their texts."""
        top = self.top / self.unit
        numbers = ticks(top) if self.low is None else log_ticks(self.low / self.unit, top)
        return [(self.at(number * self.unit), f"{number:,g}") for number in numbers]


@dataclass(slots=True)
class Chart:
    """Lines, dots and upright marks over two axes. `series` are names with the number of a colour."""

    x_axis: Axis
    y_axis: Axis
    lines: list[tuple[int, str]] = field(default_factory=list)
    dots: list[tuple[int, float, float, bool, str]] = field(default_factory=list)  # colour, x, y, hollow, title
    marks: list[tuple[int, float]] = field(default_factory=list)  # colour, x
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

    def mark(self, colour: int, x: float) -> None:
        """An upright line."""
        self.marks.append((colour, self.x(x)))

    @property
    def x_ticks(self) -> list[tuple[float, str]]:
        return [(round(LEFT + at * (RIGHT - LEFT), 1), text) for at, text in self.x_axis.ticks]

    @property
    def y_ticks(self) -> list[tuple[float, str]]:
        return [(round(BOTTOM - at * (BOTTOM - TOP), 1), text) for at, text in self.y_axis.ticks]


def ticks(top: float) -> list[float]:
    """0 and up to five round numbers more, none above `top`."""
    raw = top / 4
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(step * size for step in _STEPS if step * size >= raw * 0.999)
    return [round(at * step, 10) for at in range(int(top / step + 1e-9) + 1)]


def log_ticks(low: float, top: float) -> list[float]:
    """At most six of 1, 2 and 5 times powers of ten from `low` to `top`."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(top)) + 1)
    found: list[float] = []
    for steps in ((1, 2, 5), (1, 3), (1,)):
        found = [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= top]
        if len(found) <= _MOST_TICKS:
            break
    return found[:: math.ceil(len(found) / _MOST_TICKS) or 1]

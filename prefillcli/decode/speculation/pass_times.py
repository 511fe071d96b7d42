"""How long passes take on this machine: plain ones, by rows, and ones with guesses in proportion to them."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass
from statistics import median

FEWEST_ROWS = 0.7
"""The time of so large a share of the rows, and more, is inferred from that of more rows."""
HOPE = 0.1
"""What a guess for each row costs where nothing is known, in plain passes: that of a machine that waits for memory."""
HOPE_WEIGHT = 0.2
DEAREST = 1.5
"""More than so many plain passes for a guess of each row is a disturbance of the machine."""
HALF_LIFE = 400
"""A measurement counts half after so many passes: machines and texts change."""


@dataclass(slots=True)
class _Measured:
    """Passes with about as many guesses for each row: how many passes count, their mean guesses and ratio."""

    weight: float = 0.0
    guesses: float = 0.0
    ratio: float = 0.0
    at: int = 0

    def add(self, guesses: float, ratio: float, at: int) -> None:
        more = min(1.0, guesses**2)  # what a guess takes is hidden in a pass with few of them
        self.weight = min(self.now(at), 9.0) + more
        self.guesses += (guesses - self.guesses) * more / self.weight
        self.ratio += (ratio - self.ratio) * more / self.weight
        self.at = at

    def now(self, at: int) -> float:
        """The weight after the passes since."""
        return self.weight * math.exp2((self.at - at) / HALF_LIFE)


class PassTimes:
    """Measured seconds. Ratios of passes with guesses to plain ones are remembered from one group of rows to the next;
    seconds of plain passes are not, since they depend on the prompts."""

    def __init__(self) -> None:
        self.passes = 0
        self._fixed: float | None = None  # the part of a pass that rows share, in rows
        self._plain: dict[int, deque[float]] = {}
        self._ratios: defaultdict[int, dict[int, _Measured]] = defaultdict(dict)

    def begin(self) -> None:
        """Another group of rows."""
        self._learn_parts()
        self._plain = {}

    def add_plain(self, rows: int, seconds: float) -> None:
        """A pass without guesses."""
        self.passes += 1
        self._plain.setdefault(rows, deque(maxlen=5)).append(seconds)

    def add_guessed(self, rows: int, guesses: int, ratio: float) -> None:
        """A pass with so many guesses for all rows, which took `ratio` times a plain pass."""
        self.passes += 1
        each = guesses / rows
        measured = self._ratios[_step(rows)].setdefault(_half_step(each), _Measured())
        measured.add(each, min(ratio, 1 + DEAREST * each), self.passes)

    def plain(self, rows: int) -> float | None:
        """Seconds of a pass of so many rows without guesses. None: not known.

        It is not overestimated for fewer rows than were measured: it may be proportional to them.
        """
        if rows in self._plain:
            return median(self._plain[rows])
        more = min((other for other in self._plain if other > rows), default=None)
        if more is None or rows < FEWEST_ROWS * more:
            return None
        return median(self._plain[more]) * rows / more

    def slowest(self) -> float:
        """Seconds of the slowest plain pass of this group: about what a model takes for all of its rows."""
        return max(map(median, self._plain.values()), default=0.0)

    def parts(self) -> tuple[float, float]:
        """Seconds of a plain pass that all rows share, and seconds for each row.

        Until passes with fewer rows have been seen, in this group or before, each is taken for half of the time.
        """
        if not self._plain:
            return 0.0, 0.0
        self._learn_parts()
        rows = max(self._plain)
        each = median(self._plain[rows]) / (rows + (rows if self._fixed is None else self._fixed))
        return median(self._plain[rows]) - each * rows, each

    def _learn_parts(self) -> None:
        """From passes of the most and the fewest rows."""
        fewest, most = min(self._plain, default=0), max(self._plain, default=0)
        if most < 1.5 * fewest or most - fewest < 1:
            return
        shortest, longest = median(self._plain[fewest]), median(self._plain[most])
        each = max((longest - shortest) / (most - fewest), longest / (100 * most))
        self._fixed = max(0.0, longest / each - most)

    def ratio(self, rows: int, guesses: float) -> tuple[float, float]:
        """Time of a pass with so many guesses for each row over that of a plain pass: as expected, and at worst.

        At worst a guess costs what a token does in a plain pass, where that many were not measured.
        """
        hoped, worst = 1 + HOPE * guesses, 1 + guesses
        near = self._ratios.get(_step(rows))
        points = sorted((near or {}).values(), key=lambda each: each.guesses)
        if not points:
            return hoped, worst
        below, ratio, weight = 0.0, 1.0, math.inf
        for point in points:
            if point.guesses >= guesses:
                share = (guesses - below) / (point.guesses - below)
                measured = ratio + share * (point.ratio - ratio)
                worst = max(measured, ratio)
                weight = point.now(self.passes)
                break
            below, ratio, weight = point.guesses, point.ratio, point.now(self.passes)
        else:
            slope = max(0.0, (ratio - 1) / below)
            measured = ratio + slope * (guesses - below)
            worst = ratio + max(slope, 1.0) * (guesses - below)
        return (weight * measured + HOPE_WEIGHT * hoped) / (weight + HOPE_WEIGHT), worst


def _step(rows: int) -> int:
    return round(math.log2(rows))


def _half_step(guesses: float) -> int:
    return round(2 * math.log2(guesses))

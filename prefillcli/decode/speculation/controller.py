"""`auto`: which drafter guesses how many tokens, or none, by what passes take on this machine and what was right.

A pass with guesses pays where it takes less time than plain passes for the tokens that it writes. That is measured
while texts are written. Guesses that take no pass of a model are first compared with plain text. What is not measured
is tried only on credit: time that speculation has saved, and `SHARE` of the time of plain decoding. So it is never
slower than that by more than 5 %, as far as passes repeat. A clock decides about speed here, never about text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prefillcli.decode.speculation.guess_record import GuessRecord
from prefillcli.decode.speculation.pass_times import PassTimes
from prefillcli.decode.speculation.registry import DrafterKind

SHARE = 0.03
"""Of the time of plain decoding, what trials may lose."""
WATCHING = 0.01
"""Of that time, what may go to guesses that are only compared."""
RESERVE = 0.015
"""Of that time, what a trial may lose beyond its credit if, against what is expected, none of its guesses is right."""
MARGIN = 1.03
"""Guessing has to be faster than this."""
PLAIN_EVERY = 32
"""One of so many passes is plain all the same, to know what it takes now."""
HOPED_COST, WORST_COST = 0.2, 1.0
HOPED_BEGINNING, WORST_BEGINNING = 1.0, 4.0
"""What a drafter that is a model takes before that was measured: for a token, and to begin, in plain passes."""
HOPED_RIGHT = 0.7
SURE_ROUNDS = 20
"""After so many rounds, half of what was right is expected even in a trial."""


class Choice(NamedTuple):
    """A drafter and how many tokens it guesses, for so large a share of the rows."""

    name: str
    tokens: int
    share: float = 1.0


PLAIN = Choice("", 0)
"""Nothing is guessed."""


@dataclass(slots=True)
class Controller:
    """What is known of drafters and passes while a job goes on, and its account, in seconds of `clock`."""

    clock: Callable[[], float] = time.perf_counter
    times: PassTimes = field(default_factory=PassTimes)
    records: dict[str, GuessRecord] = field(default_factory=dict)
    earlier: float = 0.0
    """What plain decoding would have taken for earlier groups of rows, and"""
    earlier_saved: float = 0.0
    """how much less they took; negative: more."""
    plain_seconds: float = 0.0
    """The same for this group, so far,"""
    spent: float = 0.0
    """and what it took."""
    watching: float = 0.0
    """What comparing guesses took, in all; it is also in `spent`."""
    beginnings: dict[str, float] = field(default_factory=dict)
    """What drafters took to begin, in slowest plain passes."""

    def begin(self) -> None:
        """Another group of rows."""
        self.earlier += self.plain_seconds
        self.earlier_saved += self.plain_seconds - self.spent
        self.plain_seconds = self.spent = 0.0
        self.times.begin()
        for record in self.records.values():
            record.begin()

    def progress(self, slowest: int, written: int, plain: float | None) -> None:
        """Where passes have written so many tokens more, the slowest of the rows that go on has so many more, which is
        less where rows differ: plain decoding shares passes among rows that now wait for it.

        A pass without guesses took `plain` seconds; None: there were guesses.
        """
        shared, each = self.times.parts()
        if plain is None:
            self.plain_seconds += shared * slowest + each * written
        else:
            self.plain_seconds += plain + shared * max(0, slowest - 1)

    @property
    def all_plain(self) -> float:
        """What plain decoding would have taken so far, of all groups."""
        return self.earlier + self.plain_seconds

    @property
    def credit(self) -> float:
        """Seconds that a trial may lose."""
        return SHARE * self.all_plain + self.earlier_saved + self.plain_seconds - self.spent

    def record(self, kind: DrafterKind) -> GuessRecord:
        """Of a drafter."""
        return self.records.setdefault(kind.name, GuessRecord(0.0 if kind.free else HOPED_RIGHT))

    def choose(
        self, kinds: Sequence[DrafterKind], begun: Collection[str], rows: Sequence[int], most: int, left: int
    ) -> Choice:
        """What promises the shortest time and can be afforded, where `left` tokens of a row are to be written.

        `rows` are their numbers. `most` tokens may be guessed for one pass. Where all that promises something is too
        dear, it is for a share of the rows.
        """
        plain = self.times.plain(len(rows))
        if not plain:
            return PLAIN
        best = affordable = PLAIN
        gain = affordable_gain = MARGIN
        best_share = 0.0
        for kind in kinds:
            record = self.record(kind)
            begins, begins_worst = (0.0, 0.0) if kind.name in begun else self._beginning(kind, plain)
            cost, cost_worst = self._costs(kind, record, len(rows), plain)
            factor = self._factor(record, rows)
            for tokens, (proposed, right) in enumerate(record.expected(most), 1):
                ratio, worst = self.times.ratio(len(rows), proposed)
                right *= factor
                speedup = left / (left / (1 + right) * (ratio + cost * tokens) + begins)
                surely = right / 2 if record.rounds >= SURE_ROUNDS else 0.0
                loss = worst + cost_worst * tokens + begins_worst - 1 - surely
                if speedup > gain:
                    best, gain = Choice(kind.name, tokens), speedup
                    best_share = self._affordable(loss * plain, surely * plain)
                if speedup > affordable_gain and self._affordable(loss * plain, surely * plain) >= 1:
                    affordable, affordable_gain = Choice(kind.name, tokens), speedup
        if affordable.tokens or best.name not in begun or self.credit <= 0:
            return affordable
        return best._replace(share=best_share) if best_share * len(rows) >= 1 else PLAIN

    def _affordable(self, loss: float, hoped: float) -> float:
        """For how large a share of the rows a trial can be afforded, 1 at most. It may lose so many seconds, and those
        that it is hoped to save too, if it saves none: a text may end before its guesses."""
        reserve = self.credit + RESERVE * self.all_plain
        shares = [1.0] + [room / each for room, each in ((self.credit, loss), (reserve, loss + hoped)) if each > 0]
        return min(shares)

    def _factor(self, record: GuessRecord, rows: Sequence[int]) -> float:
        """How right guesses of these rows are, compared with usual ones: what passes share waits for the slowest."""
        factors = [record.row_factor(row) for row in rows]
        shared, each = self.times.parts()
        return (shared * min(factors) + each * sum(factors)) / (shared + each * len(rows))

    def _beginning(self, kind: DrafterKind, plain: float) -> tuple[float, float]:
        """What it takes to begin, in plain passes: as expected, and at worst."""
        scale = self.times.slowest() / plain
        known = self.beginnings.get(kind.name)
        return (HOPED_BEGINNING, WORST_BEGINNING * scale) if known is None else (known * scale, known * scale)

    def _costs(self, kind: DrafterKind, record: GuessRecord, rows: int, plain: float) -> tuple[float, float]:
        """What a token takes to guess for all rows, in plain passes: as expected, and at worst."""
        seconds = record.seconds(rows)
        if seconds is not None:
            return seconds / plain, seconds / plain
        return (0.0, 0.0) if kind.free else (HOPED_COST, WORST_COST * self.times.slowest() / plain)

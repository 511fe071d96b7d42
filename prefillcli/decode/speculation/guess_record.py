"""How a drafter has guessed so far: how many tokens it proposes, how many of them are right, and what that takes."""

from __future__ import annotations

MEMORY = 0.99
"""The weight of what was seen falls by this with each round of a row: the latest hundred count."""

ROW_MEMORY = 0.9
ROW_PRIOR = 2.0
"""Tokens that a row's guesses are taken to be as right as those of others, before its own count."""


class GuessRecord:
    """Chances by depth: that there is a guess of token j where one of token j - 1 is, and that it is right if those
    before it are. `hope` is the chance that counts, a little, before anything was seen.

    Guesses of some rows are better than those of others: `row_factor` has what a row's are to be multiplied by.
    """

    def __init__(self, hope: float) -> None:
        self._hope = hope
        self._asked: list[float] = []
        self._there: list[float] = []
        self._tried: list[float] = []
        self._right: list[float] = []
        self.rounds = 0
        self._seconds: float | None = None  # of guessing a token for `_rows` rows
        self._rows = 0
        self._of_rows: dict[
            int, tuple[float, float]
        ] = {}  # by row: tokens that were right, and that were expected to be

    def begin(self) -> None:
        """Another group of rows."""
        self._of_rows = {}

    def add(self, row: int, asked: int, proposed: int, right: int) -> None:
        """For a row, `proposed` of `asked` tokens, of which the first `right` were right."""
        self._add_to_row(row, asked, right)
        self.rounds += 1
        for counts in (self._asked, self._there, self._tried, self._right):
            counts += [0.0] * (asked - len(counts))
        for depth in range(min(asked, proposed + 1)):
            self._asked[depth] = MEMORY * self._asked[depth] + 1
            self._there[depth] = MEMORY * self._there[depth] + (depth < proposed)
        for depth in range(min(proposed, right + 1)):
            self._tried[depth] = MEMORY * self._tried[depth] + 1
            self._right[depth] = MEMORY * self._right[depth] + (depth < right)

    def _add_to_row(self, row: int, asked: int, right: int) -> None:
        were, expected = self._of_rows.get(row, (0.0, 0.0))
        usual = self.expected(asked)[-1][1]
        self._of_rows[row] = (ROW_MEMORY * were + right, ROW_MEMORY * expected + usual)

    def row_factor(self, row: int) -> float:
        """By how much more of a row's guesses are right than usual."""
        were, expected = self._of_rows.get(row, (0.0, 0.0))
        return (were + ROW_PRIOR) / (expected + ROW_PRIOR)

    def add_cost(self, rows: int, seconds: float) -> None:
        """Guessing a token for so many rows took so long."""
        if self._seconds is None or rows != self._rows:
            self._seconds, self._rows = self.seconds(rows) or seconds, rows
        self._seconds += 0.3 * (seconds - self._seconds)

    def seconds(self, rows: int) -> float | None:
        """What guessing a token for so many rows takes. None: not measured. It may be as long for fewer rows."""
        return None if self._seconds is None else self._seconds * max(1.0, rows / self._rows)

    def expected(self, most: int) -> list[tuple[float, float]]:
        """For 1 ... `most` tokens asked: how many are proposed and how many of them are right, on average."""
        proposed = right = 0.0
        there = correct = 1.0
        chance, exists = self._hope, 1.0 if self._hope else 0.0
        sums = []
        for depth in range(most):
            if depth < len(self._asked):  # what is said of the depth before is a prior of little weight
                exists = (self._there[depth] + exists) / (self._asked[depth] + 1)
                chance = (self._right[depth] + chance) / (self._tried[depth] + 1)
            there *= exists
            correct *= exists * chance
            proposed += there
            right += correct
            sums.append((proposed, right))
        return sums

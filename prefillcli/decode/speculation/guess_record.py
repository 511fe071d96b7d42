"""How a drafter has guessed so far: how many tokens it proposes, how many of them are right, and what that takes."""

from __future__ import annotations

MEMORY = 0.99
"""The weight of what was seen falls by this with each round of a row: the latest hundred count."""


class GuessRecord:
    """Chances by depth: that there is a guess of token j where one of token j - 1 is, and that it is right if those
    before it are. `hope` is the chance that counts, a little, before anything was seen.

    `cost` is the time of guessing a token for all rows, in plain passes; None: not measured.
    """

    def __init__(self, hope: float) -> None:
        self._hope = hope
        self._asked: list[float] = []
        self._there: list[float] = []
        self._tried: list[float] = []
        self._right: list[float] = []
        self.rounds = 0
        self.cost: float | None = None

    def add(self, asked: int, proposed: int, right: int) -> None:
        """One row: `proposed` of `asked` tokens, of which the first `right` were right."""
        self.rounds += 1
        for counts in (self._asked, self._there, self._tried, self._right):
            counts += [0.0] * (asked - len(counts))
        for depth in range(min(asked, proposed + 1)):
            self._asked[depth] = MEMORY * self._asked[depth] + 1
            self._there[depth] = MEMORY * self._there[depth] + (depth < proposed)
        for depth in range(min(proposed, right + 1)):
            self._tried[depth] = MEMORY * self._tried[depth] + 1
            self._right[depth] = MEMORY * self._right[depth] + (depth < right)

    def add_cost(self, passes: float) -> None:
        """Guessing a token for all rows took so many plain passes."""
        self.cost = passes if self.cost is None else 0.7 * self.cost + 0.3 * passes

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

"""Answers that may be accepted without a person: the lowest probability from which they are right often enough.

A *floor* accepts the answers whose own probability is at or above it. Labelled rows prove one if the answers that it
accepts are right at the wanted rate or more, by an exact bound of their errors (Clopper and Pearson, Biometrika 26,
1934): of a given number of accepted rows, the errors are binomial. This is selective classification with guaranteed
risk (Geifman and El-Yaniv, arXiv 1705.08500), but for the search:

The floors that are tested are fixed beforehand. They are tested from the strictest down until one fails, each with
the whole risk of 5 %: fixed-sequence testing (Angelopoulos et al., Learn then Test, arXiv 2110.01052, section 4.2). To
err, the first floor of the sequence that does not keep the promise has to pass, and that is one test; so many floors
cost no more than one.

Few rows lie at or above the strictest floors, and these would fail and end the sequence. So it starts at the strictest
floor with `rows_to_start`. That depends on numbers of rows, never on whether they are right. Let J be the first floor
that breaks the promise.

- If the sequence starts at J or a stricter floor, the test of J is the one that has to err. Whether it does so follows
  from the rows at or above J alone; given their number, their errors are binomial, and the test has its level.
- If it starts at a lower floor, that one has to err, and fewer rows than usual lie at or above the next stricter one.
  Given that, more of its rows have low probabilities. As long as answers are not less often right at higher
  probabilities, more errors are expected then than the binomial distribution says, so that it errs less often.

One of these happens, so the risk is at most 5 % in all. Where higher probabilities are less often right, it holds of
the probabilities that the labelled rows happen to have: given all of them, errors vary less than the binomial
distribution says (Hoeffding, Annals of Mathematical Statistics 27, 1956).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from prefillcli.stats.arrays import BoolArray, Float64Array, Int64Array
from prefillcli.stats.intervals import exact_upper

RISK: Final = 0.05  # that a floor does not keep its promise

# Strictest first. Models are often surer than they should be, so the floors are close together below 1. An answer
# below one half is by its own probability more likely wrong than right.
FLOORS: Final = (
    *(0.99999, 0.9999, 0.9998, 0.9995, 0.999, 0.998, 0.995),
    *(hundredths / 100 for hundredths in range(99, 49, -1)),
)
_MOST_ROWS: Final = 10_000_000  # that are told to be needed


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The answers that a floor accepts. Without a proven floor there is none, and a person looks at all."""

    floor: float | None
    rows: int  # labelled ones
    accepted: int = 0  # of these, answers at or above the floor
    errors: int = 0  # of these, wrong ones
    bound: float | None = None  # lower bound of the rate at which accepted answers are right
    needed: int | None = None  # without a floor: labelled rows that would probably prove one; None: no number would

    @property
    def share(self) -> float:
        """The share of the answers that is accepted."""
        return self.accepted / self.rows if self.rows else 0.0


def lowest_floor(probabilities: Float64Array, right: BoolArray, accuracy: float, risk: float = RISK) -> Acceptance:
    """Return the lowest of `FLOORS` proven to accept answers of which the share `accuracy` or more is right.

    `probabilities` [rows] are those of the given answers, `right` [rows] whether they are. The promise may be broken
    with the probability `risk`. Raises ValueError if the lengths differ, or for an accuracy that is not between 0 and
    1.
    """
    if len(probabilities) != len(right):
        raise ValueError(f"{len(probabilities)} probabilities for {len(right)} answers")
    if not 0 < accuracy < 1:
        raise ValueError(f"an accuracy is between 0 and 1, not {accuracy}")
    rows, found = len(right), Acceptance(None, len(right))
    tests = list(zip(FLOORS, _at_or_above(probabilities), _at_or_above(probabilities[~right]), strict=True))
    fewest = rows_to_start(rows, accuracy, risk)
    tests = [each for each in tests if each[1] >= fewest] or tests
    for floor, accepted, errors in tests:
        if accepted < fewest or (bound := 1 - exact_upper(errors, accepted, risk)) < accuracy:
            break
        found = Acceptance(floor, rows, accepted, errors, bound)
    if found.floor is not None:
        return found
    # As many of all rows as would prove a floor at the rate of errors that was seen there.
    needed = [
        math.ceil(own * rows / accepted)
        for _, accepted, errors in tests
        if accepted and (own := _fewest_rows(0, errors / accepted, accuracy, risk)) is not None and own > accepted
    ]
    return Acceptance(None, rows, needed=min(needed, default=None))


def lowest_floors(
    probabilities: Float64Array, right: BoolArray, answers: Int64Array, count: int, accuracy: float
) -> tuple[Acceptance, ...]:
    """Return the `lowest_floor` of each of `count` answers, `answers` [rows] being the number of the given one.

    The promise holds of the accepted rows of every answer, with a probability of 95 % of all together: the risk is
    split evenly (Bonferroni). Raises as `lowest_floor`.
    """
    return tuple(
        lowest_floor(probabilities[answers == each], right[answers == each], accuracy, RISK / count)
        for each in range(count)
    )


def doubtful(probabilities: Float64Array, floors: float | Sequence[float | None] | None) -> BoolArray:
    """Return which answers [rows] a person should look at: those whose probability is below the floor.

    `probabilities` are [rows, options], of which the likeliest is the answer; the floor is one for all, or one for
    each option. None accepts nothing.
    """
    each = floors if isinstance(floors, Sequence) else [floors] * probabilities.shape[1]
    limits = np.array([math.inf if floor is None else floor for floor in each], np.float64)
    answers = probabilities.argmax(axis=1)
    found: BoolArray = ~(probabilities.max(axis=1) >= limits[answers])
    return found


@lru_cache(maxsize=1024)
def rows_to_start(rows: int, accuracy: float, risk: float = RISK) -> int:
    """Return how many of the labelled rows a floor has to accept to be the first that is tested.

    One error of so many does not refute it yet: where none is allowed, good floors often fail too. Half of the rows
    are enough if they could prove it without an error, and fewer than a tenth are too few to begin with.
    """
    none, one = (_fewest_rows(errors, 0, accuracy, risk) or _MOST_ROWS for errors in (0, 1))
    return max(none, min(one, rows // 2), rows // 10)


def _at_or_above(probabilities: Float64Array) -> list[int]:
    # The number of rows at or above each floor.
    found: list[int] = (len(probabilities) - np.searchsorted(np.sort(probabilities), FLOORS, side="left")).tolist()
    return found


def _fewest_rows(errors: float, rate: float, accuracy: float, risk: float) -> int | None:
    # The fewest rows that prove an accuracy with so many errors, and further ones at a rate; None: no number does.
    def proves(rows: int) -> bool:
        return 1 - exact_upper(min(errors + rate * rows, rows), rows, risk) >= accuracy

    if rate >= 1 - accuracy:
        return None
    low, high = 0, 1
    while not proves(high):
        if high > _MOST_ROWS:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if proves(middle) else (middle, high)
    return high

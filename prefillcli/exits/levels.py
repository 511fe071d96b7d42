"""How low the thresholds may be: learn-then-test with exact bounds for each class of rows.

A *level* stands for all thresholds at once: the threshold of a label at an exit layer is the level times the spread of
what the probe there is off by. So a lower level lets more rows leave at every layer.

A class are the rows that the model, read in full, answers with one label. Its flip rate at a level is the share of its
rows that some exit layer sends away with another label. The levels are tested by fixed-sequence testing (Angelopoulos
et al., Learn then Test, 2021, arXiv 2110.01052, section 4.2): from the safest one down, each by an exact binomial
bound of the flip rate (Clopper and Pearson, Biometrika 26, 1934), until one fails. The order is fixed before the
judged rows are looked at. So the probability that the last level that passes has a higher flip rate than allowed is at
most 1 - confidence, however many levels are tried: to err, the first level that is too low must pass, and that is one
test.

Each class has a sequence of its own, with its own rows. A label leaves at the largest of the levels of the *other*
classes: these are the rows that its exits can flip. That is valid for each class, because its flips only become fewer
- as the level of any label rises: fewer rows are sent away at any layer;
- as exit layers are dropped;
- as rows leave earlier with the right label. They count as flips here, if a later layer would have sent them away with
  a wrong one, and then cannot flip.
For the same reasons the test of a class does not depend on the levels of the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from prefillcli.exits.layer_readings import Float64Array
from prefillcli.stats.audit import flip_bound, rows_for

LEVELS: Final = tuple(float(level) for level in np.geomspace(64, 0.02, 405))
"""In the order in which they are tested: each is 2 % lower than the one before."""


class Level(NamedTuple):
    """The last level that passed for a class, infinity if none did, with the flips there of how many rows.

    `bound` is the upper bound of the flip rate there; `passed` levels have.
    """

    level: float
    flips: int
    rows: int
    bound: float
    passed: int


def endangered(levels: Float64Array, wrong: npt.NDArray[np.bool_]) -> Float64Array:
    """The level [rows] at and below which some exit sends a row away with a wrong label; -infinity: none ever does.

    `levels` [exits, rows] are those at and below which the rows leave.
    """
    if not len(levels):
        return np.full(levels.shape[1], -math.inf)
    found: Float64Array = np.where(wrong, levels, -math.inf).max(axis=0)
    return found


def lowest_level(danger: Float64Array, max_flips: float, confidence: float) -> Level:
    """Test all levels with the rows of a class, which are `endangered` at and below `danger` [rows]."""
    rows, most = len(danger), most_flips(len(danger), max_flips, confidence)
    flips = rows - np.searchsorted(np.sort(danger), LEVELS, side="left")  # at each level; never fewer at the next
    passed = int(np.searchsorted(flips, most, side="right"))
    if not passed:
        return Level(math.inf, 0, rows, flip_bound(0, rows, confidence), 0)
    last = int(flips[passed - 1])
    return Level(LEVELS[passed - 1], last, rows, flip_bound(last, rows, confidence), passed)


@lru_cache(maxsize=1024)
def most_flips(rows: int, max_flips: float, confidence: float) -> int:
    """How many flips of the rows still prove a flip rate of at most `max_flips`; -1 if none do."""
    flips = -1
    while flips + 1 < rows and flip_bound(flips + 1, rows, confidence) <= max_flips:
        flips += 1
    return flips


def levels_of_labels(by_class: Sequence[Level]) -> tuple[float, ...]:
    """At which level each label leaves: the largest of the other classes'."""
    return tuple(
        max(each.level for other, each in enumerate(by_class) if other != label) for label in range(len(by_class))
    )


def judge_classes(
    levels: Float64Array,
    wrong: npt.NDArray[np.bool_],
    truth: npt.NDArray[np.int64],
    labels: int,
    max_flips: float,
    confidence: float,
) -> tuple[Level, ...]:
    """The lowest level of each of the `labels` classes. `levels` and `wrong` are [exits, rows], `truth` [rows] is what
    the full read says."""
    danger = endangered(levels, wrong)
    return tuple(lowest_level(danger[truth == each], max_flips, confidence) for each in range(labels))


def short_of_rows(label: str, rows: int, total: int, max_flips: float, confidence: float) -> str | None:
    """What to say of a class with too few judged rows to prove anything; None if there are enough.

    `rows` of the `total` judged ones are of the class, and as many rows again only fit.
    """
    needed = rows_for(max_flips, confidence=confidence)
    if rows >= needed:
        return None
    said = f"the full read answers {rows:,} of {total:,} judged rows with {label!r}"
    most = f"it takes {needed:,} without a flip to prove at most {max_flips:.2%}"
    if not rows:
        return f"{said}, and {most}"
    return f"{said}, and {most}: about {2 * math.ceil(total * needed / rows):,} calibration rows in all"

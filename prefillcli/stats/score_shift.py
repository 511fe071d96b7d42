"""How far two distributions of scores are apart, from their histograms."""

from __future__ import annotations

import math
from collections.abc import Sequence

_CRITICAL = 1.358
"""The 95 % point of Kolmogorov's distribution."""


def score_distance(counts: Sequence[int], others: Sequence[int]) -> float | None:
    """The two-sample Kolmogorov-Smirnov statistic of binned scores, from 0 to 1.

    That is the largest difference between the two shares of scores below any edge of the bins, which are the same.
    None where a histogram is empty.
    """
    rows, other_rows = sum(counts), sum(others)
    if not rows or not other_rows:
        return None
    largest, below, others_below = 0.0, 0, 0
    for count, other in zip(counts, others, strict=True):
        below, others_below = below + count, others_below + other
        largest = max(largest, abs(below / rows - others_below / other_rows))
    return largest


def chance_distance(rows: int, other_rows: int) -> float:
    """The distance that two samples of one distribution stay below 19 times out of 20, by Kolmogorov's limit.

    Both need many rows; for scores in bins it is an upper bound.
    """
    return min(_CRITICAL * math.sqrt((rows + other_rows) / (rows * other_rows)), 1.0)

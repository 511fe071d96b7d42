"""Rows scored both cheaply and in full: how often compression or an early exit flips an answer, and how certain that
is. All probabilities and rates are shares (0 to 1)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from prefillcli.stats.evaluation import auc
from prefillcli.stats.intervals import exact_interval, exact_upper


class Audit(BaseModel):
    """The figures of the audited rows. None is a number that they do not give."""

    model_config = ConfigDict(frozen=True)

    rows: int = 0
    flips: int = 0  # rows whose answer differs
    flip_rate: float | None = None
    interval: tuple[float, float] | None = None  # of the flip rate, two-sided
    confidence: float = 0.95
    mean_difference: float | None = None  # of the scores, absolute
    max_difference: float | None = None
    auc_compressed: float | None = None
    auc_full: float | None = None
    truth_rows: int = 0  # rows with a known right answer


def audit_of(
    pairs: Sequence[tuple[float, float, bool | None]],
    flipped: Sequence[bool] | None = None,
    *,
    confidence: float = 0.95,
) -> Audit:
    """Return the audit of rows, each (compressed score, full score, whether the positive label is right or None if
    unknown).

    `flipped` marks the rows that flip. Without it, a row flips if its scores lie on different sides of 0.5, as for two
    labels. Raises ValueError if `flipped` and `pairs` differ in length.
    """
    if flipped is None:
        flipped = [(compressed >= 0.5) != (full >= 0.5) for compressed, full, _ in pairs]
    elif len(flipped) != len(pairs):
        raise ValueError(f"{len(flipped)} flips for {len(pairs)} rows")
    if not pairs:
        return Audit(confidence=confidence)
    rows, flips = len(pairs), sum(map(bool, flipped))
    differences = [abs(compressed - full) for compressed, full, _ in pairs]
    known = [(compressed, full, truth) for compressed, full, truth in pairs if truth is not None]
    truths = [truth for _, _, truth in known]
    return Audit(
        rows=rows,
        flips=flips,
        flip_rate=flips / rows,
        interval=exact_interval(flips, rows, confidence),
        confidence=confidence,
        mean_difference=math.fsum(differences) / rows,
        max_difference=max(differences),
        auc_compressed=auc([compressed for compressed, _, _ in known], truths),
        auc_full=auc([full for _, full, _ in known], truths),
        truth_rows=len(known),
    )


@lru_cache(maxsize=1 << 14)  # learning exits asks for the same ones for each kind of probe and goal
def flip_bound(flips: int, rows: int, confidence: float = 0.95, of: float | None = None) -> float:
    """Return the one-sided exact upper bound of the flip rate; 1 without rows. Raises ValueError like
    `exact_interval`.

    `rows` are a sample of infinitely many (Clopper and Pearson), or of at most as many as `of`, each drawn once: then
    their number of flips is hypergeometric, and the bound is lower. As 'at most' leaves open how many there are, the
    flips of all of them need not be a whole number.
    """
    exact_interval(flips, rows, confidence)
    most = exact_upper(flips, rows, 1 - confidence)
    if of is None:
        return most
    of = max(of, rows, 1)
    least = flips / of
    for _ in range(36):  # bisection: the more flips there are in all, the less probable are this few
        middle = (least + most) / 2
        if _chance_of_fewer(flips, rows, middle * of, of) > 1 - confidence:
            least = middle
        else:
            most = middle
    return most


def _chance_of_fewer(flips: int, rows: int, all_flips: float, of: float) -> float:
    # The probability of at most `flips` flips in a sample without replacement. Counts may be fractional.
    from scipy.special import gammaln

    seen = np.arange(flips + 1)
    others = of - all_flips - rows + seen  # rows that do not flip and are not in the sample
    able = others > -1
    seen, others = seen[able], others[able]

    def log_choose(n: float, k: Any, rest: Any) -> Any:
        return gammaln(n + 1) - gammaln(k + 1) - gammaln(rest + 1)

    ways = log_choose(all_flips, seen, all_flips - seen) + log_choose(of - all_flips, rows - seen, others)
    return float(np.exp(ways - log_choose(of, rows, of - rows)).sum())


def rows_for(max_flips: float, flips: int = 0, confidence: float = 0.95, of: float | None = None) -> int:
    """Return the fewest rows with which `flips` flips still prove a flip rate of at most `max_flips` (a share).

    They are a sample of at most as many as `of`, as in `flip_bound`. Raises ValueError unless 0 < max_flips < 1,
    flips >= 0 and 0 < confidence < 1.
    """
    if not 0 < max_flips < 1:
        raise ValueError(f"a flip rate between 0 and 1 can be proven, not {max_flips}")
    enough = max(2 * flips, 1)
    while flip_bound(flips, enough, confidence, of) > max_flips:
        enough *= 2
    # The bound falls with every row. If all rows flip it is 1, so the search may begin there.
    proven = range(enough + 1)
    return bisect_left(proven, True, lo=flips, key=lambda rows: flip_bound(flips, rows, confidence, of) <= max_flips)

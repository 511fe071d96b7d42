"""How certain a figure is: exact intervals of shares, Student's of means, and those of a bootstrap.

Shares have the intervals of Clopper and Pearson (Biometrika 26, 1934), and figures without a formula those of a
bootstrap (Efron and Tibshirani, 1993). The cost of a bootstrap does not depend on the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict

from prefillcli.stats.arrays import Float64Array, Int64Array

Interval = tuple[float, float]

# From the counts of positive and of negative rows in each group, both [resamples, groups], to a value [resamples].
Figure = Callable[[Int64Array, Int64Array], Float64Array]

RESAMPLES = 1000
_AT_A_TIME = 100  # resamples at a time, to bound the memory
_SEED = 0


class Estimate(BaseModel):
    """A figure of some rows, and the interval in which the figure of all such rows lies."""

    model_config = ConfigDict(frozen=True)

    value: float | None = None
    interval: Interval | None = None
    reason: str | None = None  # why there is no value


def exact_interval(successes: float, trials: float, confidence: float = 0.95) -> Interval:
    """Return the two-sided Clopper-Pearson interval of a share; each tail has half of 1 - `confidence`.

    Both may be fractions, of trials that count as part of one. Raises ValueError unless 0 <= `successes` <=
    `trials` and 0 < `confidence` < 1.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence is between 0 and 1, not {confidence}")
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials")
    from scipy.special import betaincinv

    tail = (1 - confidence) / 2
    # P(X >= k) = I_p(k, n - k + 1) for X ~ Binomial(n, p), so each bound is a quantile of a beta distribution.
    lower = 0.0 if successes == 0 else float(betaincinv(successes, trials - successes + 1, tail))
    return lower, exact_upper(successes, trials, tail)


def exact_upper(successes: float, trials: float, tail: float) -> float:
    """Return the share at which this many successes, or fewer, have the probability `tail`."""
    from scipy.special import betaincinv

    # P(X <= k) = 1 - I_p(k + 1, n - k) for X ~ Binomial(n, p).
    return 1.0 if successes == trials else float(betaincinv(successes + 1, trials - successes, 1 - tail))


def share_estimate(successes: int, trials: int, confidence: float = 0.95) -> Estimate:
    """Return a share with its exact interval; without trials there is no value."""
    if not trials:
        return Estimate(reason="there are no such rows")
    return Estimate(value=successes / trials, interval=exact_interval(successes, trials, confidence))


def mean_estimate(values: Float64Array, confidence: float = 0.95) -> Estimate:
    """Return the mean of values that are never negative, with Student's interval; of one value there is no
    interval."""
    from scipy.special import stdtrit

    if not len(values):
        return Estimate(reason="there are no such rows")
    mean = float(np.mean(values))
    if len(values) == 1:
        return Estimate(value=mean)
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    reach = float(stdtrit(len(values) - 1, (1 + confidence) / 2)) * error
    return Estimate(value=mean, interval=(max(mean - reach, 0.0), mean + reach))


def resampled(positives: Int64Array, negatives: Int64Array, figures: Sequence[Figure]) -> Float64Array:
    """Return figures of rows resampled with replacement, float64 [figures, RESAMPLES]; the draws are always the same.

    `positives` and `negatives` [groups] count the rows of each group. Each resample has as many rows as the data,
    drawn from all rows alike, so the share of positive ones varies as in data.
    """
    counts = np.concatenate([positives, negatives])
    draws = np.random.default_rng(_SEED)
    groups, total, found = len(positives), int(counts.sum()), []
    for _ in range(0, RESAMPLES, _AT_A_TIME):
        drawn = draws.multinomial(total, counts / total, size=_AT_A_TIME)
        found.append([figure(drawn[:, :groups], drawn[:, groups:]) for figure in figures])
    return np.concatenate(found, axis=1)


def by_chance(rows: Int64Array, means: Float64Array, figures: Sequence[Figure]) -> Float64Array:
    """Return figures of rows whose probabilities are right, float64 [figures, RESAMPLES]; the draws are always the
    same.

    `rows` and their mean probabilities `means` are given for each group [groups]. The number of positive rows is
    drawn.
    """
    draws = np.random.default_rng(_SEED)
    found = []
    for _ in range(0, RESAMPLES, _AT_A_TIME):
        positives = draws.binomial(rows, means.clip(0, 1), size=(_AT_A_TIME, len(rows)))
        found.append([figure(positives, rows - positives) for figure in figures])
    return np.concatenate(found, axis=1)


def percentile_interval(values: Float64Array, confidence: float = 0.95) -> Interval | None:
    """Return the range between the tails of the resampled values; NaN are left out, and None means that all are
    NaN."""
    known = values[~np.isnan(values)]
    if not len(known):
        return None
    low, high = np.quantile(known, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)

"""Estimates with the interval in which the true value lies with a given confidence.

Shares have exact intervals (Clopper and Pearson, Biometrika 26, 1934), means Student's, and figures without a formula
those of a bootstrap (Efron and Tibshirani, 1993). A bootstrap costs the same however many rows there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
Interval = tuple[float, float]

Figure = Callable[[Int64Array, Int64Array], Float64Array]
"""From the counts of positive and of negative rows in each group, both [resamples, groups], to a value [resamples]."""

RESAMPLES = 1000
_AT_A_TIME = 100  # resamples: bounds the memory
_SEED = 0


class Estimate(BaseModel):
    """A figure of some rows, and the interval in which that of all such rows lies."""

    model_config = ConfigDict(frozen=True)

    value: float | None = None
    interval: Interval | None = None
    reason: str | None = None  # why there is no value


def exact_interval(successes: float, trials: int, confidence: float = 0.95) -> Interval:
    """The two-sided Clopper-Pearson interval of a share; each tail has half of 1 - `confidence`.

    `successes` may be a fraction, of trials that count as part of one. Raises ValueError unless 0 <= `successes` <=
    `trials` and 0 < `confidence` < 1.
    """
    check_confidence(confidence)
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials")
    tail = (1 - confidence) / 2
    return exact_lower(successes, trials, tail), exact_upper(successes, trials, tail)


def exact_lower(successes: float, trials: int, tail: float) -> float:
    """The share below which as many successes have the probability `tail`."""
    from scipy.special import betaincinv

    return 0.0 if successes == 0 else float(betaincinv(successes, trials - successes + 1, tail))


def exact_upper(successes: float, trials: int, tail: float) -> float:
    """The share above which as few successes have the probability `tail`."""
    from scipy.special import betaincinv

    return 1.0 if successes == trials else float(betaincinv(successes + 1, trials - successes, 1 - tail))


def share_estimate(successes: int, trials: int, confidence: float = 0.95) -> Estimate:
    """A share with its exact interval; without trials there is no value."""
    if not trials:
        return Estimate(reason="there are no such rows")
    return Estimate(value=successes / trials, interval=exact_interval(successes, trials, confidence))


def mean_estimate(values: Float64Array, confidence: float = 0.95) -> Estimate:
    """The mean of values that are never negative, with Student's interval; of one value there is no interval."""
    from scipy.special import stdtrit

    check_confidence(confidence)
    if not len(values):
        return Estimate(reason="there are no such rows")
    mean = float(np.mean(values))
    if len(values) == 1:
        return Estimate(value=mean)
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    reach = float(stdtrit(len(values) - 1, (1 + confidence) / 2)) * error
    return Estimate(value=mean, interval=(max(mean - reach, 0.0), mean + reach))


def resampled(positives: Int64Array, negatives: Int64Array, figures: Sequence[Figure]) -> Float64Array:
    """Figures of rows drawn again with replacement, float64 [figures, RESAMPLES]; the draws are always the same.

    `positives` and `negatives` [groups] count the rows of each group. As many rows are drawn as there are, of all
    rows alike, so the share of positive ones varies as it does in data.
    """
    counts = np.concatenate([positives, negatives])
    draws = np.random.default_rng(_SEED)
    groups, total, found = len(positives), int(counts.sum()), []
    for _ in range(0, RESAMPLES, _AT_A_TIME):
        drawn = draws.multinomial(total, counts / total, size=_AT_A_TIME)
        found.append([figure(drawn[:, :groups], drawn[:, groups:]) for figure in figures])
    values: Float64Array = np.concatenate(found, axis=1)
    return values


def by_chance(rows: Int64Array, means: Float64Array, figures: Sequence[Figure]) -> Float64Array:
    """Figures of rows whose probabilities are true ones, float64 [figures, RESAMPLES]; the draws are always the same.

    `rows` and their mean probabilities `means` are of each group [groups]. How many are positive is drawn.
    """
    draws = np.random.default_rng(_SEED)
    found = []
    for _ in range(0, RESAMPLES, _AT_A_TIME):
        positives = draws.binomial(rows, means.clip(0, 1), size=(_AT_A_TIME, len(rows)))
        found.append([figure(positives, rows - positives) for figure in figures])
    values: Float64Array = np.concatenate(found, axis=1)
    return values


def percentile_interval(values: Float64Array, confidence: float = 0.95) -> Interval | None:
    """What lies between the tails of the resampled values; NaN are left out, and None is that all are."""
    check_confidence(confidence)
    known = values[~np.isnan(values)]
    if not len(known):
        return None
    low, high = np.quantile(known, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def check_confidence(confidence: float) -> None:
    """Raise ValueError unless 0 < `confidence` < 1."""
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence is between 0 and 1, not {confidence}")

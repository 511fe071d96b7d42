"""Fits of a few measurements on a machine that other programs use too."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

FloatArray = npt.NDArray[np.float64]


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(base, slope) of a line through (x, y): the median of all pairs' slopes, which one stray point does not move.

    Theil-Sen. Raises ValueError for fewer than two different x.
    """
    from scipy.stats import theilslopes  # takes a while to import

    x, y = zip(*points, strict=True)
    if len(set(x)) < 2:
        raise ValueError("a line needs two points")
    found = theilslopes(y, x, method="joint")
    return float(found.intercept), float(found.slope)


def fit_linear(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> FloatArray:
    """Least squares: float64 [columns] with the smallest squared error of `rows @ result`."""
    found, *_ = np.linalg.lstsq(np.asarray(rows, dtype=float), np.asarray(seconds, dtype=float), rcond=None)
    return np.asarray(found, dtype=float)


def fit_costs(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> FloatArray:
    """Costs >= 0 of each column: float64 [columns] with the smallest squared *relative* error of `rows @ result`.

    `seconds` are above 0. Columns of very different size are scaled first.
    """
    weighted = np.asarray(rows, dtype=float) / np.asarray(seconds, dtype=float)[:, None]
    scale = np.abs(weighted).max(axis=0)
    scale[scale == 0] = 1.0
    found, _ = nnls(weighted / scale, np.ones(len(seconds)))
    return np.asarray(found / scale, dtype=float)


def pearson(x: Sequence[float], y: Sequence[float]) -> float:
    """Pearson's r; 0 where one of them does not vary."""
    try:
        return statistics.correlation(x, y)
    except statistics.StatisticsError:
        return 0.0


def relative_errors(predicted: Sequence[float], measured: Sequence[float]) -> list[float]:
    """|predicted / measured - 1| of each."""
    return [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]


def mean_relative_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Mean of |predicted / measured - 1|."""
    return statistics.fmean(relative_errors(predicted, measured))

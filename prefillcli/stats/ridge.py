"""Ridge regression whose strength leaving single rows out chooses."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from prefillcli.stats.evaluation import Float64Array

# Strengths that are tried, in units of the points' total variance.
STRENGTHS: Final = tuple(10.0**power for power in np.arange(-7, 1.1, 0.5))


class Ridge(NamedTuple):
    """A fitted map of points: `points @ weights + bias`. `held_out` [rows, targets] has the prediction for each row
    by the fit to all others."""

    weights: Float64Array
    bias: Float64Array
    held_out: Float64Array


def ridge(points: Float64Array, target: Float64Array) -> Ridge:
    """The map from `points` [rows, inputs] to `target` [rows, targets], with a free intercept.

    The strength is the one with the smallest squared error when each row is left out in turn. One decomposition of the
    smaller Gram matrix, that of the rows (the dual form) or that of the inputs, gives the fits of all strengths and,
    by the diagonal of the hat matrix, their exact predictions for left-out rows.
    """
    centre, mean = points.mean(axis=0), target.mean(axis=0)
    points = points - centre
    left, values = _decomposed(points)
    aims = left.T @ (target - mean)
    total = max(float(values.sum()), np.finfo(np.float64).tiny)
    best, strength = np.inf, 0.0
    held_out: Float64Array = np.zeros_like(target)
    for share in STRENGTHS:
        shrunk = values / (values + share * total)
        off = target - mean - left @ (shrunk[:, None] * aims)
        alone = 1 - 1 / len(points) - (left**2) @ shrunk
        off /= np.maximum(alone, 1e-9)[:, None]
        error = float(np.mean(off**2))
        if error < best:
            best, held_out, strength = error, target - off, share * total
    weights = points.T @ (left @ (aims / (values + strength)[:, None]))
    return Ridge(weights, mean - centre @ weights, held_out)


def _decomposed(points: Float64Array) -> tuple[Float64Array, Float64Array]:
    # Left singular vectors [rows, rank] of points [rows, inputs], and the squares of the singular values.
    rows, inputs = points.shape
    gram = points @ points.T if rows <= inputs else points.T @ points
    values, vectors = np.linalg.eigh(gram)
    known = values > max(float(values[-1]), 0.0) * 1e-12
    values, vectors = values[known], vectors[:, known]
    left = vectors if rows <= inputs else points @ (vectors / np.sqrt(values))
    return left, values

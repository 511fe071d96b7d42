"""Ridge regression, with the strength chosen by leaving single rows out."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from prefillcli.stats.arrays import Float64Array

# Strengths that are tried, in units of the points' total variance.
STRENGTHS: Final = tuple(10.0**power for power in np.arange(-7, 1.1, 0.5))


class Ridge(NamedTuple):
    """A fitted map of points: `points @ weights + bias`. `held_out` [rows, targets] has the prediction for each row
    by the fit to all others. `strength` is that of the penalty, as scikit-learn's `alpha`."""

    weights: Float64Array
    bias: Float64Array
    held_out: Float64Array
    strength: float


def ridge(points: Float64Array, target: Float64Array) -> Ridge:
    """Return the map from `points` [rows, inputs] to `target` [rows, targets], with a free intercept.

    The strength is the one with the smallest squared error when each row is left out in turn.
    """
    from sklearn.linear_model import RidgeCV

    strengths = np.array(STRENGTHS) * (float(points.var(axis=0).sum()) * len(points) or 1.0)
    fitted = RidgeCV(strengths, scoring="neg_mean_squared_error", store_cv_results=True).fit(points, target)
    held_out = fitted.cv_results_[..., int(np.flatnonzero(strengths == fitted.alpha_)[0])]
    return Ridge(fitted.coef_.T, fitted.intercept_, held_out, float(fitted.alpha_))

"""How far probabilities are from what happens: Brier score, log loss, and calibration error over bins.

Probabilities are of one event in each row, float64 [rows]; the truth says whether it happened, bool [rows].
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from prefillcli.stats.intervals import Float64Array, Int64Array

Binning = Literal["equal-width", "equal-mass"]

BINS = 15
"""As many as Guo et al. (ICML 2017) take."""

_LEAST = float(np.finfo(np.float64).eps)  # a probability in a logarithm


class ReliabilityBin(BaseModel):
    """Rows of similar probability: what was said, and what happened."""

    model_config = ConfigDict(frozen=True)

    low: float  # above this, but the first bin holds it too
    high: float  # up to this
    rows: int
    mean_probability: float
    share: float  # of the rows in which it happened


def brier_losses(probabilities: Float64Array, truth: npt.NDArray[np.bool_]) -> Float64Array:
    """Each row's squared distance from what happened [rows]."""
    losses: Float64Array = (probabilities - truth) ** 2
    return losses


def log_losses(probabilities: Float64Array, truth: npt.NDArray[np.bool_]) -> Float64Array:
    """Each row's negative logarithm of the probability of what happened [rows]; one of 0 counts as 2.2e-16."""
    said = np.where(truth, probabilities, 1 - probabilities)
    losses: Float64Array = -np.log(np.clip(said, _LEAST, 1 - _LEAST))
    return losses


def inner_edges(probabilities: Float64Array, bins: int = BINS, binning: Binning = "equal-width") -> Float64Array:
    """Where one bin ends and the next begins, ascending [bins - 1]; a probability on an edge is in the lower bin."""
    edges: Float64Array = np.linspace(0.0, 1.0, bins + 1)
    if binning == "equal-mass":
        edges = np.percentile(probabilities, 100 * edges)
    return edges[1:-1]


def reliability(
    probabilities: Float64Array, truth: npt.NDArray[np.bool_], bins: int = BINS, binning: Binning = "equal-width"
) -> list[ReliabilityBin]:
    """The bins that have rows. They are equally wide, or hold equally many rows as far as equal probabilities allow.

    Raises ValueError if the lengths differ.
    """
    if len(probabilities) != len(truth):
        raise ValueError(f"{len(probabilities)} probabilities for {len(truth)} answers")
    if not len(probabilities):
        return []
    edges = inner_edges(probabilities, bins, binning)
    places: Int64Array = np.searchsorted(edges, probabilities)
    rows = np.bincount(places, minlength=bins)
    said, happened = (np.bincount(places, weights=values, minlength=bins) for values in (probabilities, truth))
    outer = (0.0, 1.0) if binning == "equal-width" else (float(probabilities.min()), float(probabilities.max()))
    ends = [outer[0], *edges.tolist(), outer[1]]
    return [
        ReliabilityBin(
            low=ends[at],
            high=ends[at + 1],
            rows=int(rows[at]),
            mean_probability=float(said[at] / rows[at]),
            share=float(happened[at] / rows[at]),
        )
        for at in np.flatnonzero(rows).tolist()
    ]


def expected_calibration_error(
    probabilities: Float64Array, truth: npt.NDArray[np.bool_], bins: int = BINS, binning: Binning = "equal-width"
) -> float:
    """The mean distance between what the bins say and what happens, weighted by their rows.

    Of few rows it is too large, because the rows of a bin differ from its mean by chance. Raises ValueError without
    rows, or if the lengths differ.
    """
    found = reliability(probabilities, truth, bins, binning)
    if not found:
        raise ValueError("there are no rows")
    return sum(each.rows * abs(each.mean_probability - each.share) for each in found) / len(probabilities)

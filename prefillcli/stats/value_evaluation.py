"""What values are worth beside the right answers: how well they rank rows. They are no probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from prefillcli.stats.evaluation import Evaluation, area_estimate, precision_wanted
from prefillcli.stats.intervals import Estimate, Float64Array
from prefillcli.stats.ranking import Ranking

_NO_PROBABILITY = Estimate(reason="values are no probabilities")
_NO_THRESHOLD = Estimate(reason="values have no threshold of their own")


def evaluate_values(
    values: Float64Array,
    truth: npt.NDArray[np.bool_],
    labels: Sequence[str],
    *,
    wanted_precision: float | None = None,
    confidence: float = 0.95,
    without_truth: int = 0,
    errors: int = 0,
) -> Evaluation:
    """The figures of any numbers [rows], where `truth` [rows] says whether the first label is right.

    They are those of the order of the rows: AUC, average precision, thresholds and curves. `without_truth` and
    `errors` count the other rows. Raises ValueError if the lengths differ.
    """
    if len(values) != len(truth):
        raise ValueError(f"{len(values)} values for {len(truth)} right answers")
    ranking = Ranking.of(values, truth)
    precision = ranking.average_precision
    return Evaluation(
        rows=len(values),
        confidence=confidence,
        labels=list(labels)[:2],
        accuracy=_NO_THRESHOLD,
        auc=area_estimate(ranking, labels[0], confidence),
        average_precision=Estimate(reason="there are no positive rows")
        if precision is None
        else Estimate(value=precision),
        brier=_NO_PROBABILITY,
        log_loss=_NO_PROBABILITY,
        calibration_error=_NO_PROBABILITY,
        calibration_error_equal_mass=_NO_PROBABILITY,
        best_f1=ranking.best_f1(),
        wanted_precision=None if wanted_precision is None else precision_wanted(ranking, wanted_precision),
        roc=ranking.roc_curve(),
        precision_recall=ranking.precision_recall_curve(),
        without_truth=without_truth,
        errors=errors,
    )

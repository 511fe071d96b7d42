"""The quality of scores: figures against the right answers, and their intervals.

The figures equal scikit-learn's of the same rows. Arrays come in and an `Evaluation` goes out: callers read the
arrays and choose which rows are shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from prefillcli.stats.arrays import BoolArray, Float64Array, Int64Array
from prefillcli.stats.intervals import (
    Estimate,
    Figure,
    Interval,
    by_chance,
    exact_interval,
    mean_estimate,
    percentile_interval,
    resampled,
    share_estimate,
)

# Rows ranked by their scores: the figures at each threshold, and how well the order separates positives from
# negatives.
#
# A row counts as found at a threshold if its score is at or above it. Rows with equal scores are found together.


_MOST_POINTS = 200  # of a curve


class ThresholdFigures(BaseModel):
    """The figures at a threshold: of the rows with scores at or above it, and of the positive ones among them."""

    model_config = ConfigDict(frozen=True)

    threshold: float
    rows: int  # with scores at or above it
    precision: float  # share of them that are positive
    recall: float  # share of the positive rows that are among them
    f1: float


class RocCurve(BaseModel):
    """Points from (0, 0) to (1, 1); of many, enough to draw the curve."""

    model_config = ConfigDict(frozen=True)

    false_positive_rate: list[float]
    true_positive_rate: list[float]


class PrecisionRecallCurve(BaseModel):
    """Points from the highest threshold to the lowest; of many, enough to draw the curve."""

    model_config = ConfigDict(frozen=True)

    recall: list[float]
    precision: list[float]


@dataclass(frozen=True, slots=True)
class Ranking:
    """Counts of rows at every threshold. Curves and averages need both positive and negative rows."""

    thresholds: Float64Array  # the distinct scores, highest first [thresholds]
    true_positives: Int64Array  # positive rows at or above each threshold [thresholds]
    false_positives: Int64Array  # negative rows at or above each threshold [thresholds]

    @classmethod
    def of(cls, scores: Float64Array, positive: npt.NDArray[np.bool_]) -> Ranking:
        """Return the ranking of finite scores [rows], `positive` or not [rows]. Raises ValueError if the lengths
        differ."""
        if len(scores) != len(positive):
            raise ValueError(f"{len(scores)} scores for {len(positive)} answers")
        if not len(scores):
            return cls(scores, np.zeros(0, np.int64), np.zeros(0, np.int64))
        from sklearn.metrics import confusion_matrix_at_thresholds

        _, false_positives, _, true_positives, thresholds = confusion_matrix_at_thresholds(positive, scores)
        return cls(thresholds, true_positives.astype(np.int64), false_positives.astype(np.int64))

    @property
    def positives(self) -> int:
        return int(self.true_positives[-1]) if len(self.thresholds) else 0

    @property
    def negatives(self) -> int:
        return int(self.false_positives[-1]) if len(self.thresholds) else 0

    @property
    def area(self) -> float | None:
        """The area under the ROC curve (Mann and Whitney), a tie counts half; None without rows of both kinds."""
        if not self.positives or not self.negatives:
            return None
        from sklearn.metrics import auc

        counts = [np.concatenate([[0], each]) for each in (self.false_positives, self.true_positives)]
        return float(auc(*counts)) / (self.positives * self.negatives)

    def area_interval(self, confidence: float = 0.95) -> Interval | None:
        """Return the interval of the area by DeLong's variance (Biometrics 44, 1988), on the logit's scale.

        If the rows show no variance, as when they are perfectly separated, it is the exact interval of as many trials
        as the rarer kind has rows: the area varies at most that much (Birnbaum and Klose, 1957).
        """
        area = self.area
        if area is None:
            return None
        variance = self._area_variance(area)
        rarer = min(self.positives, self.negatives)
        if variance <= 0 or not 0 < area < 1:
            return exact_interval(area * rarer, rarer, confidence)
        from scipy.special import expit, logit, ndtri

        # By the delta method: the derivative of logit(A) is 1 / (A (1 - A)).
        reach = float(ndtri((1 + confidence) / 2)) * math.sqrt(variance) / (area * (1 - area))
        return float(expit(logit(area) - reach)), float(expit(logit(area) + reach))

    @property
    def average_precision(self) -> float | None:
        """The mean precision over the steps of recall; None without positive rows."""
        if not self.positives:
            return None
        equal, _ = self._steps()
        return float((equal * self.precision).sum() / self.positives)

    def best_f1(self) -> ThresholdFigures | None:
        """Return the threshold with the largest F1, the highest of equal ones; None without positive rows."""
        if not self.positives:
            return None
        # 2 TP / (2 TP + FP + FN), as TP + FN are all positive rows.
        f1 = 2 * self.true_positives / (self.true_positives + self.false_positives + self.positives)
        return self._figures(int(f1.argmax()))

    def lowest_with_precision(self, wanted: float) -> ThresholdFigures | None:
        """Return the lowest threshold whose precision is at least `wanted`; None if no threshold reaches it."""
        reached = np.flatnonzero(self.precision >= wanted)
        return self._figures(int(reached[-1])) if len(reached) and self.positives else None

    def roc_curve(self) -> RocCurve | None:
        """Return the ROC curve; None unless there are rows of both kinds."""
        if not self.positives or not self.negatives:
            return None
        points = self._drawn()
        return RocCurve(
            false_positive_rate=[0.0, *(self.false_positives[points] / self.negatives).tolist()],
            true_positive_rate=[0.0, *(self.true_positives[points] / self.positives).tolist()],
        )

    def precision_recall_curve(self) -> PrecisionRecallCurve | None:
        """Return the curve of precision over recall; None without positive rows."""
        if not self.positives:
            return None
        points = self._drawn()
        return PrecisionRecallCurve(
            recall=(self.true_positives[points] / self.positives).tolist(),
            precision=self.precision[points].tolist(),
        )

    def _steps(self) -> tuple[Int64Array, Int64Array]:
        # Positive and negative rows with exactly the score of each threshold.
        return np.diff(self.true_positives, prepend=0), np.diff(self.false_positives, prepend=0)

    @property
    def precision(self) -> Float64Array:
        """The share of the rows at or above each threshold that are positive [thresholds]."""
        return np.asarray(self.true_positives / (self.true_positives + self.false_positives), np.float64)

    def _area_variance(self, area: float) -> float:
        # NaN-free: 0 where a kind has fewer than two rows.
        if min(self.positives, self.negatives) < 2:
            return 0.0
        equal, equal_negatives = self._steps()
        # The share of negative rows below a positive one, and of positive rows above a negative one; ties count half.
        of_positives = (self.negatives - self.false_positives + equal_negatives / 2) / self.negatives
        of_negatives = (self.true_positives - equal / 2) / self.positives
        spread = float((equal * (of_positives - area) ** 2).sum()) / (self.positives - 1) / self.positives
        return (
            spread
            + float((equal_negatives * (of_negatives - area) ** 2).sum()) / (self.negatives - 1) / self.negatives
        )

    def _figures(self, at: int) -> ThresholdFigures:
        found, rows = int(self.true_positives[at]), int(self.true_positives[at] + self.false_positives[at])
        return ThresholdFigures(
            threshold=float(self.thresholds[at]),
            rows=rows,
            precision=found / rows,
            recall=found / self.positives,
            f1=2 * found / (rows + self.positives),
        )

    def _drawn(self) -> Int64Array:
        # Thresholds that are evenly spaced along the ROC curve, including the last.
        along = self.true_positives / max(self.positives, 1) + self.false_positives / max(self.negatives, 1)
        wanted = np.linspace(along[0], along[-1], _MOST_POINTS)
        return np.unique(np.searchsorted(along, wanted).clip(max=len(along) - 1))


def auc(scores: npt.ArrayLike, positive: npt.ArrayLike) -> float | None:
    """Return the area under the ROC curve of finite scores, from the rank sum (Mann and Whitney); a tie counts half.

    None unless there are both positive and negative rows. Raises ValueError if the lengths differ.
    """
    return Ranking.of(np.asarray(scores, np.float64), np.asarray(positive, np.bool_)).area


# The distance between probabilities and events: Brier score, log loss, and calibration error over bins.
#
# Probabilities are of one event in each row, float64 [rows]; the truth is whether it happened, bool [rows].


Binning = Literal["equal-width", "equal-mass"]

BINS = 15  # as in Guo et al. (ICML 2017)

_LEAST = float(np.finfo(np.float64).eps)  # least probability in a logarithm


class ReliabilityBin(BaseModel):
    """Rows of similar probability: the mean prediction, and how often the event happened."""

    model_config = ConfigDict(frozen=True)

    low: float  # above this, but the first bin holds it too
    high: float  # up to this
    rows: int
    mean_probability: float
    share: float  # of the rows in which it happened


def brier_losses(probabilities: Float64Array, truth: npt.NDArray[np.bool_]) -> Float64Array:
    """Return each row's squared distance from the event, 0 or 1 [rows]."""
    return np.asarray((probabilities - truth) ** 2, np.float64)


def log_losses(probabilities: Float64Array, truth: npt.NDArray[np.bool_]) -> Float64Array:
    """Return each row's negative logarithm of the probability of its outcome [rows]; a probability of 0 counts as
    2.2e-16."""
    said = np.where(truth, probabilities, 1 - probabilities)
    return np.asarray(-np.log(np.clip(said, _LEAST, 1 - _LEAST)), np.float64)


def inner_edges(probabilities: Float64Array, bins: int = BINS, binning: Binning = "equal-width") -> Float64Array:
    """Return the edges between bins, ascending [bins - 1]; a probability on an edge is in the lower bin."""
    shares = np.linspace(0.0, 1.0, bins + 1)[1:-1]
    return shares if binning == "equal-width" else np.percentile(probabilities, 100 * shares)


def reliability(
    probabilities: Float64Array, truth: npt.NDArray[np.bool_], bins: int = BINS, binning: Binning = "equal-width"
) -> list[ReliabilityBin]:
    """Return the bins that have rows. They are equally wide, or hold equally many rows as far as equal probabilities
    allow.

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
    """Return the mean distance between the probability and the frequency of the bins, weighted by their rows.

    With few rows it is too large, because the rows of a bin differ from its mean by chance. Raises ValueError without
    rows, or if the lengths differ.
    """
    found = reliability(probabilities, truth, bins, binning)
    if not found:
        raise ValueError("there are no rows")
    return sum(each.rows * abs(each.mean_probability - each.share) for each in found) / len(probabilities)


_MOST_GROUPS = 1000  # more distinct scores than these are resampled in groups of neighbours
_NO_PROBABILITY = Estimate(reason="values are not probabilities")
_NO_THRESHOLD = Estimate(reason="values have no natural threshold")
_NO_LABELS = Estimate(reason="each row has its own choices")


class LabelFigures(BaseModel):
    """One label against all others."""

    model_config = ConfigDict(frozen=True)

    label: str
    rows: int  # rows whose right answer it is
    predicted: int  # rows
    precision: Estimate  # share of its predictions that are right
    recall: Estimate  # share of its rows that are predicted as such
    f1: float | None
    auc: Estimate
    average_precision: float | None
    brier: float | None


class WantedPrecision(BaseModel):
    """The lowest threshold that gives a precision, and thus the largest recall at that precision."""

    model_config = ConfigDict(frozen=True)

    wanted: float
    reached: ThresholdFigures | None
    best: ThresholdFigures | None  # the most precise threshold, if none reaches it
    reason: str | None = None  # why no threshold reaches it


class NumberFigures(BaseModel):
    """The distance of numbers from the right ones."""

    model_config = ConfigDict(frozen=True)

    spearman: Estimate  # correlation of ranks
    pearson: Estimate
    mean_error: Estimate  # absolute
    root_mean_square_error: Estimate


class OrderedFigures(BaseModel):
    """Labels that stand for numbers: the expected value of the answer, and the number of the likeliest label."""

    model_config = ConfigDict(frozen=True)

    rows: int  # with a score and a right number, which need not be that of a label
    mean: NumberFigures
    likeliest: NumberFigures


class ChoiceFigures(BaseModel):
    """Rows with their own choices."""

    model_config = ConfigDict(frozen=True)

    chance: float | None  # the accuracy of guesses
    logprob: Estimate  # of the whole right choice, the mean
    accuracy_whole: Estimate | None  # of the likeliest whole choice, where scores are of divided log-probabilities


class Evaluation(BaseModel):
    """The quality of scores. Probabilities and shares are from 0 to 1; None is a figure that the rows do not give.

    Of two labels `auc`, `average_precision`, the thresholds and the curves are of the first one, the positive one. Of
    more labels `auc` is the mean over the labels, each against the rest, and the thresholds and curves are None.
    """

    model_config = ConfigDict(frozen=True)

    rows: int = 0  # with a score and a known right answer
    without_truth: int = 0  # with a score, but without a right answer that is a label
    errors: int = 0  # without a score
    confidence: float = 0.95  # of all intervals
    labels: list[str] = []
    accuracy: Estimate = Estimate()
    auc: Estimate = Estimate()
    average_precision: Estimate = Estimate()
    brier: Estimate = Estimate()
    log_loss: Estimate = Estimate()
    calibration_error: Estimate = Estimate()  # over bins of equal width
    calibration_error_equal_mass: Estimate = Estimate()
    bins: int = BINS
    confusion: list[list[int]] = []  # rows by right answer, then by prediction, in the order of the labels
    by_label: list[LabelFigures] = []
    best_f1: ThresholdFigures | None = None
    wanted_precision: WantedPrecision | None = None
    reliability: list[ReliabilityBin] = []  # with two labels of the positive one, with more of the predicted one
    reliability_equal_mass: list[ReliabilityBin] = []
    roc: RocCurve | None = None
    precision_recall: PrecisionRecallCurve | None = None
    ordered: OrderedFigures | None = None  # of labels that stand for numbers
    choices: ChoiceFigures | None = None  # of rows with their own choices

    @property
    def commonest(self) -> tuple[str, float] | None:
        """The commonest right answer, and how often it is right; None where right answers are not counted by label."""
        counts = [sum(row) for row in self.confusion]
        if not sum(counts):
            return None
        best = counts.index(max(counts))
        return self.labels[best], counts[best] / sum(counts)


def evaluate(
    scores: Float64Array,
    truth: BoolArray,
    labels: Sequence[str] = ("Yes", "No"),
    *,
    wanted_precision: float | None = None,
    confidence: float = 0.95,
    without_truth: int = 0,
    errors: int = 0,
) -> Evaluation:
    """Compute the figures of two labels: `scores` [rows] are probabilities of the first, `truth` [rows] whether it is
    right.

    From a score of 0.5 a row is predicted to be the first label. `without_truth` and `errors` count the
    other rows. Raises ValueError if the lengths differ, or a score is not from 0 to 1.
    """
    _check(scores, truth, labels, dimensions=1)
    ranking, predicted = Ranking.of(scores, truth), scores >= 0.5
    confusion = _confusion((~truth).astype(np.int64), (~predicted).astype(np.int64), 2)
    wanted = None if wanted_precision is None else precision_wanted(ranking, wanted_precision)
    precision = [each.average_precision for each in (ranking, Ranking.of(1 - scores, ~truth))]
    area = area_estimate(ranking, labels[0], confidence)
    brier = mean_estimate(brier_losses(scores, truth), confidence)
    return Evaluation(
        rows=len(scores),
        confidence=confidence,
        labels=list(labels),
        accuracy=share_estimate(int((predicted == truth).sum()), len(scores), confidence),
        auc=area,
        brier=brier,
        log_loss=mean_estimate(log_losses(scores, truth), confidence),
        **_resampled_estimates(scores, truth, ranking, confidence),
        confusion=confusion.tolist(),
        by_label=[
            _label_figures(label, confusion, at, area, precision[at], brier.value, confidence)
            for at, label in enumerate(labels)
        ],
        best_f1=ranking.best_f1(),
        wanted_precision=wanted,
        reliability=reliability(scores, truth),
        reliability_equal_mass=reliability(scores, truth, binning="equal-mass"),
        roc=ranking.roc_curve(),
        precision_recall=ranking.precision_recall_curve(),
        without_truth=without_truth,
        errors=errors,
    )


def evaluate_labels(
    probabilities: Float64Array,
    truth: Int64Array,
    labels: Sequence[str],
    *,
    confidence: float = 0.95,
    without_truth: int = 0,
    errors: int = 0,
) -> Evaluation:
    """Compute the figures of several labels: `probabilities` [rows, labels] and the number of the right label [rows].

    Brier score and log loss are of all labels: the Brier score is the sum over them, 0 to 2. The calibration error
    concerns the likeliest label: how often it is right against how probable it is. `without_truth` and `errors` count
    the other rows. Raises ValueError if the lengths differ, or a probability is not from 0 to 1.
    """
    _check(probabilities, truth, labels, dimensions=2)
    rows = len(truth)
    confusion = _confusion(truth, _likeliest(probabilities), len(labels))
    by_label = []
    for at, label in enumerate(labels):
        is_label, scores = truth == at, np.ascontiguousarray(probabilities[:, at])
        ranking = Ranking.of(scores, is_label)
        brier = float(brier_losses(scores, is_label).mean()) if rows else None
        area = area_estimate(ranking, label, confidence)
        by_label.append(_label_figures(label, confusion, at, area, ranking.average_precision, brier, confidence))
    return Evaluation(
        **_of_likeliest(probabilities, truth, confidence),
        labels=list(labels),
        auc=_mean_over_labels([each.auc.value for each in by_label]),
        average_precision=_mean_over_labels([each.average_precision for each in by_label]),
        confusion=confusion.tolist(),
        by_label=by_label,
        without_truth=without_truth,
        errors=errors,
    )


def evaluate_choices(
    probabilities: Float64Array,
    truth: Int64Array,
    logprobs: Float64Array,
    *,
    divided: bool = False,
    confidence: float = 0.95,
    without_truth: int = 0,
    errors: int = 0,
) -> Evaluation:
    """Compute the figures of rows with their own choices: `probabilities` [rows, choices] are 0 after a row's last
    choice, and `truth` [rows] has the number of the right one.

    `logprobs` [rows, choices] are of whole choices, NaN after a row's last; `divided` marks probabilities made of
    log-probabilities divided by lengths. Brier score, log loss and calibration error are those of `evaluate_labels`.
    Raises ValueError likewise.
    """
    _check(probabilities, truth, range(probabilities.shape[-1]), dimensions=2)
    rows, counts = len(truth), (~np.isnan(logprobs)).sum(axis=1)
    whole = np.nan_to_num(logprobs, nan=-np.inf)
    accuracy = share_estimate(int((_likeliest(whole) == truth).sum()), rows, confidence) if divided else None
    lost = mean_estimate(-whole[np.arange(rows), truth], confidence)  # a loss, as it is never negative
    said = None if lost.value is None else -lost.value
    interval = None if lost.interval is None else (-lost.interval[1], -lost.interval[0])
    return Evaluation(
        **_of_likeliest(probabilities, truth, confidence),
        auc=_NO_LABELS,
        average_precision=_NO_LABELS,
        choices=ChoiceFigures(
            chance=float((1 / counts).mean()) if rows else None,
            logprob=Estimate(value=said, interval=interval, reason=lost.reason),
            accuracy_whole=accuracy,
        ),
        without_truth=without_truth,
        errors=errors,
    )


def _of_likeliest(probabilities: Float64Array, truth: Int64Array, confidence: float) -> dict[str, Any]:
    # The figures of `probabilities` [rows, labels] that are of all labels, or of the likeliest one.
    rows = len(truth)
    right, sureness = _likeliest(probabilities) == truth, probabilities.max(axis=1, initial=0.0)
    said = probabilities[np.arange(rows), truth]
    squares = (probabilities**2).sum(axis=1) - said**2 + (1 - said) ** 2
    estimates = _resampled_estimates(sureness, right, Ranking.of(sureness, right), confidence)
    return {
        "rows": rows,
        "confidence": confidence,
        "accuracy": share_estimate(int(right.sum()), rows, confidence),
        "brier": mean_estimate(squares, confidence),
        "log_loss": mean_estimate(log_losses(said, np.ones(rows, np.bool_)), confidence),
        "calibration_error": estimates["calibration_error"],
        "calibration_error_equal_mass": estimates["calibration_error_equal_mass"],
        "reliability": reliability(sureness, right),
        "reliability_equal_mass": reliability(sureness, right, binning="equal-mass"),
    }


def evaluate_ordered(
    means: Float64Array, likeliest: Float64Array, right: Float64Array, confidence: float = 0.95
) -> OrderedFigures:
    """Compute the figures of the expected value of answers and of the number of the likeliest label, beside the right
    numbers, all [rows]. Raises ValueError if the lengths differ."""
    return OrderedFigures(
        rows=len(right),
        mean=_number_figures(means, right, confidence),
        likeliest=_number_figures(likeliest, right, confidence),
    )


def _number_figures(said: Float64Array, right: Float64Array, confidence: float) -> NumberFigures:
    squares = mean_estimate((said - right) ** 2, confidence)
    root = squares
    if squares.value is not None:  # the root is monotone, so it is taken of the interval's ends too
        ends = None if squares.interval is None else (math.sqrt(squares.interval[0]), math.sqrt(squares.interval[1]))
        root = Estimate(value=math.sqrt(squares.value), interval=ends)
    return NumberFigures(
        spearman=correlation(said, right, ranks=True, confidence=confidence),
        pearson=correlation(said, right, confidence=confidence),
        mean_error=mean_estimate(np.abs(said - right), confidence),
        root_mean_square_error=root,
    )


def correlation(
    first: Float64Array, second: Float64Array, *, ranks: bool = False, confidence: float = 0.95
) -> Estimate:
    """Return Pearson's correlation of two numbers of the same rows, or with `ranks` Spearman's; equal numbers share
    their mean rank.

    The interval is Fisher's, for ranks with the variance of Bonett and Wright (Psychometrika 65, 2000). Fewer than
    four rows have none, and neither has a perfect correlation. Raises ValueError if the lengths differ.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} numbers beside {len(second)}")
    if len(first) < 2:
        return Estimate(reason="there are too few such rows")
    from scipy.stats import rankdata

    pair = [rankdata(first), rankdata(second)] if ranks else [first, second]
    if any(np.ptp(each) == 0 for each in pair):
        return Estimate(reason="one side has the same number in all rows")
    value = float(np.corrcoef(pair[0], pair[1])[0, 1])
    if len(first) < 4 or 1 - abs(value) < 1e-12:
        return Estimate(value=value)
    from scipy.special import ndtri

    variance = (1 + value**2 / 2 if ranks else 1) / (len(first) - 3)
    reach = float(ndtri((1 + confidence) / 2)) * math.sqrt(variance)
    middle = math.atanh(value)
    return Estimate(value=value, interval=(math.tanh(middle - reach), math.tanh(middle + reach)))


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
    """Compute the figures of any numbers [rows], where `truth` [rows] is whether the first label is right.

    These depend only on the order of the rows: AUC, average precision, thresholds and curves. `without_truth` and
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


def surest_wrong(probabilities: Float64Array, truth: Int64Array, most: int) -> list[int]:
    """Return the wrongly predicted rows, the most probable predictions first; at most `most`.

    `probabilities` [rows, labels] and the number of the right label [rows].
    """
    wrong = np.flatnonzero(_likeliest(probabilities) != truth)
    return _first(wrong, -probabilities[wrong].max(axis=1, initial=0.0), most)


_NEAR = 3.0
"""The factor that odds differ by where a score is near a threshold, or a label near another: 0.25 to 0.75 for 0.5."""


def nearest(scores: Float64Array, threshold: float, most: int) -> list[int]:
    """Return the rows whose scores are near a threshold, the nearest first; at most `most`."""
    over, under = scores * (1 - threshold), threshold * (1 - scores)
    near = np.flatnonzero((over <= _NEAR * under) & (under <= _NEAR * over))
    return _first(near, np.abs(scores[near] - threshold), most)


def closest_call(probabilities: Float64Array, most: int) -> list[int]:
    """Return the rows whose two likeliest labels are nearly as probable, the closest first; at most `most`.

    `probabilities` [rows, labels].
    """
    two = np.partition(probabilities, -2, axis=1)[:, -2:]
    near = np.flatnonzero(two[:, 1] <= _NEAR * two[:, 0])
    return _first(near, two[near, 1] - two[near, 0], most)


def _first(places: npt.NDArray[Any], keys: Float64Array, most: int) -> list[int]:
    # The places with the smallest keys; of equal keys the first places.
    if len(places) > most:
        limit = np.partition(keys, most - 1)[most - 1]
        near = keys <= limit
        places, keys = places[near], keys[near]
    found: list[int] = places[np.argsort(keys, kind="stable")[:most]].tolist()
    return found


def _likeliest(probabilities: Float64Array) -> Int64Array:
    return np.asarray(probabilities.argmax(axis=1), np.int64)


def _confusion(truth: Int64Array, predicted: Int64Array, labels: int) -> Int64Array:
    return np.bincount(truth * labels + predicted, minlength=labels * labels).reshape(labels, labels)


def _label_figures(
    label: str,
    confusion: Int64Array,
    at: int,
    area: Estimate,
    average_precision: float | None,
    brier: float | None,
    confidence: float,
) -> LabelFigures:
    right, rows, predicted = int(confusion[at, at]), int(confusion[at].sum()), int(confusion[:, at].sum())
    return LabelFigures(
        label=label,
        rows=rows,
        predicted=predicted,
        precision=share_estimate(right, predicted, confidence),
        recall=share_estimate(right, rows, confidence),
        f1=2 * right / (rows + predicted) if rows + predicted else None,
        auc=area,
        average_precision=average_precision,
        brier=brier,
    )


def area_estimate(ranking: Ranking, label: str, confidence: float) -> Estimate:
    """Return the area under the ROC curve, with DeLong's interval."""
    if not ranking.positives and not ranking.negatives:
        return Estimate(reason="there are no such rows")
    if not ranking.positives or not ranking.negatives:
        share = "every" if ranking.positives else "no"
        return Estimate(reason=f"{label} is the right answer of {share} row")
    return Estimate(value=ranking.area, interval=ranking.area_interval(confidence))


def _mean_over_labels(values: Sequence[float | None]) -> Estimate:
    known = [value for value in values if value is not None]
    if not known:
        return Estimate(reason="no label has right and wrong rows")
    return Estimate(value=sum(known) / len(known))


def precision_wanted(ranking: Ranking, wanted: float) -> WantedPrecision:
    """Return the lowest threshold with this precision."""
    reached = ranking.lowest_with_precision(wanted)
    if reached is not None:
        return WantedPrecision(wanted=wanted, reached=reached, best=None)
    best = ranking.lowest_with_precision(float(ranking.precision.max())) if ranking.positives else None
    reason = "there are no positive rows" if best is None else f"the most precise threshold gives {best.precision:.4g}"
    return WantedPrecision(wanted=wanted, reached=None, best=best, reason=reason)


def _resampled_estimates(
    scores: Float64Array, truth: BoolArray, ranking: Ranking, confidence: float
) -> dict[str, Estimate]:
    # Average precision and both calibration errors, with the intervals of a bootstrap over groups of near scores. The
    # shift that grouping causes is subtracted.
    names = ("average_precision", "calibration_error", "calibration_error_equal_mass")
    if not len(scores):
        return dict.fromkeys(names, Estimate(reason="there are no such rows"))
    binnings: tuple[Binning, ...] = ("equal-width", "equal-mass")
    edges = [inner_edges(scores, binning=binning) for binning in binnings]
    tops, means, positives, negatives = _groups(scores, truth, ranking, edges)
    places = [np.searchsorted(inner, tops) for inner in edges]
    figures: list[Figure] = [_average_precisions, *(_calibration_errors(each, means) for each in places)]
    drawn = resampled(positives, negatives, figures)
    drawn -= [figure(positives[None], negatives[None]) for figure in figures]
    rows = positives + negatives
    mean = (positives * means[0] + negatives * means[1]) / rows
    chance = by_chance(rows, mean, [_calibration_errors(each, np.stack([mean, mean])) for each in places])
    value = ranking.average_precision
    found = {names[0]: Estimate(reason="there are no positive rows")}
    if value is not None:
        found[names[0]] = Estimate(
            value=value, interval=percentile_interval((drawn[0] + value).clip(0, 1), confidence)
        )
    for at, binning in enumerate(binnings):
        error = expected_calibration_error(scores, truth, binning=binning)
        found[names[1 + at]] = Estimate(
            value=error, interval=_error_interval(error, drawn[1 + at], chance[at], confidence)
        )
    return found


def _error_interval(error: float, moved: Float64Array, chance: Float64Array, confidence: float) -> Interval:
    # The interval of a calibration error; it contains the error. Chance makes the error of rows too large, and that of
    # rows drawn from them even larger. So the shift of a draw, `moved`, counts in the opposite direction, and the
    # lower end is reduced by the error that calibrated scores show by `chance`. It is 0 if calibrated scores may show
    # as large an error.
    low, high = percentile_interval(error - moved, confidence) or (error, error)
    low = min(low, error - float(chance.mean())) if error > np.quantile(chance, confidence) else 0.0
    return max(low, 0.0), min(max(high, error), 1.0)


def _groups(
    scores: Float64Array, truth: BoolArray, ranking: Ranking, edges: Sequence[Float64Array]
) -> tuple[Float64Array, Float64Array, Int64Array, Int64Array]:
    # The scores in groups, highest first: largest score, mean scores [2, groups] of positive and negative, counts.
    distinct = ranking.thresholds[::-1]
    tops = distinct
    if len(distinct) > _MOST_GROUPS:
        shares = np.linspace(0, 1, _MOST_GROUPS + 1)
        cuts = np.concatenate([np.quantile(scores, shares), *edges])
        # a group's top is an existing score, so it lies in the bins of the group's rows
        tops = distinct[np.unique(np.searchsorted(distinct, cuts, side="right").clip(1) - 1)]
    places = len(tops) - 1 - np.searchsorted(tops, scores)
    positives, negatives = (np.bincount(places[kind], minlength=len(tops)) for kind in (truth, ~truth))
    sums = [np.bincount(places[kind], weights=scores[kind], minlength=len(tops)) for kind in (truth, ~truth)]
    means = np.array([total / np.maximum(rows, 1) for total, rows in zip(sums, (positives, negatives), strict=True)])
    return tops[::-1], means, positives, negatives


def _average_precisions(positives: Int64Array, negatives: Int64Array) -> Float64Array:
    found = positives.cumsum(axis=1)
    above = np.maximum(found + negatives.cumsum(axis=1), 1)
    total = found[:, -1]
    with np.errstate(invalid="ignore"):
        values: Float64Array = (positives * (found / above)).sum(axis=1) / np.where(total, total, np.nan)
    return values


def _calibration_errors(places: Int64Array, means: Float64Array) -> Figure:
    # For groups in these bins with these mean scores [2, groups] of positive and negative rows.
    in_bin = (places[:, None] == np.unique(places)).astype(np.float64)

    def errors(positives: Int64Array, negatives: Int64Array) -> Float64Array:
        # Sum of scores minus number of positive rows: over a bin, its rows times (mean score - share).
        excess = positives * (means[0] - 1) + negatives * means[1]
        rows = positives.sum(axis=1) + negatives.sum(axis=1)
        return np.asarray(np.abs(excess @ in_bin).sum(axis=1) / rows, np.float64)

    return errors


def _check(probabilities: Float64Array, truth: npt.NDArray[Any], labels: Sequence[Any], *, dimensions: int) -> None:
    if probabilities.ndim != dimensions or len(probabilities) != len(truth):
        raise ValueError(f"probabilities {probabilities.shape} for {len(truth)} answers")
    if dimensions == 2 and probabilities.shape[1] != len(labels):
        raise ValueError(f"{probabilities.shape[1]} probabilities a row for {len(labels)} labels")
    if not ((probabilities >= 0) & (probabilities <= 1)).all():
        raise ValueError("a probability is from 0 to 1")

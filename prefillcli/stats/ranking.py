"""Rows ranked by their scores: what each threshold gives, and how well the order separates positives from negatives.

A row counts as found at a threshold if its score is at or above it. Rows with equal scores are found together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from prefillcli.stats.intervals import Float64Array, Int64Array, Interval, exact_interval

_MOST_POINTS = 200  # of a curve


class ThresholdFigures(BaseModel):
    """What a threshold gives: of the rows with scores at or above it, and of the positive ones among them."""

    model_config = ConfigDict(frozen=True)

    threshold: float
    rows: int  # with scores at or above it
    precision: float  # share of them that are positive
    recall: float  # share of the positive rows that are among them
    f1: float


class RocCurve(BaseModel):
    """Points from (0, 0) to (1, 1); of many, those that draw the curve."""

    model_config = ConfigDict(frozen=True)

    false_positive_rate: list[float]
    true_positive_rate: list[float]


class PrecisionRecallCurve(BaseModel):
    """Points from the highest threshold to the lowest; of many, those that draw the curve."""

    model_config = ConfigDict(frozen=True)

    recall: list[float]
    precision: list[float]


@dataclass(frozen=True, slots=True)
class Ranking:
    """Counts of rows at every threshold. Curves and averages need both positive and negative rows."""

    thresholds: Float64Array
    """The distinct scores, highest first [thresholds]."""
    true_positives: Int64Array
    """Positive rows at or above each threshold [thresholds]."""
    false_positives: Int64Array
    """Negative rows at or above each threshold [thresholds]."""

    @classmethod
    def of(cls, scores: Float64Array, positive: npt.NDArray[np.bool_]) -> Ranking:
        """Of finite scores [rows], `positive` or not [rows]. Raises ValueError if the lengths differ."""
        if len(scores) != len(positive):
            raise ValueError(f"{len(scores)} scores for {len(positive)} answers")
        order = np.argsort(scores)[::-1]
        ranked = scores[order]
        ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], [True] * bool(len(ranked))))
        found = np.cumsum(positive[order], dtype=np.int64)[ends]
        return cls(ranked[ends], found, ends + 1 - found)

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
        equal, equal_negatives = self._steps()
        above = self.true_positives - equal
        return int((equal_negatives * (2 * above + equal)).sum()) / (2 * self.positives * self.negatives)

    def area_interval(self, confidence: float = 0.95) -> Interval | None:
        """The interval of the area by DeLong's variance (Biometrics 44, 1988), on the logit's scale.

        Where the rows show no variance, as those that are perfectly separated, it is the exact interval of as many
        trials as the rarer kind has rows: the area varies at most so much (Birnbaum and Klose, 1957).
        """
        area = self.area
        if area is None:
            return None
        variance = self._area_variance(area)
        rarer = min(self.positives, self.negatives)
        if variance <= 0 or not 0 < area < 1:
            return exact_interval(area * rarer, rarer, confidence)
        from scipy.special import expit, logit, ndtri

        reach = float(ndtri((1 + confidence) / 2)) * math.sqrt(variance) / (area * (1 - area))
        return float(expit(logit(area) - reach)), float(expit(logit(area) + reach))

    @property
    def average_precision(self) -> float | None:
        """The mean precision over the steps of recall; None without positive rows."""
        if not self.positives:
            return None
        equal, _ = self._steps()
        return float((equal * self._precision()).sum() / self.positives)

    def best_f1(self) -> ThresholdFigures | None:
        """The threshold with the largest F1, the highest of equal ones; None without positive rows."""
        if not self.positives:
            return None
        f1 = 2 * self.true_positives / (self.true_positives + self.false_positives + self.positives)
        return self._figures(int(f1.argmax()))

    def lowest_with_precision(self, wanted: float) -> ThresholdFigures | None:
        """The lowest threshold whose precision is at least `wanted`; None where no threshold reaches it."""
        reached = np.flatnonzero(self._precision() >= wanted)
        return self._figures(int(reached[-1])) if len(reached) and self.positives else None

    def most_precise(self) -> ThresholdFigures | None:
        """The lowest threshold with the largest precision; None without positive rows."""
        return self.lowest_with_precision(float(self._precision().max())) if self.positives else None

    def roc_curve(self) -> RocCurve | None:
        """None unless there are rows of both kinds."""
        if not self.positives or not self.negatives:
            return None
        points = self._drawn()
        return RocCurve(
            false_positive_rate=[0.0, *(self.false_positives[points] / self.negatives).tolist()],
            true_positive_rate=[0.0, *(self.true_positives[points] / self.positives).tolist()],
        )

    def precision_recall_curve(self) -> PrecisionRecallCurve | None:
        """None without positive rows."""
        if not self.positives:
            return None
        points = self._drawn()
        return PrecisionRecallCurve(
            recall=(self.true_positives[points] / self.positives).tolist(),
            precision=self._precision()[points].tolist(),
        )

    def _steps(self) -> tuple[Int64Array, Int64Array]:
        """Positive and negative rows with exactly the score of each threshold."""
        return np.diff(self.true_positives, prepend=0), np.diff(self.false_positives, prepend=0)

    def _precision(self) -> Float64Array:
        precision: Float64Array = self.true_positives / (self.true_positives + self.false_positives)
        return precision

    def _area_variance(self, area: float) -> float:
        """NaN-free: 0 where a kind has fewer than two rows."""
        if min(self.positives, self.negatives) < 2:
            return 0.0
        equal, equal_negatives = self._steps()
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
        """Thresholds that are evenly spaced along the ROC curve, with the last."""
        along = self.true_positives / max(self.positives, 1) + self.false_positives / max(self.negatives, 1)
        wanted = np.linspace(along[0], along[-1], _MOST_POINTS)
        points: Int64Array = np.unique(np.searchsorted(along, wanted).clip(max=len(along) - 1))
        return points


def auc(scores: npt.ArrayLike, positive: npt.ArrayLike) -> float | None:
    """The area under the ROC curve of finite scores, from the rank sum (Mann and Whitney); a tie counts half.

    None unless there are both positive and negative rows. Raises ValueError if the lengths differ.
    """
    return Ranking.of(np.asarray(scores, np.float64), np.asarray(positive, np.bool_)).area

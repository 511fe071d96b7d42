"""The share of rows with an answer in a finite file, by labelled rows and by guesses about all rows.

The labelled rows are drawn at random, without replacement. Guesses come from a cheaper reader; nothing is assumed of
them. The estimate is that of prediction-powered inference (PPI++: Angelopoulos, Duchi and Zrnic 2023, arXiv
2311.01453), which for a finite population is the difference estimator of survey sampling (Cochran, Sampling
Techniques, 1977, section 7):

    share = mean(y) + weight * (1 - n / N) * (mean of guesses of the other rows - mean of guesses of labelled rows)

with `y` of the n labelled rows of N. As the file is finite and every guess is known, its variance is that of the
labelled rows' residuals y - weight * guess alone, times (1 - n / N) / n. The weight, from 0 to 1, is the one with the
smallest variance (equation 6 of PPI++); 0 is the plain estimate. So the variance is never larger than the plain one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from prefillcli.engines.base import Readings
from prefillcli.stats.evaluation import Float64Array, Interval, exact_interval
from prefillcli.stats.ridge import ridge

CONFIDENCE: Final = 0.95
_Z: Final = 1.959963984540054  # the 97.5 % point of the normal distribution
# With fewer labelled rows that have the answer, or that have not, the plain interval is exact, and no guess is used:
# a variance of so few rows says little.
_FEW: Final = 10


class Share(NamedTuple):
    """A share of all rows, its interval, and the weight of the guesses in it."""

    value: float
    interval: Interval
    weight: float = 0.0


def plain_share(hits: float, rows: float, population: float) -> Share:
    """The share by the labelled `rows` alone, `hits` of which have the answer, from so many rows in the file.

    The interval is Wilson's (JASA 22, 1927), with the correction for a finite population: the variance of the share is
    smaller by (N - n) / (N - 1). With few hits or misses it is that of Clopper and Pearson.
    """
    value = hits / rows
    if rows >= population:
        return Share(value, (value, value))
    if min(hits, rows - hits) < _FEW:
        return Share(value, _known(exact_interval(hits, rows, CONFIDENCE), hits, rows, population))
    worth = rows * (population - 1) / (population - rows)  # rows of an infinite file that say as much
    shrink = 1 + _Z**2 / worth
    centre = (value + _Z**2 / (2 * worth)) / shrink
    half = _Z / shrink * math.sqrt(value * (1 - value) / worth + _Z**2 / (4 * worth**2))
    return Share(value, _known((centre - half, centre + half), hits, rows, population))


def guided_share(truth: Float64Array, guesses: Float64Array, others: float, population: float) -> Share:
    """The share by labelled rows and guesses.

    `truth` [rows] is 1 for a labelled row that has the answer, else 0. `guesses` [rows] must not have been fitted to
    their own rows; `others` is the mean guess of the rows that are not labelled. If the plain interval is not wider,
    the result is the plain share.
    """
    rows, hits = len(truth), float(truth.sum())
    plain = plain_share(hits, rows, population)
    spread = float(np.var(guesses)) if rows else 0.0
    if min(hits, rows - hits) < _FEW or rows >= population or not spread:
        return plain
    common = float(np.mean((truth - truth.mean()) * (guesses - guesses.mean())))
    weight = min(max(common / spread, 0.0), 1.0)
    left = 1 - rows / population
    value = plain.value + weight * left * (others - float(guesses.mean()))
    # Where guesses are nearly always right, a few hundred rows show none of the wrong ones, and the variance that they
    # show is far too small. Half of z^2 is added to the squares, as Wilson adds a quarter to those of one count: the
    # residuals err in both directions.
    squares = float(np.var(truth - weight * guesses)) * rows**2 / (rows - 2) + _Z**2 / 2
    half = _Z * math.sqrt(left * squares) / rows
    interval = _known((value - half, value + half), hits, rows, population)
    if interval[1] - interval[0] >= plain.interval[1] - plain.interval[0]:
        return plain
    return Share(min(max(value, interval[0]), interval[1]), interval, weight)


def corrected_share(chain: int, left: int, rows: int, audited: int, out: int, into: int) -> Share:
    """The share of an answer where cheaper readers have decided some rows, and an audit knows how these flip.

    `chain` of all `rows` have the answer in the output, `left` of all rows were decided early. Of the `audited` ones
    among these, `out` have the answer in full but not in the output, and `into` in the output but not in full. The
    interval is exact: each of the two shares has one of Clopper and Pearson, with half of the error.
    """
    half = (1 + CONFIDENCE) / 2
    (out_low, out_high), (into_low, into_high) = (exact_interval(each, audited, half) for each in (out, into))
    value, step = chain / rows, left / rows
    low, high = (min(max(value + step * each, 0.0), 1.0) for each in (out_low - into_high, out_high - into_low))
    return Share(min(max(value + step * (out - into) / audited, low), high), (low, high), 1.0)


def _known(interval: Interval, hits: float, rows: float, population: float) -> Interval:
    # The interval without shares that the labelled rows rule out, as they are rows of the file.
    return max(interval[0], hits / population), min(interval[1], 1 - (rows - hits) / population)


# Guesses of the model's answers, from cheaper readings of the same rows.


FOLDS: Final = 5
_SEED: Final = 20_263
_SCALES: Final = tuple(2.0**power for power in np.arange(-3, 4.1, 0.5))


class _Fold(NamedTuple):
    # A fit to all labelled rows but those of a fold: label logits are points @ weights + bias, of which the softmax is
    # taken at this scale. `usual` are the shares of the answers among its rows.
    weights: Float64Array
    bias: Float64Array
    scale: float
    usual: Float64Array

    def guess(self, points: Float64Array) -> Float64Array:
        seen = np.isfinite(points).all(axis=1)
        found = np.tile(self.usual, (len(points), 1))
        if seen.any():
            found[seen] = _softmax((points[seen] @ self.weights + self.bias) * self.scale)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Guesser:
    """Guesses probabilities of answers by the readings of one reader.

    Each labelled row has a guess by a fit to the other folds' rows, so that the labelled rows say how wrong guesses
    are (Zrnic and Candes, Cross-prediction-powered inference, 2024, PNAS 121). Another row has the mean guess of all
    fits.
    """

    reader: int
    own: bool  # whether it reads the labels' logits, not the hidden state
    folds: tuple[_Fold, ...]
    held_out: Float64Array  # [labelled rows, labels]

    def guess(self, readings: Sequence[Readings]) -> Float64Array:
        """Guesses [rows, labels] for rows that are not labelled, by the `readings` of each reader."""
        points = _points(readings[self.reader], self.own)
        return np.asarray(np.mean([fold.guess(points) for fold in self.folds], axis=0))


def fit_guesser(readings: Sequence[Readings], final: Float64Array) -> Guesser:
    """The guesser with the smallest squared error (Brier's) on left-out rows, by the `readings` of labelled rows by
    each reader and their `final` label log-probabilities [rows, labels]."""
    made = [_fitted(number, own, each, final) for number, each in enumerate(readings) for own in (False, True)]
    truth = indicators(final)
    return min(made, key=lambda each: float(np.mean((each.held_out - truth) ** 2)))


def indicators(final: Float64Array) -> Float64Array:
    """1 for the likeliest label of each row, else 0 [rows, labels]."""
    return np.asarray(np.arange(final.shape[1]) == final.argmax(axis=1)[:, None], np.float64)


def _fitted(reader: int, own: bool, readings: Readings, final: Float64Array) -> Guesser:
    points, truth = _points(readings, own), indicators(final)
    target = final - final.mean(axis=1, keepdims=True)
    seen = np.isfinite(points).all(axis=1)
    fold_of = np.random.default_rng(_SEED).permutation(len(final)) % FOLDS
    folds, held_out = [], np.zeros_like(truth)
    for number in range(FOLDS):
        rest = fold_of != number
        folds.append(_fold(points[rest & seen], target[rest & seen], truth[rest & seen], truth[rest].mean(axis=0)))
        held_out[~rest] = folds[-1].guess(points[~rest])
    return Guesser(reader, own, tuple(folds), held_out)


def _fold(points: Float64Array, target: Float64Array, truth: Float64Array, usual: Float64Array) -> _Fold:
    labels = target.shape[1]
    if len(points) < 2:
        logits = np.log(np.maximum(usual, 1e-9))
        return _Fold(np.zeros((points.shape[1], labels)), logits, 1.0, usual)
    found = ridge(points, target)
    errors = [float(np.mean((_softmax(found.held_out * scale) - truth) ** 2)) for scale in _SCALES]
    return _Fold(found.weights, found.bias, _SCALES[int(np.argmin(errors))], usual)


def _points(readings: Readings, own: bool) -> Float64Array:
    # The inputs of the fit [rows, inputs]; NaN where the reader could not read a row.
    values = np.asarray(readings.logits if own else readings.hidden, np.float64)
    if own:
        return np.asarray(values - values.mean(axis=1, keepdims=True))
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    return np.asarray(values / np.where(lengths > 0, lengths, 1))


def _softmax(logits: Float64Array) -> Float64Array:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))

"""What the numbers of a row's labels say: each label's score, and the probability of all labels together."""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]


class Measure(StrEnum):
    """What an engine's numbers for the labels of a row are."""

    SHARES = "shares"  # Log-probabilities of labels that exclude one another
    CHANCES = "chances"  # Log-probabilities of labels, each of which may be right, whatever the others are
    VALUES = "values"  # any numbers


def label_scores(numbers: Float64Array, temperature: float = 1.0, measure: Measure = Measure.SHARES) -> Float64Array:
    """The score of each label, float64 [..., labels]: a probability, or the number as it is if it is a value.

    Only shares have a `temperature`; see `label_probabilities`.
    """
    if measure is Measure.SHARES:
        return label_probabilities(numbers, temperature)
    scores: Float64Array = np.exp(numbers) if measure is Measure.CHANCES else numbers
    return scores


def label_probabilities(logprobs: Float64Array, temperature: float = 1.0) -> Float64Array:
    """Probability of each label among the labels after the temperature, float64 [..., labels]; the first is the score.

    `logprobs` [..., labels] are over the whole vocabulary. A row with a NaN, or without any finite value, gives NaN.
    """
    with np.errstate(invalid="ignore"):
        sharp = logprobs / temperature
        weights = np.exp(sharp - sharp.max(axis=-1, keepdims=True, initial=-np.inf))
        shares: Float64Array = weights / weights.sum(axis=-1, keepdims=True)
    return shares


def label_mass(logprobs: Float64Array) -> Float64Array:
    """Probability of all labels together over the whole vocabulary, float64 [...], at most 1 whatever was rounded."""
    mass: Float64Array = np.minimum(np.exp(logprobs).sum(axis=-1), 1.0)
    return mass


LEAST_LOG = -745.0  # logarithm of the smallest double: below it, a probability is 0


def log_shares_of(logprobs: Float64Array) -> Float64Array:
    """Logarithm of each label's probability among the labels, float64 [rows, labels]; finite, also where that is 0."""
    top = logprobs - logprobs.max(axis=-1, keepdims=True)
    shares: Float64Array = np.maximum(top - np.log(np.exp(top).sum(axis=-1, keepdims=True)), LEAST_LOG)
    return shares

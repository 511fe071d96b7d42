"""A row's numbers for its labels: what they mean, each label's score, and the probability of all labels together."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from prefillcli.stats.arrays import Float64Array


class Measure(StrEnum):
    """The meaning of an engine's numbers for the labels of a row."""

    SHARES = "shares"  # Log-probabilities of labels that exclude one another
    CHANCES = "chances"  # Log-probabilities of labels, each of which may be right independently of the others
    VALUES = "values"  # any numbers
    CHOICES = "choices"  # Log-probabilities of the row's own labels, which exclude one another
    DECISIONS = "decisions"  # the same after each of several prompts of a row, one for each of its questions
    LIKELIHOOD = "likelihood"  # the log-probability of a text of the row
    TOKENS = "tokens"  # log-probabilities of the likeliest tokens, the likeliest first


def label_scores(numbers: Float64Array, temperature: float = 1.0, measure: Measure = Measure.SHARES) -> Float64Array:
    """Return the score of each label, float64 [..., labels]: a probability, or the number itself if it is a value or a
    likelihood.

    Only shares have a `temperature`; see `label_probabilities`.
    """
    if measure in (Measure.SHARES, Measure.CHOICES, Measure.DECISIONS):
        return label_probabilities(numbers, temperature)
    apart = measure in (Measure.CHANCES, Measure.TOKENS)
    return np.asarray(np.exp(numbers), np.float64) if apart else numbers


def label_probabilities(logprobs: Float64Array, temperature: float = 1.0) -> Float64Array:
    """Return the probability of each label among the labels after the temperature, float64 [..., labels]; the first is
    the score.

    `logprobs` [..., labels] are over the whole vocabulary. A row with a NaN, or without any finite value, gives NaN.
    """
    with np.errstate(invalid="ignore"):
        sharp = logprobs / temperature
        # Subtracting the maximum leaves the shares as they are and keeps exp from overflowing.
        weights = np.exp(sharp - sharp.max(axis=-1, keepdims=True, initial=-np.inf))
        shares: Float64Array = weights / weights.sum(axis=-1, keepdims=True)
    return shares


#: Mean label mass of a question below which its answers are no better than guesses, as far as is known, and the one
#: from which on most of the probability is on them; docs/score.md has the measurement.
UNANSWERED_MASS, HALF_MASS = 0.1, 0.5


def label_mass(logprobs: Float64Array) -> Float64Array:
    """Return the probability of all labels together over the whole vocabulary, float64 [...], at most 1 despite
    rounding."""
    return np.asarray(np.minimum(np.exp(logprobs).sum(axis=-1), 1.0), np.float64)


def read_out(logprobs: Float64Array, temperature: float, weights: Sequence[Sequence[float]] = ()) -> Float64Array:
    """Return the probabilities of a question's options, float64 [..., options], by those of the labels that a prompt
    asks for [..., labels]: a label's probability goes to the options by its `weights` [labels][options]; without any,
    labels are options."""
    shares = label_probabilities(logprobs, temperature)
    return np.asarray(shares @ np.array(weights, np.float64)) if weights else shares


def normalised(shares: Float64Array) -> Float64Array:
    """Return shares [..., options] that add up to 1; all alike where each is 0."""
    total = shares.sum(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(total == 0, 1 / shares.shape[-1], shares / total))


LEAST_LOG = -745.0  # logarithm of the smallest double: below it, a probability is 0


def log_shares_of(logprobs: Float64Array) -> Float64Array:
    """Return the logarithm of each label's probability among the labels, float64 [rows, labels]; finite even if the
    probability is 0."""
    top = logprobs - logprobs.max(axis=-1, keepdims=True)
    return np.asarray(np.maximum(top - np.log(np.exp(top).sum(axis=-1, keepdims=True)), LEAST_LOG), np.float64)


def mean_log_shares(answers: Sequence[Float64Array], *, apart: bool = False) -> Float64Array:
    """Return the logarithm of each label's mean probability among the labels, float64 [rows, labels], over several
    `answers` [rows, labels] in log-probabilities; of those that tell one label each, `apart`."""
    if apart:
        with np.errstate(invalid="ignore"):
            return log_shares_of(np.logaddexp.reduce(list(answers)))
    return np.asarray(np.logaddexp.reduce([log_shares_of(each) for each in answers]) - np.log(len(answers)))

"""What label log-probabilities say: each label's probability among the labels, and that of all together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]


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

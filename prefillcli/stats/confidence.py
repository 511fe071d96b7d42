"""How sure an answer is, by the formulas that the APIs of typed decisions document."""

from __future__ import annotations

import numpy as np

from prefillcli.stats.arrays import Float64Array


def choice_confidence(probabilities: Float64Array) -> Float64Array:
    """Return the confidence [rows] of a choice with these probabilities [rows, options]: (max p - 1/n) / (1 - 1/n),
    from 0, where all options are alike, to 1. It is 1 for one option."""
    count = probabilities.shape[-1]
    if count == 1:
        return np.ones(probabilities.shape[:-1])
    found: Float64Array = np.maximum((probabilities.max(axis=-1) - 1 / count) / (1 - 1 / count), 0.0)
    return found


def score_confidence(probabilities: Float64Array) -> Float64Array:
    """Return the confidence [rows] of a level of a scale with these probabilities [rows, levels]: 1 - S / U, at least
    0. S is the mean distance from the likeliest level, and U that of equally likely levels from their middle."""
    levels = np.arange(probabilities.shape[-1])
    likeliest = probabilities.argmax(axis=-1)[..., None]
    spread = (probabilities * np.abs(levels - likeliest)).sum(axis=-1)
    even = np.abs(levels - (len(levels) - 1) / 2).mean()
    found: Float64Array = np.maximum(1 - spread / even, 0.0)
    return found

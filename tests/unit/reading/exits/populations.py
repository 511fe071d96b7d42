"""Made-up rows whose final answers show more and more clearly from layer to layer."""

from __future__ import annotations

import numpy as np

from prefillcli.engines.base import Readings
from prefillcli.reading.exits.proof import LearningRows

HIDDEN = 12
LAYERS = 8
NOISE = (3.0, 1.5, 0.6, 0.3, 0.15, 0.1, 0.05)  # of the margin that a layer before the last shows


def population(
    rows: int, *, labels: int = 2, seed: int = 0, offset: float = 0.0, blind: bool = False, heavy: bool = False
) -> LearningRows:
    """`rows` with final logits of a standard normal distribution, the first label's `offset` higher.

    The model is always the same; `seed` draws the rows. A `blind` model's hidden states know nothing of the answer.
    With `heavy` tails a few rows are far off in any layer.
    """
    draws, model = np.random.default_rng(seed), np.random.default_rng(99)
    final = draws.normal(0, 1, (rows, labels)) + np.array([offset] + [0.0] * (labels - 1))
    directions = np.linalg.qr(model.normal(0, 1, (HIDDEN, HIDDEN)))[0]
    readings = {}
    before = draws.normal(0, 1, (rows, labels))
    for layer, noise in enumerate(NOISE):
        off = draws.standard_t(2.5, (rows, labels)) if heavy else draws.normal(0, 1, (rows, labels))
        seen = draws.normal(0, 1, (rows, labels)) if blind else final + noise * off
        rest = draws.normal(0, 1, (rows, HIDDEN - labels - 1))
        hidden = np.column_stack([seen, rest, np.full(rows, 8.0)]) @ directions
        lens = seen @ model.normal(0, 1, (labels, labels)) + model.normal(0, 3, labels)
        readings[layer] = Readings(hidden.astype(np.float32), lens, before)
        before = lens
    logprobs = final - np.log(np.exp(final).sum(axis=1, keepdims=True)) - 1.0
    return LearningRows(readings, logprobs, np.full(rows, 100.0))

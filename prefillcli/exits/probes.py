"""What predicts a row's final answer from its readings at one layer."""

from __future__ import annotations

from typing import Protocol

from prefillcli.exits.layer_readings import Float64Array, Readings


class Probe(Protocol):
    """A small predictor of final answers, fitted for one layer and one set of labels."""

    def logits(self, readings: Readings) -> Float64Array:
        """Predicted final label logits, float64 [rows, labels], up to a constant for each row."""

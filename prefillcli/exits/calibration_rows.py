"""Rows of a job that were read in full, for its exits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefillcli.exits.layer_readings import Float64Array, Readings

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False, slots=True)
class CalibrationRows:
    """Rows of a job that were read in full.

    `readings` are what they show after each observed layer, numbered from 0. `final` are the label log-probabilities
    of the full read, float64 [rows, labels]. `weights` [rows] are the tokens that each row pays for by itself, one or
    more.
    """

    readings: Mapping[int, Readings]
    final: Float64Array
    weights: Float64Array

    def __len__(self) -> int:
        return len(self.final)

    @property
    def truth(self) -> IntArray:
        """The label that the full read gives, int64 [rows]."""
        truth: IntArray = self.final.argmax(axis=1)
        return truth

    @property
    def labels(self) -> int:
        return int(self.final.shape[1])

    def chosen(self, rows: IntArray | BoolArray) -> CalibrationRows:
        """Some of the rows."""
        readings = {
            layer: Readings(each.hidden[rows], each.logits[rows], each.before[rows])
            for layer, each in self.readings.items()
        }
        return CalibrationRows(readings, self.final[rows], self.weights[rows])

    def sound(self) -> BoolArray:
        """Which rows have finite values only [rows]."""
        sound: BoolArray = np.ones(len(self), dtype=np.bool_)
        shown = [
            each for readings in self.readings.values() for each in (readings.hidden, readings.logits, readings.before)
        ]
        for values in (self.final, *shown):
            sound &= np.isfinite(values).all(axis=1)
        return sound


def halves(rows: CalibrationRows, seed: int) -> tuple[CalibrationRows, CalibrationRows]:
    """Two halves with half of each class, drawn with `seed`: a row's half depends on nothing but its class and luck.

    Of an odd number the second half has one more.
    """
    draws = np.random.default_rng(seed)
    fit: list[IntArray] = []
    for label in range(rows.labels):
        own = draws.permutation(np.flatnonzero(rows.truth == label))
        fit.append(own[: len(own) // 2])
    first = np.sort(np.concatenate(fit))
    return rows.chosen(first), rows.chosen(np.setdiff1d(np.arange(len(rows)), first))

"""Which rows leave after which layers, and with what answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prefillcli.exits.layer_readings import Float64Array, Readings
from prefillcli.exits.probes import Probe


@dataclass(frozen=True, slots=True)
class ExitLayer:
    """A layer after which rows may leave.

    Layers are numbered from 0. A row leaves if the predicted logit of its likeliest label is ahead of the next one by
    `thresholds` of that label or more; infinity: never. With `peek` only the last tokens go through the layer
    before that is decided.
    """

    layer: int
    probe: Probe
    thresholds: tuple[float, ...]
    peek: bool = True


class Decisions(NamedTuple):
    """Which rows are decided [rows], and the label log-probabilities, among the labels alone, that they leave with
    [rows, labels]."""

    decided: npt.NDArray[np.bool_]
    logprobs: Float64Array


@dataclass(frozen=True, slots=True)
class ExitPolicy:
    """The exits of a job, in the order of the layers."""

    exits: tuple[ExitLayer, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(each.layer for each in self.exits)

    def at(self, layer: int) -> ExitLayer:
        """The exit after a layer. Raises KeyError if there is none."""
        for each in self.exits:
            if each.layer == layer:
                return each
        raise KeyError(layer)

    def decide(self, layer: int, readings: Readings) -> Decisions:
        """Who leaves after this layer."""
        own = self.at(layer)
        predicted = own.probe.logits(readings)
        best = predicted.argmax(axis=1)
        ahead = np.diff(np.partition(predicted, -2, axis=1)[:, -2:], axis=1)[:, 0]
        highest = predicted.max(axis=1, keepdims=True)
        total = highest + np.log(np.exp(predicted - highest).sum(axis=1, keepdims=True))
        return Decisions(ahead >= np.asarray(own.thresholds)[best], predicted - total)

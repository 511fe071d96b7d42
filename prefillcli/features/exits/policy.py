"""Which rows leave after which layers, and with what answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prefillcli.engines.base import Readings
from prefillcli.features.exits.probes import Float64Array, Probe, probe_of


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


class Lead(NamedTuple):
    """The likeliest label of each row, int64 [rows], and how far its logit is ahead of the next one [rows]."""

    label: npt.NDArray[np.int64]
    ahead: Float64Array


def lead_of(logits: Float64Array) -> Lead:
    """The lead of label logits [rows, labels]."""
    two = np.partition(logits, -2, axis=1)[:, -2:]
    return Lead(logits.argmax(axis=1), two[:, 1] - two[:, 0])


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

    def peeks(self, layer: int) -> bool:
        """As `LeavingRule`."""
        return self.at(layer).peek

    def guess(self, layer: int, readings: Readings) -> tuple[Float64Array, Sequence[float]]:
        """As `LeavingRule`."""
        own = self.at(layer)
        return own.probe.logits(readings), own.thresholds

    def decide(self, layer: int, readings: Readings) -> Decisions:
        """Who leaves after this layer."""
        own = self.at(layer)
        predicted = own.probe.logits(readings)
        lead = lead_of(predicted)
        highest = predicted.max(axis=1, keepdims=True)
        total = highest + np.log(np.exp(predicted - highest).sum(axis=1, keepdims=True))
        return Decisions(lead.ahead >= np.asarray(own.thresholds)[lead.label], predicted - total)

    def to_json(self) -> list[dict[str, Any]]:
        """What `policy_of` makes the same policy of. A threshold of infinity is null."""
        return [
            {
                "layer": each.layer,
                "peek": each.peek,
                "thresholds": [None if math.isinf(value) else value for value in each.thresholds],
                "probe": each.probe.to_json(),
            }
            for each in self.exits
        ]


def policy_of(written: Sequence[Mapping[str, Any]]) -> ExitPolicy:
    """The policy that `ExitPolicy.to_json` wrote. Raises ValueError if it did not write this."""
    try:
        exits = tuple(
            ExitLayer(
                layer=int(each["layer"]),
                probe=probe_of(each["probe"]),
                thresholds=tuple(math.inf if value is None else float(value) for value in each["thresholds"]),
                peek=bool(each["peek"]),
            )
            for each in written
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"an exit layer is damaged: {error}") from None
    layers = [each.layer for each in exits]
    if layers != sorted(set(layers)) or any(layer < 0 for layer in layers):
        raise ValueError(f"the exit layers {layers} do not rise")
    if any(not value >= 0 for each in exits for value in each.thresholds):
        raise ValueError("a threshold is not a number of 0 or more")
    return ExitPolicy(exits)

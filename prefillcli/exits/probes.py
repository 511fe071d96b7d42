"""What predicts a row's final answer from its readings at one layer.

Three kinds are tried for each layer; cross-validation chooses (`prefillcli.exits.probe_fits`):

- `ridge` reads the hidden state, brought to unit length. It finds an answer before the model's own head can read it.
- `affine` reads the label logits of the model's own norm and head: they need another scale and another offset at each
  layer ("tuned lens", Belrose et al. 2023, arXiv 2303.08112, in its smallest form).
- `mlp` reads what SpecEE's predictor reads (arXiv 2504.08850, section 4.3): the label logits, their softmax among the
  labels, and how the layer has changed that softmax; 512 hidden units with ReLU. SpecEE predicts whether to exit, this
  one the final label logits.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import numpy as np

from prefillcli.exits.layer_readings import Float32Array, Float64Array, Readings


class Probe(Protocol):
    """A small predictor of final answers, fitted for one layer and one set of labels."""

    @property
    def kind(self) -> str:
        """Its name in `PROBES`."""

    @property
    def labels(self) -> int:
        """How many labels it predicts."""

    def logits(self, readings: Readings) -> Float64Array:
        """Predicted final label logits, float64 [rows, labels], up to a constant for each row."""

    def to_json(self) -> dict[str, Any]:
        """What `probe_of` makes the same probe of."""


@dataclass(frozen=True, eq=False, slots=True)
class RidgeProbe:
    """A linear map of the hidden state of unit length: `weights` [hidden, labels] and `bias` [labels]."""

    weights: Float32Array
    bias: Float32Array
    kind: ClassVar[str] = "ridge"

    @property
    def labels(self) -> int:
        """As `Probe`."""
        return self.bias.size

    def logits(self, readings: Readings) -> Float64Array:
        """As `Probe`."""
        found: Float64Array = unit_length(readings.hidden) @ self.weights.astype(np.float64) + self.bias
        return found

    def to_json(self) -> dict[str, Any]:
        """As `Probe`."""
        return _written(self.kind, weights=self.weights, bias=self.bias)


@dataclass(frozen=True, eq=False, slots=True)
class AffineProbe:
    """A linear map of the label logits, less their mean: `weights` [labels, labels] and `bias` [labels]."""

    weights: Float32Array
    bias: Float32Array
    kind: ClassVar[str] = "affine"

    @property
    def labels(self) -> int:
        """As `Probe`."""
        return self.bias.size

    def logits(self, readings: Readings) -> Float64Array:
        """As `Probe`."""
        found: Float64Array = relative(readings.logits) @ self.weights.astype(np.float64) + self.bias
        return found

    def to_json(self) -> dict[str, Any]:
        """As `Probe`."""
        return _written(self.kind, weights=self.weights, bias=self.bias)


@dataclass(frozen=True, eq=False, slots=True)
class MlpProbe:
    """Two linear maps of `lens_features` with a ReLU between them.

    `inner` [3 * labels, units] and `inner_bias` [units], `outer` [units, labels] and `outer_bias` [labels].
    """

    inner: Float32Array
    inner_bias: Float32Array
    outer: Float32Array
    outer_bias: Float32Array
    kind: ClassVar[str] = "mlp"

    @property
    def labels(self) -> int:
        """As `Probe`."""
        return self.outer_bias.size

    def logits(self, readings: Readings) -> Float64Array:
        """As `Probe`."""
        active = np.maximum(lens_features(readings) @ self.inner.astype(np.float64) + self.inner_bias, 0)
        found: Float64Array = active @ self.outer.astype(np.float64) + self.outer_bias
        return found

    def to_json(self) -> dict[str, Any]:
        """As `Probe`."""
        return _written(
            self.kind, inner=self.inner, inner_bias=self.inner_bias, outer=self.outer, outer_bias=self.outer_bias
        )


PROBES: Final[Mapping[str, Callable[..., Probe]]] = {each.kind: each for each in (RidgeProbe, AffineProbe, MlpProbe)}


def probe_of(written: Mapping[str, Any]) -> Probe:
    """The probe that `to_json` wrote. Raises ValueError if it did not write this."""
    kind = written.get("kind")
    if not isinstance(kind, str) or kind not in PROBES:
        raise ValueError(f"{kind!r} is not a kind of probe")
    arrays = {name: _array(value) for name, value in written.items() if name != "kind"}
    try:
        probe = PROBES[kind](**arrays)
    except TypeError:
        raise ValueError(f"a probe {kind} does not consist of {', '.join(arrays) or 'nothing'}") from None
    _check_shapes(probe)
    return probe


def unit_length(hidden: Float32Array) -> Float64Array:
    """Hidden states [rows, hidden] of length 1; what is 0 stays 0."""
    wide = hidden.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    found: Float64Array = wide / np.where(lengths > 0, lengths, 1)
    return found


def relative(logits: Float64Array) -> Float64Array:
    """Label logits [rows, labels] less their mean over the labels."""
    found: Float64Array = logits - logits.mean(axis=1, keepdims=True)
    return found


def lens_features(readings: Readings) -> Float64Array:
    """SpecEE's features [rows, 3 * labels]: label logits, softmax among the labels, and its change in the layer."""
    shares = _softmax(readings.logits)
    return np.concatenate([readings.logits, shares, shares - _softmax(readings.before)], axis=1)


def _softmax(logits: Float64Array) -> Float64Array:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    found: Float64Array = powers / powers.sum(axis=1, keepdims=True)
    return found


def _written(kind: str, **arrays: Float32Array) -> dict[str, Any]:
    return {"kind": kind} | {
        name: {
            "shape": list(array.shape),
            "float32": base64.b64encode(np.ascontiguousarray(array, dtype="<f4").tobytes()).decode(),
        }
        for name, array in arrays.items()
    }


def _array(written: Any) -> Float32Array:
    """An array that `_written` wrote. Raises ValueError if it is damaged."""
    try:
        shape = tuple(int(size) for size in written["shape"])
        values = np.frombuffer(base64.b64decode(written["float32"], validate=True), dtype="<f4")
        array = values.astype(np.float32).reshape(shape)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ValueError(f"an array of the probe is damaged: {error}") from None
    if not np.isfinite(array).all():
        raise ValueError("an array of the probe is damaged: it has values that are not finite")
    return array


def _check_shapes(probe: Probe) -> None:
    """Raise ValueError unless the arrays of a probe fit together."""
    if isinstance(probe, MlpProbe):
        maps = [(probe.inner, probe.inner_bias), (probe.outer, probe.outer_bias)]
        fits = probe.inner.shape[:1] == (3 * probe.labels,) and probe.outer.shape[:1] == probe.inner_bias.shape
    elif isinstance(probe, RidgeProbe | AffineProbe):
        maps = [(probe.weights, probe.bias)]
        fits = isinstance(probe, RidgeProbe) or probe.weights.shape[:1] == (probe.labels,)
    else:
        return
    if not fits or probe.labels < 2 or any(map.ndim != 2 or map.shape[1:] != bias.shape for map, bias in maps):
        raise ValueError(f"the arrays of a probe {probe.kind} do not fit together")

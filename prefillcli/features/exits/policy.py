"""What predicts a row's final answer from its readings at one layer.

Three kinds are tried for each layer; cross-validation chooses:

- `ridge` reads the hidden state, brought to unit length. It finds an answer before the model's own head can read it.
- `affine` reads the label logits of the model's own norm and head: they need another scale and another offset at each
  layer ("tuned lens", Belrose et al. 2023, arXiv 2303.08112, in its smallest form).
- `mlp` reads what SpecEE's predictor reads (arXiv 2504.08850, section 4.3): the label logits, their softmax among the
  labels, and how the layer has changed that softmax; 512 hidden units with ReLU. SpecEE predicts whether to exit, this
  one the final label logits."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from prefillcli.engines.base import Readings

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]


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
    # An array that `_written` wrote. Raises ValueError if it is damaged.
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
    # Raise ValueError unless the arrays of a probe fit together.
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


# Fitting probes to rows with final answers, and what they say of rows that they were not fitted to.


# Ridge strengths that are tried, in units of the hidden states' total variance.
STRENGTHS: Final = tuple(10.0**power for power in np.arange(-7, 1.1, 0.5))
FOLDS = 5  # of the probes without a formula for leaving one out
UNITS = 512  # as in SpecEE
_NEAR = 1.25
# A probe knows something if its error is at most this share of what the mean answer is off by.
KNOWS: Final = 0.9
_DECAY = 1e-3  # of the network's weights
_STEPS = 60  # of L-BFGS

IntArray = npt.NDArray[np.int64]


class FittedProbe(NamedTuple):
    """A probe, and the label logits that probes of its kind predict for rows that were left out, less their mean
    [rows, labels]."""

    probe: Probe
    held_out: Float64Array


def fit_best(readings: Readings, final: Float64Array, seed: int) -> tuple[FittedProbe, dict[str, float]]:
    """The kind of probe with the smallest squared error on left-out rows, and the error of each kind.

    `final` [rows, labels] are the final label log-probabilities. An error is the root of the mean square of what a
    margin between two labels is off by. The network, which takes longest, is left out where the label logits that it
    reads tell little, by themselves or beside the hidden state: where the affine probe does not know the answer, or
    its error is more than 1.25 times that of the ridge.
    """
    target = relative(final)
    fits: dict[str, FittedProbe] = {}
    errors: dict[str, float] = {}
    for kind, fit in FITS.items():
        if kind == MlpProbe.kind and errors[AffineProbe.kind] > min(
            _NEAR * errors[RidgeProbe.kind], KNOWS * margin_error(target - target.mean(axis=0))
        ):
            continue
        fits[kind] = fit(readings, target, seed)
        errors[kind] = margin_error(fits[kind].held_out - target)
    return fits[min(errors, key=lambda kind: errors[kind])], errors


def fit_ridge(readings: Readings, target: Float64Array, seed: int = 0) -> FittedProbe:
    """Ridge regression from hidden states to relative logits `target` [rows, labels], with a free intercept.

    The strength is the one with the smallest squared error where each row is left out in turn. One decomposition of
    the smaller Gram matrix, that of the rows (the dual form) or that of the hidden units, gives the fits of all
    strengths and, by the diagonal of the hat matrix, exactly what they say of left-out rows.
    """
    points = unit_length(readings.hidden)
    centre, mean = points.mean(axis=0), target.mean(axis=0)
    points = points - centre
    left, values = _decomposed(points)
    aims = left.T @ (target - mean)
    total = max(float(values.sum()), np.finfo(np.float64).tiny)
    best, strength = np.inf, 0.0
    held_out: Float64Array = np.zeros_like(target)
    for share in STRENGTHS:
        shrunk = values / (values + share * total)
        off = target - mean - left @ (shrunk[:, None] * aims)
        alone = 1 - 1 / len(points) - (left**2) @ shrunk
        off /= np.maximum(alone, 1e-9)[:, None]
        error = float(np.mean(off**2))
        if error < best:
            best, held_out, strength = error, target - off, share * total
    weights = points.T @ (left @ (aims / (values + strength)[:, None]))
    return FittedProbe(RidgeProbe(_single(weights), _single(mean - centre @ weights)), held_out)


def fit_affine(readings: Readings, target: Float64Array, seed: int = 0) -> FittedProbe:
    """Least squares from relative label logits to relative logits `target` [rows, labels]."""
    lens = np.column_stack([relative(readings.logits), np.ones(len(target))])

    def solve(rows: IntArray) -> Float64Array:
        found: Float64Array = np.asarray(np.linalg.lstsq(lens[rows], target[rows], rcond=1e-9)[0], dtype=np.float64)
        return found

    held_out = _folded(target, seed, lambda rows, rest: lens[rest] @ solve(rows))
    found = solve(np.arange(len(target)))
    return FittedProbe(AffineProbe(_single(found[:-1]), _single(found[-1])), held_out)


def fit_mlp(readings: Readings, target: Float64Array, seed: int = 0) -> FittedProbe:
    """A network of SpecEE's size from its features to relative logits `target` [rows, labels], by L-BFGS."""
    features = lens_features(readings)

    def predict(rows: IntArray, rest: IntArray) -> Float64Array:
        held = Readings(readings.hidden[rest], readings.logits[rest], readings.before[rest])
        return _trained(features[rows], target[rows], seed).logits(held)

    return FittedProbe(_trained(features, target, seed), _folded(target, seed, predict))


# How each kind of `prefillcli.features.exits.policy.PROBES` is fitted.
FITS: Final[Mapping[str, Callable[[Readings, Float64Array, int], FittedProbe]]] = {
    RidgeProbe.kind: fit_ridge,
    AffineProbe.kind: fit_affine,
    MlpProbe.kind: fit_mlp,
}


def margin_error(off: Float64Array) -> float:
    """What a margin between two labels is off by, where relative logits are `off` [rows, labels]: root mean square."""
    labels = off.shape[1]
    return float(np.sqrt(2 * np.mean(off**2) * labels / (labels - 1)))  # the errors of a row's labels add up to 0


def _decomposed(points: Float64Array) -> tuple[Float64Array, Float64Array]:
    # Left singular vectors [rows, rank] of points [rows, hidden], and the squares of the singular values.
    rows, hidden = points.shape
    gram = points @ points.T if rows <= hidden else points.T @ points
    values, vectors = np.linalg.eigh(gram)
    known = values > max(float(values[-1]), 0.0) * 1e-12
    values, vectors = values[known], vectors[:, known]
    left = vectors if rows <= hidden else points @ (vectors / np.sqrt(values))
    return left, values


def _folded(target: Float64Array, seed: int, predict: Callable[[IntArray, IntArray], Float64Array]) -> Float64Array:
    # What `predict(rows to fit, rows left out)` says of all rows, each left out once.
    order = np.random.default_rng(seed).permutation(len(target))
    found = np.zeros_like(target)
    for fold in range(min(FOLDS, len(target))):
        rest = order[fold::FOLDS]
        rows = np.setdiff1d(order, rest)
        found[rest] = predict(rows, rest)
    return found


def _trained(features: Float64Array, target: Float64Array, seed: int) -> MlpProbe:
    from scipy.optimize import minimize

    centre, width = features.mean(axis=0), np.maximum(features.std(axis=0), 1e-6)
    mean, scale = target.mean(axis=0), max(float(target.std()), 1e-6)
    points, aims = ((features - centre) / width).astype(np.float32), ((target - mean) / scale).astype(np.float32)
    inputs, labels = points.shape[1], aims.shape[1]
    sizes = np.cumsum([inputs * UNITS, UNITS, UNITS * labels])

    def parts(flat: Any) -> list[Any]:
        inner, inner_bias, outer, outer_bias = np.split(flat, sizes)
        return [inner.reshape(inputs, UNITS), inner_bias, outer.reshape(UNITS, labels), outer_bias]

    def loss(flat: Float64Array) -> tuple[float, Float64Array]:
        inner, inner_bias, outer, outer_bias = parts(flat.astype(np.float32))
        active = np.maximum(points @ inner + inner_bias, 0)
        off = active @ outer + outer_bias - aims
        back = off * np.float32(2 / off.size)
        down = (back @ outer.T) * (active > 0)
        slopes = [points.T @ down, down.sum(axis=0), active.T @ back, back.sum(axis=0)]
        gradient = np.concatenate([each.ravel() for each in slopes]).astype(np.float64)
        return float(np.mean(off**2)) + _DECAY * float(flat @ flat) / 2, gradient + _DECAY * flat

    draws = np.random.default_rng(seed)
    start = np.concatenate(
        [
            draws.normal(0, np.sqrt(2 / inputs), inputs * UNITS),
            np.zeros(UNITS),
            draws.normal(0, np.sqrt(1 / UNITS), UNITS * labels) * 0.1,
            np.zeros(labels),
        ]
    )
    found = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": _STEPS})
    inner, inner_bias, outer, outer_bias = parts(found.x)
    inner = inner / width[:, None]
    return MlpProbe(
        _single(inner),
        _single(inner_bias - centre @ inner),
        _single(outer * scale),
        _single(outer_bias * scale + mean),
    )


def _single(values: Float64Array) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(values, dtype=np.float32)


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

"""Fitting probes to rows with final answers, and what they say of rows that they were not fitted to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from prefillcli.exits.layer_readings import Float64Array, Readings
from prefillcli.exits.probes import (
    AffineProbe,
    MlpProbe,
    Probe,
    RidgeProbe,
    lens_features,
    relative,
    unit_length,
)

STRENGTHS: Final = tuple(10.0**power for power in np.arange(-7, 1.1, 0.5))
"""Ridge strengths that are tried, in units of the hidden states' total variance."""
FOLDS = 5  # of the probes without a formula for leaving one out
UNITS = 512  # as in SpecEE
_NEAR = 1.25
KNOWS: Final = 0.9
"""A probe knows something if its error is at most this share of what the mean answer is off by."""
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


FITS: Final[Mapping[str, Callable[[Readings, Float64Array, int], FittedProbe]]] = {
    RidgeProbe.kind: fit_ridge,
    AffineProbe.kind: fit_affine,
    MlpProbe.kind: fit_mlp,
}
"""How each kind of `prefillcli.exits.probes.PROBES` is fitted."""


def margin_error(off: Float64Array) -> float:
    """What a margin between two labels is off by, where relative logits are `off` [rows, labels]: root mean square."""
    labels = off.shape[1]
    return float(np.sqrt(2 * np.mean(off**2) * labels / (labels - 1)))  # the errors of a row's labels add up to 0


def _decomposed(points: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Left singular vectors [rows, rank] of points [rows, hidden], and the squares of the singular values."""
    rows, hidden = points.shape
    gram = points @ points.T if rows <= hidden else points.T @ points
    values, vectors = np.linalg.eigh(gram)
    known = values > max(float(values[-1]), 0.0) * 1e-12
    values, vectors = values[known], vectors[:, known]
    left = vectors if rows <= hidden else points @ (vectors / np.sqrt(values))
    return left, values


def _folded(target: Float64Array, seed: int, predict: Callable[[IntArray, IntArray], Float64Array]) -> Float64Array:
    """What `predict(rows to fit, rows left out)` says of all rows, each left out once."""
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

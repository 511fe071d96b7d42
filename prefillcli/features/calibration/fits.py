"""Fitting calibrations to rows with right answers, and choosing one by cross-validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from prefillcli.features.calibration.calibration import (
    HeldOut,
    IsotonicSteps,
    PlattScaling,
    Scaling,
    TemperatureScaling,
    softmax,
)
from prefillcli.stats.evaluation import evaluate, evaluate_labels, log_losses
from prefillcli.stats.probabilities import Float64Array

Method = Literal["temperature", "platt", "isotonic"]
METHODS: tuple[Method, ...] = ("temperature", "platt", "isotonic")
_TEMPERATURES = (0.01, 100.0)

IntArray = npt.NDArray[np.int64]


def methods_for(labels: int) -> tuple[Method, ...]:
    """The methods that so many labels have."""
    return METHODS if labels == 2 else METHODS[:2]


def fit_scaling(method: Method, log_shares: Float64Array, truth: IntArray) -> Scaling:
    """The calibration of rows with `log_shares_of` [rows, labels], whose right labels are `truth` [rows]."""
    if method == "temperature":
        return fit_temperature(log_shares, truth)
    return fit_platt(log_shares, truth) if method == "platt" else fit_isotonic(log_shares, truth)


def fit_temperature(log_shares: Float64Array, truth: IntArray) -> TemperatureScaling:
    """The temperature with the smallest log loss, between 0.01 and 100 (Guo et al. 2017)."""
    from scipy.optimize import minimize_scalar

    rows = np.arange(len(truth))

    def loss(log_temperature: float) -> float:
        scaled = log_shares / np.exp(log_temperature)
        top = scaled.max(axis=1)
        sums = top + np.log(np.exp(scaled - top[:, None]).sum(axis=1))
        return float(np.mean(sums - scaled[rows, truth]))

    low, high = np.log(_TEMPERATURES)
    found = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-9})
    return TemperatureScaling(temperature=float(np.exp(found.x)))


def fit_platt(log_shares: Float64Array, truth: IntArray) -> PlattScaling:
    """A slope of 0 or more and a bias for each label with the smallest log loss.

    The right answers are smoothed as Platt (1999) does: of n rows of a label, n + 1 of n + labels have it. So
    no answer is certain, and the fit of labels that the scores tell apart is finite.
    """
    from scipy.optimize import minimize

    labels = log_shares.shape[1]
    wanted = _smoothed(truth, labels)
    width = max(float(log_shares.std()), 1e-6)  # the search goes better where slope and biases are of one size
    shares = log_shares / width

    def loss(parameters: Float64Array) -> tuple[float, Float64Array]:
        logits = parameters[0] * shares + np.append(parameters[1:], 0.0)
        found = softmax(logits)
        top = logits.max(axis=1, keepdims=True)
        sums = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1))
        gap = found - wanted
        gradient = np.concatenate([[(gap * shares).sum(axis=1).mean()], gap.mean(axis=0)[:-1]])
        return float(np.mean(sums - (wanted * logits).sum(axis=1))), gradient

    bounds = [(0.0, None)] + [(None, None)] * (labels - 1)
    options: dict[str, Any] = {"ftol": 1e-15, "gtol": 1e-10, "maxiter": 1000}
    start = np.zeros(labels)
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return PlattScaling(slope=float(found.x[0]) / width, biases=(*found.x[1:].tolist(), 0.0))


def fit_isotonic(log_shares: Float64Array, truth: IntArray) -> IsotonicSteps:
    """The probabilities that rise with the score and have the smallest squared error.

    None is nearer to 0 or 1 than 1 / (rows + 2): so many rows show no more. Raises ValueError for other than two
    labels.
    """
    from sklearn.isotonic import IsotonicRegression

    if log_shares.shape[1] != 2:
        raise ValueError("isotonic is for two labels")
    margin = 1 / (len(truth) + 2)
    regression = IsotonicRegression(y_min=margin, y_max=1 - margin, out_of_bounds="clip")
    regression.fit(np.exp(log_shares[:, 0]), truth == 0)
    return IsotonicSteps(
        scores=tuple(map(float, regression.X_thresholds_)),
        probabilities=tuple(map(float, np.maximum.accumulate(regression.y_thresholds_))),
    )


def _smoothed(truth: IntArray, labels: int) -> Float64Array:
    """What each row is to have of each label [rows, labels]."""
    counts = np.bincount(truth, minlength=labels)
    wanted = np.repeat(1 / (counts[truth] + labels)[:, None], labels, axis=1)
    wanted[np.arange(len(truth)), truth] = (counts[truth] + 1) / (counts[truth] + labels)
    return wanted


def cross_validate(
    log_shares: Float64Array,
    truth: IntArray,
    before: Float64Array,
    labels: Sequence[str],
    *,
    folds: int,
    seed: int,
) -> dict[str, HeldOut]:
    """What each method makes of rows that it was not fitted on; `none` are the probabilities `before` [rows, labels].

    The folds have equal shares of every label. Raises ValueError if a label is right in fewer rows than there are
    folds.
    """
    from sklearn.model_selection import StratifiedKFold

    splitter = StratifiedKFold(n_splits=folds, shuffle=True, random_state=seed)
    parts = list(splitter.split(log_shares, truth))
    held = [rest for _, rest in parts]
    found = {"none": _held_out(before, truth, labels, held)}
    for method in methods_for(len(labels)):
        probabilities = np.empty_like(log_shares)
        for fitted, rest in parts:
            scaling = fit_scaling(method, log_shares[fitted], truth[fitted])
            probabilities[rest] = scaling.apply(log_shares[rest])
        found[method] = _held_out(probabilities, truth, labels, held)
    return found


def best_method(found: Mapping[str, HeldOut]) -> Method:
    """The method with the smallest log loss on held-out rows; of equal ones the first."""
    return min((method for method in METHODS if method in found), key=lambda method: found[method].log_loss)


def _held_out(
    probabilities: Float64Array, truth: IntArray, labels: Sequence[str], held: Sequence[IntArray]
) -> HeldOut:
    said = probabilities[np.arange(len(truth)), truth]
    losses = [float(log_losses(said[rest], np.ones(len(rest), np.bool_)).mean()) for rest in held]
    figures = figures_of(probabilities, truth, labels)
    return HeldOut(log_loss=float(np.mean(losses)), log_loss_spread=float(np.std(losses, ddof=1)), **figures)


def figures_of(probabilities: Float64Array, truth: IntArray, labels: Sequence[str]) -> dict[str, Any]:
    """Brier score, expected calibration error, accuracy and AUC of probabilities [rows, labels]."""
    if len(labels) == 2:
        found = evaluate(np.ascontiguousarray(probabilities[:, 0]), truth == 0, labels)
    else:
        found = evaluate_labels(probabilities, truth, labels)
    return {
        "brier": found.brier.value,
        "ece": found.calibration_error.value,
        "accuracy": found.accuracy.value,
        "auc": found.auc.value,
    }

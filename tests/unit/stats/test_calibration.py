"""Calibrations: the fits against scikit-learn's, and what holds whatever they are fitted on."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy.special import expit, log_softmax, logit
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.calibration import CalibratedClassifierCV
from sklearn.frozen import FrozenEstimator
from sklearn.isotonic import IsotonicRegression
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss, roc_auc_score
from sklearn.model_selection import StratifiedKFold

from prefillcli.judging.calibration import (
    METHODS,
    Calibration,
    IsotonicSteps,
    PlattScaling,
    PriorScaling,
    TemperatureScaling,
    best_method,
    content_free_calibration,
    cross_validate,
    fit_isotonic,
    fit_platt,
    fit_scaling,
    fit_temperature,
    log_shares_of,
)

NAMES = ("Yes", "No")


def sampled(rows: int, labels: int = 2, *, slope: float = 1.0, biases: Any = 0.0, seed: int = 0) -> tuple[Any, Any]:
    """Log-probabilities of a model [rows, labels] and right labels, which follow from them by this slope and bias."""
    rng = np.random.default_rng(seed)
    logprobs = log_softmax(rng.normal(0, 2, (rows, labels)), axis=1) - rng.exponential(1, (rows, 1))
    likely = np.exp(log_softmax(slope * logprobs + np.broadcast_to(biases, labels), axis=1))
    truth = (rng.random(rows)[:, None] > likely.cumsum(axis=1)).sum(axis=1).clip(0, labels - 1)
    return logprobs, truth


class Given(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier for scikit-learn whose decisions are its input."""

    def fit(self, given: Any, truth: Any) -> Given:
        self.classes_ = np.unique(truth)
        return self

    def decision_function(self, given: Any) -> Any:
        return given[:, 0] if given.shape[1] == 1 else given

    def predict(self, given: Any) -> Any:
        return self.classes_[(given[:, 0] > 0).astype(int) if given.shape[1] == 1 else given.argmax(axis=1)]


def sklearn_calibrated(decisions: Any, truth: Any, method: str) -> Any:
    fitted = CalibratedClassifierCV(FrozenEstimator(Given().fit(decisions, truth)), method=method, ensemble=False)
    return fitted.fit(decisions, truth).predict_proba(decisions)


@pytest.mark.parametrize(("slope", "bias"), [(0.4, 0.8), (2.5, -1.0), (1.0, 0.0)])
def test_platt_is_that_of_scikit_learn(slope: float, bias: float) -> None:
    logprobs, truth = sampled(500, slope=slope, biases=np.array([bias, 0.0]))
    found = fit_platt(log_shares_of(logprobs), truth).apply(log_shares_of(logprobs))
    decisions = (logprobs[:, 0] - logprobs[:, 1])[:, None]  # the logit of the score
    wanted = sklearn_calibrated(decisions, truth == 0, "sigmoid")
    np.testing.assert_allclose(found[:, 0], wanted[:, 1], atol=2e-5)


@pytest.mark.parametrize("labels", [2, 4])
def test_the_temperature_is_that_of_scikit_learn(labels: int) -> None:
    logprobs, truth = sampled(600, labels, slope=0.37)
    found = fit_temperature(log_shares_of(logprobs), truth).apply(log_shares_of(logprobs))
    if labels == 2:
        wanted = sklearn_calibrated((logprobs[:, 1] - logprobs[:, 0])[:, None], truth, "temperature")
    else:
        wanted = sklearn_calibrated(logprobs, truth, "temperature")
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_isotonic_is_that_of_scikit_learn_up_to_its_margin() -> None:
    logprobs, truth = sampled(400, slope=0.5, biases=np.array([0.6, 0.0]))
    scores = np.exp(log_shares_of(logprobs))[:, 0]
    other = sampled(300, seed=1)[0]
    plain = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(scores, truth == 0)
    wanted = plain.predict(np.exp(log_shares_of(other))[:, 0]).clip(1 / 402, 401 / 402)
    found = fit_isotonic(log_shares_of(logprobs), truth).apply(log_shares_of(other))
    # between a knot at 0 or 1 and the next one, the line ends at the margin instead
    np.testing.assert_allclose(found[:, 0], wanted, atol=1 / 402)
    np.testing.assert_allclose(found.sum(axis=1), 1)


def test_platt_of_several_labels_has_the_smallest_loss_around() -> None:
    logprobs, truth = sampled(300, 3, slope=0.6, biases=np.array([0.9, -0.5, 0.0]))
    shares = log_shares_of(logprobs)
    best = fit_platt(shares, truth)
    counts = np.bincount(truth)
    wanted = np.array([[(counts[t] + (k == t)) / (counts[t] + 3) if k == t else 1 / (counts[t] + 3) for k in range(3)]
                       for t in truth])  # fmt: skip

    def loss(slope: float, biases: Any) -> float:
        return float(-(wanted * log_softmax(slope * shares + biases, axis=1)).sum(axis=1).mean())

    least = loss(best.slope, best.biases)
    for step in (-1e-3, 1e-3):
        assert loss(best.slope + step, best.biases) > least
        for label in range(3):
            assert loss(best.slope, np.array(best.biases) + step * np.eye(3)[label]) > least


@pytest.mark.parametrize("labels", [2, 3])
def test_probabilities_that_hold_already_stay(labels: int) -> None:
    logprobs, truth = sampled(40_000, labels)
    shares = log_shares_of(logprobs)
    temperature, platt = fit_temperature(shares, truth), fit_platt(shares, truth)
    assert temperature.temperature == pytest.approx(1, abs=0.03)
    assert platt.slope == pytest.approx(1, abs=0.03)
    assert np.ptp(platt.biases) < 0.06
    if labels == 2:
        found = fit_isotonic(shares, truth).apply(shares)[:, 0]
        assert np.abs(found - np.exp(shares[:, 0])).mean() < 0.02


def test_what_was_distorted_is_found_again() -> None:
    logprobs, truth = sampled(40_000, 3, slope=0.5, biases=np.array([0.7, -0.4, 0.0]))
    platt = fit_platt(log_shares_of(logprobs), truth)
    assert platt.slope == pytest.approx(0.5, abs=0.02)
    assert platt.biases == pytest.approx((0.7, -0.4, 0.0), abs=0.06)
    assert fit_temperature(log_shares_of(logprobs), truth).temperature > 1.5


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["told apart", "the wrong way round", "one score", "certain"])
def test_no_rows_break_a_fit(method: Any, kind: str) -> None:
    rng = np.random.default_rng(0)
    truth = (np.arange(60) % 3 == 0).astype(np.int64)
    scores = {
        "told apart": 0.9 - 0.8 * truth,
        "the wrong way round": rng.random(60) * 0.4 + 0.5 * truth,
        "one score": np.full(60, 0.3),
        "certain": rng.integers(0, 2, 60).astype(float),
    }[kind]
    with np.errstate(divide="ignore"):
        logprobs = np.stack([np.log(scores), np.log1p(-scores)], axis=1)
    scaling = fit_scaling(method, log_shares_of(logprobs), truth)
    found = scaling.apply(log_shares_of(logprobs))[:, 0]
    assert np.isfinite(found).all()
    assert found.min() >= 0
    assert found.max() <= 1
    order = np.argsort(scores)
    assert (np.diff(found[order]) >= -1e-12).all()
    if kind == "the wrong way round" and method == "platt":
        assert scaling.slope == 0  # type: ignore[union-attr]
        assert found == pytest.approx(np.full(60, (truth == 0).mean()), abs=0.02)


logprob = st.floats(-800, 0) | st.just(-np.inf)
pairs = st.lists(st.tuples(logprob, logprob), min_size=1, max_size=40).map(
    lambda rows: np.array([row if np.isfinite(max(row)) else (-1.0, row[1]) for row in rows])
)
positive = st.floats(0.01, 100)
bias = st.floats(-20, 20)
knots = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=8).map(
    lambda found: (sorted({x for x, _ in found}), sorted(y for _, y in found))
)
scalings = (
    st.builds(TemperatureScaling, temperature=positive)
    | st.builds(PlattScaling, slope=st.floats(0, 100), biases=st.tuples(bias, bias))
    | st.builds(PriorScaling, method=st.sampled_from(["contextual", "batch"]), prior=st.tuples(bias, bias))
    | knots.map(lambda found: IsotonicSteps(scores=found[0], probabilities=found[1][: len(found[0])]))
)


@given(scaling=scalings, logprobs=pairs)
@example(
    scaling=IsotonicSteps(method="isotonic", scores=(0.0, 2.225073858507e-311), probabilities=(0.0, 1.0)),
    logprobs=np.array([[-np.inf, 0.0]]),
)
def test_probabilities_are_between_0_and_1_and_never_fall_with_the_score(scaling: Any, logprobs: Any) -> None:
    calibration = Calibration(labels=NAMES, scaling=scaling)
    found = calibration.probabilities(logprobs)
    assert ((found >= 0) & (found <= 1)).all()
    np.testing.assert_allclose(found.sum(axis=1), 1)
    order = np.argsort(log_shares_of(logprobs)[:, 0] - log_shares_of(logprobs)[:, 1], kind="stable")
    assert (np.diff(found[order, 0]) >= -1e-9).all()


@given(scaling=scalings, logprobs=pairs)
def test_a_calibration_says_the_same_after_a_round_trip(scaling: Any, logprobs: Any) -> None:
    calibration = Calibration(labels=NAMES, scaling=scaling)
    again = Calibration.model_validate_json(calibration.model_dump_json(indent=2))
    assert again == calibration
    assert again.digest() == calibration.digest()
    assert np.array_equal(again.probabilities(logprobs), calibration.probabilities(logprobs))


def test_temperature_one_and_equal_answers_without_content_change_nothing() -> None:
    logprobs, _ = sampled(50, 3)
    shares = np.exp(log_softmax(logprobs, axis=1))
    for scaling in (TemperatureScaling(temperature=1), PriorScaling(method="batch", prior=(-1.1, -1.1, -1.1))):
        found = Calibration(labels=("a", "b", "c"), scaling=scaling).probabilities(logprobs)
        np.testing.assert_allclose(found, shares, rtol=1e-12)


def test_contextual_calibration_divides_by_the_mean_of_the_prompts_without_content() -> None:
    logprobs, _ = sampled(50, 3)
    free = np.array([[-0.2, -3.0, -4.0], [-1.0, -2.0, -2.5]])
    p_cf = np.exp(log_softmax(free, axis=1)).mean(axis=0)
    wanted = np.exp(log_softmax(logprobs, axis=1)) @ np.linalg.inv(np.diag(p_cf))  # W of Zhao et al.
    found = content_free_calibration(("a", "b", "c"), free).probabilities(logprobs)
    np.testing.assert_allclose(found, wanted / wanted.sum(axis=1, keepdims=True), rtol=1e-12)


def test_cross_validation_is_that_of_scikit_learn() -> None:
    logprobs, truth = sampled(303, slope=0.5, biases=np.array([0.8, 0.0]))
    shares = log_shares_of(logprobs)
    scores = expit(logprobs[:, 0] - logprobs[:, 1])
    before = np.stack([scores, 1 - scores], axis=1)
    found = cross_validate(shares, truth, before, NAMES, methods=METHODS, folds=4, seed=3)
    assert list(found) == ["none", *METHODS]

    yes = truth == 0
    decisions, held, losses = logit(scores)[:, None], np.zeros(303), []
    for fitted, rest in StratifiedKFold(4, shuffle=True, random_state=3).split(decisions, truth):
        model = CalibratedClassifierCV(FrozenEstimator(Given().fit(decisions, yes)), ensemble=False)
        held[rest] = model.fit(decisions[fitted], yes[fitted]).predict_proba(decisions[rest])[:, 1]
        losses.append(log_loss(yes[rest], held[rest]))
    platt = found["platt"]
    assert platt.log_loss == pytest.approx(np.mean(losses), abs=1e-4)
    assert platt.log_loss_spread == pytest.approx(np.std(losses, ddof=1), abs=1e-4)
    assert platt.brier == pytest.approx(brier_score_loss(yes, held), abs=1e-4)
    assert platt.accuracy == accuracy_score(yes, held >= 0.5)
    assert platt.auc == pytest.approx(roc_auc_score(yes, held), abs=1e-3)
    assert found["none"].auc == pytest.approx(roc_auc_score(yes, scores), abs=1e-12)
    assert best_method(found) == min(METHODS, key=lambda method: found[method].log_loss)
    again = cross_validate(shares, truth, before, NAMES, methods=METHODS, folds=4, seed=3)
    assert again == found
    assert cross_validate(shares, truth, before, NAMES, methods=METHODS, folds=4, seed=4) != found


@pytest.mark.parametrize(
    "scaling",
    [
        {"method": "isotonic", "scores": [0.1, 0.1], "probabilities": [0, 1]},
        {"method": "isotonic", "scores": [0.1, 0.2], "probabilities": [1, 0]},
        {"method": "isotonic", "scores": [0.1, 0.2], "probabilities": [1]},
        {"method": "isotonic", "scores": [], "probabilities": []},
        {"method": "isotonic", "scores": [0.1, 1.2], "probabilities": [0, 1]},
        {"method": "temperature", "temperature": 0},
        {"method": "temperature", "temperature": "nan"},
        {"method": "platt", "slope": -1, "biases": [0, 0]},
        {"method": "platt", "slope": 1, "biases": [0, 0, 0]},
        {"method": "contextual", "prior": [0]},
        {"method": "beta"},
    ],
)
def test_a_scaling_that_cannot_be_is_refused(scaling: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Calibration.model_validate_json(json.dumps({"labels": NAMES, "scaling": scaling}))


def test_applying_one_needs_neither_scikit_learn_nor_scipy() -> None:
    code = (
        "import sys; sys.modules.update(sklearn=None, scipy=None)\n"
        "import numpy as np\n"
        "from prefillcli.judging.calibration import Calibration, IsotonicSteps\n"
        "c = Calibration(labels=('a', 'b'), scaling=IsotonicSteps(scores=(0, 1), probabilities=(0, 1)))\n"
        "assert abs(c.probabilities(np.log([[0.3, 0.7]]))[0, 0] - 0.3) < 1e-12"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""Probes: what they predict, how they are fitted, and that a file brings them back bit for bit."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.model_selection import LeaveOneOut, cross_val_predict

from prefillcli.reading.exits.policy import (
    FITS,
    PROBES,
    AffineProbe,
    MlpProbe,
    Readings,
    RidgeProbe,
    fit_affine,
    fit_best,
    fit_mlp,
    fit_ridge,
    lens_features,
    probe_of,
    relative,
)
from prefillcli.stats.ridge import STRENGTHS
from tests.unit.reading.exits.populations import population


def readings(rows: int, hidden: int, labels: int, seed: int = 0) -> Readings:
    draws = np.random.default_rng(seed)
    return Readings(
        draws.normal(0, 1, (rows, hidden)).astype(np.float32),
        draws.normal(0, 3, (rows, labels)),
        draws.normal(0, 3, (rows, labels)),
    )


def unit(hidden: Any) -> Any:
    wide = hidden.astype(np.float64)
    return wide / np.linalg.norm(wide, axis=1, keepdims=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("rows", "hidden"), [(30, 80), (80, 30)], ids=["more units than rows", "more rows"])
@pytest.mark.parametrize("labels", [2, 4])
def test_ridge_is_the_one_that_scikit_learn_fits(rows: int, hidden: int, labels: int) -> None:
    given = readings(rows, hidden, labels)
    points = unit(given.hidden)
    draws = np.random.default_rng(1)
    target = relative(points @ draws.normal(0, 5, (hidden, labels)) + draws.normal(0, 0.3, (rows, labels)))
    found = fit_ridge(given, target)
    total = float(((points - points.mean(axis=0)) ** 2).sum())
    left_out = {
        share: cross_val_predict(Ridge(share * total), points, target, cv=LeaveOneOut()) for share in STRENGTHS
    }
    best = min(STRENGTHS, key=lambda share: float(np.mean((left_out[share] - target) ** 2)))
    assert found.held_out == pytest.approx(left_out[best], abs=1e-6)
    fresh = readings(20, hidden, labels, seed=2)
    expected = Ridge(best * total).fit(points, target).predict(unit(fresh.hidden))
    assert found.probe.logits(fresh) == pytest.approx(expected, abs=1e-4)
    centre, mean = points.mean(axis=0), target.mean(axis=0)
    dual = KernelRidge(alpha=best * total, kernel="linear").fit(points - centre, target - mean)
    assert found.probe.logits(fresh) == pytest.approx(dual.predict(unit(fresh.hidden) - centre) + mean, abs=1e-4)


def test_affine_is_least_squares_on_the_relative_logits() -> None:
    given = readings(60, 8, 3)
    target = relative(np.random.default_rng(1).normal(0, 1, (60, 3)) + 0.2 * given.logits)
    found = fit_affine(given, target)
    expected = LinearRegression().fit(relative(given.logits), target)
    fresh = readings(20, 8, 3, seed=2)
    assert found.probe.logits(fresh) == pytest.approx(expected.predict(relative(fresh.logits)), abs=1e-5)


def test_features_are_those_of_the_paper() -> None:
    given = readings(5, 8, 4)
    features = lens_features(given)
    assert features.shape == (5, 12)
    for row in range(5):
        shares, before = (np.exp(each[row]) / np.exp(each[row]).sum() for each in (given.logits, given.before))
        assert features[row] == pytest.approx(np.concatenate([given.logits[row], shares, shares - before]))


def test_the_network_has_the_papers_size_and_learns_what_no_linear_map_can() -> None:
    given = readings(400, 8, 2)
    bent = np.abs(relative(given.logits)[:, 0])
    target = np.column_stack([bent, -bent])
    found = fit_mlp(given, target)
    assert isinstance(found.probe, MlpProbe)
    assert (found.probe.inner.shape, found.probe.outer.shape) == ((6, 512), (512, 2))
    line = fit_affine(given, target)
    assert np.mean((found.held_out - target) ** 2) < 0.1 * np.mean((line.held_out - target) ** 2)
    assert fit_mlp(given, target).held_out == pytest.approx(found.held_out, abs=0)


def test_the_best_kind_is_the_one_with_the_smallest_error_on_rows_left_out() -> None:
    rows = population(200)
    found, errors = fit_best(rows.readings[4], rows.final, seed=0)
    assert errors[found.probe.kind] == min(errors.values())
    wrong = (found.held_out[:, 0] - found.held_out[:, 1]) - (rows.final[:, 0] - rows.final[:, 1])
    assert errors[found.probe.kind] == pytest.approx(float(np.sqrt(np.mean(wrong**2))))


def test_hidden_states_of_zero_and_of_any_length_are_read() -> None:
    probe = fit_ridge(readings(40, 8, 2), np.random.default_rng(0).normal(0, 1, (40, 2))).probe
    given = readings(3, 8, 2, seed=5)
    longer = Readings(given.hidden * np.float32(1e6), given.logits, given.before)
    assert probe.logits(longer) == pytest.approx(probe.logits(given), abs=1e-5)
    assert np.isfinite(probe.logits(Readings(given.hidden * 0, given.logits, given.before))).all()


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(PROBES)), st.integers(2, 5), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_a_file_brings_a_probe_back_bit_for_bit(kind: str, labels: int, hidden: int, seed: int) -> None:
    draws = np.random.default_rng(seed)

    def array(*shape: int) -> Any:
        return (draws.normal(0, 1, shape) * 10.0 ** draws.integers(-30, 30, shape)).astype(np.float32)

    probe = {
        "ridge": lambda: RidgeProbe(array(hidden, labels), array(labels)),
        "affine": lambda: AffineProbe(array(labels, labels), array(labels)),
        "mlp": lambda: MlpProbe(array(3 * labels, 7), array(7), array(7, labels), array(labels)),
    }[kind]()
    again = probe_of(json.loads(json.dumps(probe.to_json())))
    assert type(again) is type(probe)
    assert again.to_json() == probe.to_json()
    given = readings(6, hidden, labels)
    assert (again.logits(given) == probe.logits(given)).all()


def damaged(**changes: Any) -> dict[str, Any]:
    return RidgeProbe(np.ones((4, 2), np.float32), np.ones(2, np.float32)).to_json() | changes


@pytest.mark.parametrize(
    "written",
    [
        {},
        damaged(kind="forest"),
        damaged(kind=["ridge"]),
        damaged(kind="mlp"),
        damaged(extra={"shape": [1], "float32": "AACAPw=="}),
        damaged(bias={"shape": [3], "float32": "AACAPwAAgD8AAIA/"}),
        damaged(bias={"shape": [2], "float32": "AACAPw=="}),
        damaged(bias={"shape": [2], "float32": "no base64"}),
        damaged(bias={"shape": [2], "float32": "AADAfwAAwH8="}),
        damaged(bias=None),
    ],
)
def test_a_damaged_probe_is_refused(written: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"probe"):
        probe_of(written)


def test_every_kind_of_probe_can_be_fitted() -> None:
    assert FITS.keys() == PROBES.keys()
    rows = population(60, labels=3)
    for kind, fit in FITS.items():
        found = fit(rows.readings[2], relative(rows.final), 0)
        assert found.probe.kind == kind
        assert found.probe.labels == 3
        assert found.held_out.shape == (60, 3)

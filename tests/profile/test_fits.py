"""Fits against numpy, and against numbers known before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefillcli.profile.measuring import fit_costs, fit_line, fit_linear, mean_relative_error, pearson


@given(st.floats(-1e6, 1e6), st.floats(0.1, 1e5), st.integers(3, 9))
def test_a_line_is_found(base: float, slope: float, count: int) -> None:
    found = fit_line([(x * 512, base + slope * x * 512) for x in range(1, count)])
    assert found == pytest.approx((base, slope), rel=1e-6, abs=1e-2)


def test_one_stray_point_does_not_move_the_line() -> None:
    points = [(x, 100 + 7 * x) for x in (1, 2, 3, 4, 5)]
    points[2] = (3, 500)
    assert fit_line(points) == pytest.approx((100, 7))


def test_a_line_needs_two_lengths() -> None:
    with pytest.raises(ValueError, match="two points"):
        fit_line([(3, 1), (3, 2)])


def test_costs_are_found_and_never_negative() -> None:
    rng = np.random.default_rng(0)
    rows = np.stack([np.ones(12), rng.integers(10, 4000, 12), rng.integers(1, 40, 12), rng.random(12) * 1e7], axis=1)
    costs = np.array([0.01, 3e-4, 2e-5, 1e-9])
    assert fit_costs(rows, rows @ costs) == pytest.approx(costs, rel=1e-3)
    against = fit_costs(rows, rows @ np.array([1.0, 3e-4, -1e-3, 1e-9]))
    assert (against >= 0).all()


def test_least_squares_is_that_of_numpy() -> None:
    x = np.array([1.0, 2, 4, 8])
    y = np.array([3.0, 4.5, 9, 16])
    slope, base = np.polyfit(x, y, 1)
    assert fit_linear(np.stack([np.ones(4), x], axis=1), y) == pytest.approx([base, slope])


def test_pearson_is_that_of_numpy() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.random(20), rng.random(20)
    assert pearson(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert pearson([1, 1, 1], [1, 2, 3]) == 0


def test_errors_are_relative() -> None:
    assert mean_relative_error([1.1, 4.0], [1.0, 5.0]) == pytest.approx(0.15)

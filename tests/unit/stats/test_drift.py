"""Drift: an alarm that may be asked all through a job, and the test of a few fresh rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import beta, binom, binomtest

from prefillcli.reading.exits.proof import chance_of, detectable_rate, drift_alarm, drift_evidence, drifted_classes

JOBS, ROWS = 2000, 1500


def ever_alarmed(flips: np.ndarray, max_flips: float) -> int:
    """In how many jobs, [jobs, rows] of flips, the alarm is raised after any row."""
    most = [next((k for k in range(n + 1) if drift_alarm(k, n, max_flips)), n + 1) for n in range(1, ROWS + 1, 10)]
    return int((flips.cumsum(axis=1)[:, ::10] >= np.array(most)).any(axis=1).sum())


@pytest.mark.parametrize("max_flips", [0.01, 0.05])
def test_false_alarms_are_rare_though_it_is_asked_all_through_the_job(max_flips: float) -> None:
    flips = np.random.default_rng(0).random((JOBS, ROWS)) < max_flips
    alarms = ever_alarmed(flips, max_flips)
    assert binomtest(alarms, JOBS, 0.05, alternative="greater").pvalue > 0.01
    fixed = binom.ppf(0.95, np.arange(1, ROWS + 1, 10), max_flips)  # the test for one look, asked again and again
    naive = int((flips.cumsum(axis=1)[:, ::10] > fixed).any(axis=1).sum())
    assert binomtest(naive, JOBS, 0.05, alternative="greater").pvalue < 0.01


def test_drift_is_found() -> None:
    flips = np.random.default_rng(1).random((200, ROWS)) < 0.03
    assert ever_alarmed(flips, 0.01) > 190
    later = np.random.default_rng(2).random((200, ROWS)) < np.where(np.arange(ROWS) < 500, 0.005, 0.06)
    assert ever_alarmed(later, 0.01) > 190


@settings(max_examples=30)
@given(st.integers(0, 12), st.integers(0, 300), st.sampled_from([0.01, 0.03, 0.2]))
def test_the_evidence_is_a_mixture_of_likelihood_ratios(flips: int, others: int, rate: float) -> None:
    rows = flips + others
    width = max((1 - rate) / (2 * rate), 1.0)

    def ratio(p: float) -> float:
        return float(beta.pdf(p, 1, width) * math.exp(binom.logpmf(flips, rows, p) - binom.logpmf(flips, rows, rate)))

    top = min(max(0.999, rate), 1.0)
    points = sorted({min(max(flips / max(rows, 1), rate * 1.01), top - 0.01), min(rate * 3, top - 0.02)})
    mixed = quad(ratio, rate, 1, limit=500, points=points)[0] / beta.sf(rate, 1, width)
    assert math.exp(drift_evidence(flips, rows, rate)) == pytest.approx(mixed, rel=1e-4)


def test_a_million_rows_without_a_flip_raise_no_alarm() -> None:
    assert not drift_alarm(0, 1_000_000, 0.01)
    assert not drift_alarm(0, 0, 0.01)
    assert drift_alarm(30_000, 1_000_000, 0.01)


def test_classes_share_the_false_alarms() -> None:
    assert drifted_classes([(0, 100), (9, 100), (0, 0)], 0.01) == (1,)
    flips = next(flips for flips in range(100) if drift_alarm(flips, 100, 0.01))
    assert drifted_classes([(flips, 100)], 0.01) == (0,)
    assert drifted_classes([(flips, 100)] + [(0, 100)] * 9, 0.01) == ()


@pytest.mark.parametrize(("flips", "rows", "rate"), [(2, 1, 0.1), (-1, 3, 0.1), (0, 1, 0.0), (0, 1, 1.0)])
def test_impossible_counts_are_refused(flips: int, rows: int, rate: float) -> None:
    with pytest.raises(ValueError, match=r"flip"):
        drift_alarm(flips, rows, rate)


@given(st.integers(0, 200), st.integers(0, 200), st.sampled_from([0.01, 0.1]))
def test_chance_is_the_exact_binomial_test(flips: int, others: int, rate: float) -> None:
    rows = flips + others
    expected = binomtest(flips, rows, rate, alternative="greater").pvalue if rows else 1.0
    assert chance_of(flips, rows, rate) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("rows", [5, 100, 300, 2000])
def test_a_detectable_rate_is_detected_as_often_as_it_says(rows: int) -> None:
    rate = detectable_rate(rows, 0.01, 0.05, 0.8)
    refused = next(flips for flips in range(rows + 1) if binom.sf(flips - 1, rows, 0.01) < 0.05)
    assert binom.sf(refused - 1, rows, rate) == pytest.approx(0.8, abs=1e-6)


def test_too_few_rows_detect_nothing() -> None:
    assert detectable_rate(1, 0.1, 0.05, 0.8) == 1.0

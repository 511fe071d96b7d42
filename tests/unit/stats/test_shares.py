"""Shares of answers in a file: what resampling shows of their intervals. Wilson's and the exact ones are SciPy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, norm

from prefillcli.engines.base import Readings
from prefillcli.judging.estimate import (
    corrected_share,
    fit_guesser,
    guided_share,
    indicators,
    label_share,
    plain_share,
)

ROWS = 4000
Z = norm.ppf(0.975)


@pytest.mark.parametrize(("hits", "rows"), [(40, 100), (11, 300), (3, 50), (0, 20), (290, 295)])
def test_of_few_rows_of_a_large_file_the_interval_is_that_of_scipy(hits: int, rows: int) -> None:
    method = "wilson" if 10 <= hits <= rows - 10 else "exact"
    wanted = binomtest(hits, rows).proportion_ci(0.95, method)
    assert plain_share(hits, rows, 1e15).interval == pytest.approx((wanted.low, wanted.high), abs=1e-9)


def test_rows_that_are_read_are_known() -> None:
    assert plain_share(30, 100, 100).interval == (0.3, 0.3)
    assert plain_share(2, 95, 100).interval == pytest.approx((0.02, 0.07))  # at most the five others have it too
    half = np.diff(plain_share(250, 500, 1000).interval)[0]
    assert half == pytest.approx(2 * Z * np.sqrt(0.25 / 500 * 0.5), rel=0.01)


@given(read=st.integers(1, 500), more=st.floats(0.001, 300.0), all_alike=st.booleans())
def test_where_all_rows_that_were_read_have_one_answer_so_do_those_that_the_guesses_cost(
    read: int, more: float, all_alike: bool
) -> None:
    hits = float(read) if all_alike else 0.0
    found = label_share("", "Yes", hits, read, 1000, plain_share(hits, read, 1000), more)
    low, high = found.equal_cost_interval or (-1.0, -1.0)
    assert 0 <= low <= high <= 1
    assert (high if all_alike else 1 - low) == pytest.approx(1)


def soft_guesses(share: float, known: float) -> tuple[np.ndarray, np.ndarray]:
    """Whether each row of a file has the answer, and the probability of that by a reader who sees `known` of it."""
    draws = np.random.default_rng(0)
    seen = draws.normal(size=ROWS)
    hidden = known * seen + np.sqrt(1 - known**2) * draws.normal(size=ROWS)
    cut = np.quantile(hidden, 1 - share)
    return (hidden > cut).astype(float), norm.cdf((known * seen - cut) / np.sqrt(1 - known**2))


def hard_guesses(share: float, wrong: float) -> tuple[np.ndarray, np.ndarray]:
    """The same by a reader who is sure of everything, and `wrong` about a few rows."""
    draws = np.random.default_rng(1)
    truth = (draws.random(ROWS) < share).astype(float)
    return truth, np.where(draws.random(ROWS) < wrong, 1 - truth, truth)


@pytest.mark.parametrize(
    ("file", "rows", "narrower"),
    [
        (soft_guesses(0.5, 0.9), 300, 0.65),
        (soft_guesses(0.05, 0.9), 400, 0.9),
        (soft_guesses(0.3, 0.0), 60, 1.0),
        (hard_guesses(0.5, 0.002), 200, 0.3),  # most samples show no wrong guess at all
        (hard_guesses(0.05, 0.01), 400, 0.65),
    ],
)
def test_the_share_lies_in_19_of_20_intervals(file: tuple[np.ndarray, np.ndarray], rows: int, narrower: float) -> None:
    truth, guesses = file
    draws, held, widths = np.random.default_rng(2), 0, []
    for _ in range(600):
        own = draws.choice(ROWS, rows, replace=False)
        others = (guesses.sum() - guesses[own].sum()) / (ROWS - rows)
        low, high = guided_share(truth[own], guesses[own], others, ROWS).interval
        plain = plain_share(truth[own].sum(), rows, ROWS).interval
        held += low <= truth.mean() <= high
        widths.append((high - low) / (plain[1] - plain[0]))
    assert held / 600 > 0.93
    assert max(widths) <= 1
    assert np.mean(widths) <= narrower


def test_the_weight_is_that_of_ppi() -> None:
    # PPI++, equation 6, with the variance of the guesses over the labelled rows: the weight of the guesses is
    # (1 - n / N) times that of this module, as the other rows are the file's without the labelled ones.
    truth, guesses = soft_guesses(0.4, 0.9)
    own = np.random.default_rng(3).choice(ROWS, 400, replace=False)
    other = np.setdiff1d(np.arange(ROWS), own)
    y, f, rest = truth[own], guesses[own], guesses[other]
    weight = np.cov(y, f, ddof=0)[0, 1] / ((1 + len(own) / len(other)) * f.var())
    found = guided_share(y, f, float(rest.mean()), ROWS)
    assert found.value == pytest.approx(y.mean() + weight * (rest.mean() - f.mean()), abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 80), st.floats(0, 1), st.floats(0, 1), st.integers(0, 1000))
def test_it_is_never_wider_than_the_plain_one(rows: int, share: float, wrong: float, seed: int) -> None:
    draws = np.random.default_rng(seed)
    truth = (draws.random(rows) < share).astype(float)
    guesses = np.where(draws.random(rows) < wrong, draws.random(rows), truth)
    found = guided_share(truth, guesses, float(draws.random()), rows + 50)
    plain = plain_share(float(truth.sum()), rows, rows + 50)
    assert found.interval[1] - found.interval[0] <= plain.interval[1] - plain.interval[0]
    assert 0 <= found.interval[0] <= found.value <= found.interval[1] <= 1


def test_guesses_that_are_fitted_to_noise_prove_nothing() -> None:
    # 150 rows and 300 inputs that say nothing: guesses about the rows of the fit would be nearly right.
    draws = np.random.default_rng(4)
    hidden, final = draws.normal(size=(2000, 300)).astype(np.float32), draws.normal(size=(2000, 2))
    readings = [Readings(hidden, np.full((2000, 2), np.nan), final)]
    truth, held = indicators(final), 0
    for _ in range(25):
        own = draws.choice(2000, 150, replace=False)
        guesser = fit_guesser([each.chosen(own) for each in map(Rows, readings)], final[own])
        rest = np.setdiff1d(np.arange(2000), own)
        others = guesser.guess([each.chosen(rest) for each in map(Rows, readings)]).mean(axis=0)
        low, high = guided_share(truth[own, 0], guesser.held_out[:, 0], others[0], 2000).interval
        held += low <= truth[:, 0].mean() <= high
        assert high - low > 0.9 * 2 * Z * np.sqrt(0.25 / 150 * 0.9)
    assert held >= 21


class Rows:
    """Readings of which some rows are taken."""

    def __init__(self, readings: Readings) -> None:
        self.all = readings

    def chosen(self, rows: np.ndarray) -> Readings:
        return Readings(self.all.hidden[rows], self.all.logits[rows], self.all.before[rows])


def test_guesses_know_what_readings_say_and_the_usual_answer_elsewhere() -> None:
    draws = np.random.default_rng(5)
    margin = draws.normal(0.5, 1, 600)
    final = np.stack([margin, -margin], axis=1)
    hidden = np.stack([margin, np.ones(600)], axis=1).astype(np.float32)
    hidden[:100] = np.nan  # it could not read them
    blind = Readings(draws.normal(size=(600, 3)).astype(np.float32), np.full((600, 2), np.nan), final)
    found = fit_guesser([blind, Readings(hidden, np.full((600, 2), np.nan), final)], final)
    assert found.reader == 1
    truth = indicators(final)
    assert np.mean((found.held_out[100:] - truth[100:]) ** 2) < 0.03
    assert found.held_out[:100, 0] == pytest.approx(np.full(100, truth[:, 0].mean()), abs=0.03)


def test_an_audit_corrects_the_answers_of_exits() -> None:
    draws, held = np.random.default_rng(6), 0
    left, full = draws.random(ROWS) < 0.6, draws.random(ROWS) < 0.3
    chain = np.where(left & (draws.random(ROWS) < 0.02), ~full, full)
    for _ in range(300):
        audited = draws.choice(ROWS, 400, replace=False)
        own = audited[left[audited]]
        out, into = (full & ~chain)[own].sum(), (chain & ~full)[own].sum()
        found = corrected_share(int(chain.sum()), int(left.sum()), ROWS, len(own), int(out), int(into))
        held += found.interval[0] <= full.mean() <= found.interval[1]
    assert held / 300 > 0.94
    assert found.interval[1] - found.interval[0] < 0.05  # 0.09 by the audited rows alone

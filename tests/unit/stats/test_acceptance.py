"""Accepted answers are right as often as promised: exact bounds against SciPy, and made data whose truth is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest

from prefillcli.stats.acceptance import FLOORS, RISK, Acceptance, doubtful, lowest_floor, lowest_floors, rows_to_start

DRAWS = 1000
#: More broken promises than this have a probability below 1 in 1,000 where the risk is as promised.
MOST_BROKEN = int(binom.ppf(0.999, DRAWS, RISK))


def alike(rows: int, errors: int, probability: float = 0.9) -> Acceptance:
    return lowest_floor(np.full(rows, probability), np.arange(rows) >= errors, 0.98)


def test_a_floor_has_the_exact_bound_of_scipy() -> None:
    draws = np.random.default_rng(0)
    probabilities = draws.uniform(0.5, 1, 2000)
    right = draws.random(2000) < probabilities**0.2
    found = lowest_floor(probabilities, right, 0.95)
    assert found.floor is not None
    chosen = probabilities >= found.floor
    assert (found.accepted, found.errors) == (chosen.sum(), (chosen & ~right).sum())
    assert found.share == chosen.mean()
    exact = binomtest(int((chosen & right).sum()), int(chosen.sum())).proportion_ci(0.90, "exact").low
    assert found.bound == pytest.approx(exact, abs=1e-9)  # each side of it has a risk of 5 %
    assert found.bound >= 0.95
    below = probabilities >= FLOORS[FLOORS.index(found.floor) + 1]
    assert binomtest(int((below & right).sum()), int(below.sum())).proportion_ci(0.90, "exact").low < 0.95


def test_149_right_answers_prove_98_percent_and_148_do_not() -> None:
    assert alike(149, 0).floor == FLOORS[-1] == 0.5
    few = alike(148, 0)
    assert (few.floor, few.accepted, few.share, few.bound, few.needed) == (None, 0, 0.0, None, 149)


def test_what_is_told_to_be_needed_would_prove_it() -> None:
    found = alike(200, 2)
    assert found.floor is None
    needed = found.needed or 0
    assert alike(math.ceil(needed * 1.01), math.floor(needed * 0.01)).floor is not None
    assert alike(200, 8).needed is None  # no number of rows proves 98 % where 96 % are right


def test_without_rows_there_is_no_floor() -> None:
    assert lowest_floor(np.empty(0), np.empty(0, np.bool_), 0.9) == Acceptance(None, 0)


def test_rows_below_one_half_are_never_accepted() -> None:
    assert alike(1000, 0, probability=0.4).floor is None


@pytest.mark.parametrize("accuracy", [0, 1, -1, math.nan])
def test_impossible_goals_are_refused(accuracy: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        lowest_floor(np.ones(3), np.ones(3, np.bool_), accuracy)


def test_as_many_answers_as_probabilities_are_needed() -> None:
    with pytest.raises(ValueError, match="3 probabilities for 2 answers"):
        lowest_floor(np.ones(3), np.ones(2, np.bool_), 0.9)


LABELLED = st.lists(st.tuples(st.sampled_from([0.3, 0.5, 0.7, 0.9, 0.995, 1.0]), st.integers(0, 12)), max_size=60)


def rows_of(cells: list[tuple[float, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of which one in each cell is wrong if its number is even."""
    probabilities = np.repeat([own for own, _ in cells], [1 + count for _, count in cells])
    right = np.concatenate([np.empty(0, np.bool_), *([count % 2 == 1, *[True] * count] for _, count in cells)])
    return probabilities.astype(np.float64), right.astype(np.bool_)


GOALS = st.floats(0.5, 0.99)


@given(LABELLED, GOALS, st.randoms())
@example([(1.0, 11)] * 30, 0.9, None)
def test_the_order_of_rows_does_not_matter(cells: list[tuple[float, int]], accuracy: float, draws: object) -> None:
    probabilities, right = rows_of(cells)
    order = np.random.default_rng(hash(str(draws)) % 2**32).permutation(len(right))
    found = lowest_floor(probabilities, right, accuracy)
    assert lowest_floor(probabilities[order], right[order], accuracy) == found
    assert found.floor is None or found.floor in FLOORS
    assert (found.floor is None) == (found.bound is None)
    assert found.accepted <= found.rows == len(right)


@given(LABELLED, GOALS, GOALS)
def test_a_higher_goal_never_has_a_lower_floor(cells: list[tuple[float, int]], one: float, other: float) -> None:
    """Of sequences that start at the same floor."""
    probabilities, right = rows_of(cells)
    low, high = sorted((one, other))
    counts = [int((probabilities >= floor).sum()) for floor in FLOORS]
    starts = [next((at for at, n in enumerate(counts) if n >= rows_to_start(len(right), own)), None)
              for own in (low, high)]  # fmt: skip
    assume(starts[0] == starts[1])
    floors = [lowest_floor(probabilities, right, own).floor for own in (low, high)]
    assert (floors[0] or math.inf) <= (floors[1] or math.inf)


@given(LABELLED, GOALS)
def test_one_answer_has_the_floor_of_all(cells: list[tuple[float, int]], accuracy: float) -> None:
    probabilities, right = rows_of(cells)
    answers = np.zeros(len(right), np.int64)
    assert lowest_floors(probabilities, right, answers, 1, accuracy) == (lowest_floor(probabilities, right, accuracy),)


def test_each_answer_has_its_own_floor() -> None:
    draws = np.random.default_rng(1)
    answers = draws.integers(0, 3, 6000)
    probabilities = draws.uniform(0.5, 1, 6000)
    rates = np.where(answers == 0, 0.999, np.where(answers == 1, probabilities**0.3, 0.5))
    right = draws.random(6000) < rates
    all_right, some, none = lowest_floors(probabilities, right, answers, 3, 0.9)
    assert all_right.floor == 0.5
    assert some.floor is not None
    assert some.bound is not None
    assert some.bound >= 0.9
    assert none.floor is None
    assert [each.rows for each in (all_right, some, none)] == np.bincount(answers).tolist()
    stricter = lowest_floors(probabilities, right, np.zeros(6000, np.int64), 100, 0.9)
    assert stricter[1:] == (Acceptance(None, 0),) * 99


def test_doubtful_are_the_answers_below_their_floor() -> None:
    probabilities = np.array([[0.9, 0.1], [0.1, 0.9], [0.95, 0.05], [0.5, 0.5], [math.nan, math.nan]])
    assert doubtful(probabilities, 0.9).tolist() == [False, False, False, True, True]
    assert doubtful(probabilities, (0.92, None)).tolist() == [True, True, False, True, True]
    assert doubtful(probabilities, None).all()
    assert doubtful(probabilities[:0], 0.5).tolist() == []


# Made data of uniform probabilities from one half on. How often answers are right is a function of their probability,
# so the true rate above each floor is known: a promise is broken if it is below the goal.


POINTS = np.linspace(0.5, 1, 100_001)
GOAL = 0.95
RATES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "every floor just breaks it": lambda own: np.full(len(own), 0.9499),
    "low floors break it": lambda own: own**0.6,
    "strict ones hardly keep it": lambda own: np.where(own >= 0.9, 0.951, 0.94),
    "the surest answers are wrong more often": lambda own: np.where(own >= 0.9, 0.94, 0.99),
}


def broken(rate: Callable[[np.ndarray], np.ndarray], rows: int) -> int:
    """The number of draws in which the promise is broken."""
    draws, count = np.random.default_rng(rows), 0
    keeps = {floor: rate(POINTS[floor <= POINTS]).mean() >= GOAL for floor in FLOORS}
    for _ in range(DRAWS):
        probabilities = draws.uniform(0.5, 1, rows)
        found = lowest_floor(probabilities, draws.random(rows) < rate(probabilities), GOAL)
        count += found.floor is not None and not keeps[found.floor]
    return count


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [100, 700])
@pytest.mark.parametrize("case", RATES)
def test_the_promise_is_broken_in_five_percent_of_draws_at_most(case: str, rows: int) -> None:
    assert broken(RATES[case], rows) <= MOST_BROKEN


@pytest.mark.nightly
@pytest.mark.parametrize("rows", [300, 1000])
def test_per_answer_all_promises_together_are_broken_in_five_percent_at_most(rows: int) -> None:
    draws, goal, count = np.random.default_rng(rows), 0.9, 0
    rates = np.array([0.8999, 0.8999, 0.99, 0.5])  # of answers that are right whatever their probability
    for _ in range(DRAWS):
        answers, probabilities = draws.integers(0, 4, rows), draws.uniform(0.5, 1, rows)
        found = lowest_floors(probabilities, draws.random(rows) < rates[answers], answers, 4, goal)
        count += any(each.floor is not None and own < goal for each, own in zip(found, rates, strict=True))
    assert count <= MOST_BROKEN


@pytest.mark.nightly
def test_the_risk_is_used_and_not_only_kept() -> None:
    assert broken(RATES["every floor just breaks it"], 1200) >= DRAWS * RISK / 2

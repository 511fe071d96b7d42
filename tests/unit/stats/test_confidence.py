"""Confidence by the formulas that the APIs of typed decisions document, and cases worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefillcli.stats.confidence import choice_confidence, score_confidence
from tests.jobs.answers import confidence_of

WEIGHTS = st.lists(st.floats(0.0, 1.0), min_size=2, max_size=12).filter(sum)


def one_choice(*shares: float) -> float:
    return float(choice_confidence(np.array([shares]))[0])


def one_score(*shares: float) -> float:
    return float(score_confidence(np.array([shares]))[0])


@pytest.mark.parametrize(
    ("shares", "wanted"),
    [
        ((1.0,), 1.0),  # one option
        ((0.5, 0.5), 0.0),
        ((0.25, 0.25, 0.25, 0.25), 0.0),
        ((0.0, 1.0, 0.0), 1.0),
        ((0.75, 0.25), 0.5),  # (3/4 - 1/2) / (1/2)
        ((0.5, 0.3, 0.2), 0.25),  # (1/2 - 1/3) / (2/3)
        ((0.1, 0.2, 0.3, 0.4), 0.2),  # (2/5 - 1/4) / (3/4)
    ],
)
def test_a_choice_is_as_sure_as_its_likeliest_option_exceeds_an_even_share(
    shares: tuple[float, ...], wanted: float
) -> None:
    assert one_choice(*shares) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("shares", "wanted"),
    [
        ((1.0, 0.0, 0.0), 1.0),
        ((0.0, 1.0, 0.0), 1.0),
        # Three even levels are (1 + 0 + 1) / 3 = 2/3 from their middle, and 3/3 from the first.
        ((1 / 3, 1 / 3, 1 / 3), 0.0),
        ((0.25, 0.5, 0.25), 0.25),  # 1 - (1/2) / (2/3): the middle level
        ((0.1, 0.8, 0.1), 0.7),  # 1 - (1/5) / (2/3)
        ((0.8, 0.1, 0.1), 0.55),  # 1 - (1/10 + 2/10) / (2/3)
        ((0.6, 0.0, 0.4), 0.0),  # 1 - (8/10) / (2/3) is less than 0
        ((0.75, 0.25), 0.5),  # 1 - (1/4) / (1/2)
        ((0.5, 0.5), 0.0),
        ((0.1, 0.1, 0.6, 0.2, 0.0), 7 / 12),  # 1 - (2/10 + 1/10 + 2/10) / (6/5)
    ],
)
def test_a_level_is_as_sure_as_the_others_are_near(shares: tuple[float, ...], wanted: float) -> None:
    assert one_score(*shares) == pytest.approx(wanted)


@given(WEIGHTS)
def test_both_are_the_documented_formulas_between_0_and_1(weights: list[float]) -> None:
    shares = [each / sum(weights) for each in weights]
    for found, scale in ((one_choice(*shares), False), (one_score(*shares), True)):
        assert found == pytest.approx(max(0.0, confidence_of(shares, scale=scale)), abs=1e-12)
        assert 0 <= found <= 1 + 1e-12


def test_each_row_has_its_own() -> None:
    rows = np.array([[0.5, 0.3, 0.2], [0.0, 0.0, 1.0], [0.25, 0.5, 0.25]])
    assert choice_confidence(rows) == pytest.approx([one_choice(*row) for row in rows])
    assert score_confidence(rows) == pytest.approx([one_score(*row) for row in rows])
    assert choice_confidence(np.empty((0, 3))).shape == score_confidence(np.empty((0, 3))).shape == (0,)

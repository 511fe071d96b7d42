"""The distance between two nights' scores, against SciPy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ks_2samp

from prefillcli.judging.gates import chance_distance, score_distance

Counts = st.lists(st.integers(0, 30), min_size=8, max_size=8)


@given(Counts, Counts)
def test_the_distance_is_the_statistic_of_kolmogorov_and_smirnov(counts: list[int], others: list[int]) -> None:
    found = score_distance(counts, others)
    if not sum(counts) or not sum(others):
        assert found is None
        return
    samples = [np.repeat(np.arange(8), each) for each in (counts, others)]
    assert found == pytest.approx(ks_2samp(*samples, method="asymp").statistic, abs=1e-12)


def test_chance_stays_below_its_bound_in_nineteen_of_twenty_nights() -> None:
    random = np.random.default_rng(0)
    bound = chance_distance(2000, 3000)
    above = 0
    for _ in range(400):
        nights = (np.histogram(random.beta(2, 5, rows), 50, (0, 1))[0].tolist() for rows in (2000, 3000))
        distance = score_distance(*nights)
        above += distance is not None and distance > bound
    assert above <= 0.05 * 400 + 3 * np.sqrt(400 * 0.05 * 0.95)

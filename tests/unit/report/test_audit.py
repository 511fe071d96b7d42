"""Audit statistics against scipy's own tests, brute force and known values."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, hypergeom

from prefillcli.report.run import audit_lines
from prefillcli.stats.evaluation import auc
from prefillcli.stats.flips import Audit, audit_of, flip_bound, rows_for
from prefillcli.stats.intervals import exact_interval


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
@pytest.mark.parametrize(("flips", "rows"), [(0, 1), (1, 1), (0, 200), (3, 200), (100, 200), (200, 200), (7, 5000)])
def test_interval_and_bound_are_those_of_binomtest(flips: int, rows: int, confidence: float) -> None:
    two_sided = binomtest(flips, rows).proportion_ci(confidence, method="exact")
    one_sided = binomtest(flips, rows, alternative="less").proportion_ci(confidence, method="exact")

    assert exact_interval(flips, rows, confidence) == pytest.approx((two_sided.low, two_sided.high), abs=1e-10)
    assert flip_bound(flips, rows, confidence) == pytest.approx(one_sided.high, abs=1e-10)


def test_nothing_is_known_without_rows() -> None:
    assert exact_interval(0, 0) == (0.0, 1.0)
    assert flip_bound(0, 0) == 1.0


@given(st.floats(0.002, 0.9), st.integers(0, 12), st.sampled_from([0.8, 0.95, 0.99]))
def test_rows_for_is_the_least_number_of_rows(rate: float, flips: int, confidence: float) -> None:
    rows = rows_for(rate, flips, confidence)

    # So few flips or fewer are rarer than 1 - confidence where the true rate is `rate`; with a row less they are not.
    assert binom.cdf(flips, rows, rate) <= (1 - confidence) * (1 + 1e-9)
    assert binom.cdf(flips, rows - 1, rate) > (1 - confidence) * (1 - 1e-9)


@given(st.integers(1, 400), st.integers(0, 400), st.integers(0, 6), st.integers(0, 300))
def test_the_bound_without_replacement_is_the_hypergeometric_one(rows: int, rest: int, flips: int, more: int) -> None:
    flips, of = min(flips, rows), rows + rest
    bound = flip_bound(flips, rows, of=of)

    not_refused = [k for k in range(flips, of - rows + flips + 1) if hypergeom.cdf(flips, of, k, rows) > 0.05]
    most = max(not_refused, default=flips)
    assert most - 1e-6 <= bound * of <= most + 1 + 1e-6  # between two whole numbers of flips
    assert bound - 1e-9 <= flip_bound(flips, rows, of=of + more) <= flip_bound(flips, rows) + 1e-9


@pytest.mark.parametrize(
    "call",
    [
        lambda: exact_interval(3, 2),
        lambda: flip_bound(-1, 2),
        lambda: flip_bound(1, 2, 1.0),
        lambda: rows_for(0.0),
        lambda: rows_for(1.0),
        lambda: rows_for(0.1, -1),
        lambda: auc([0.5], []),
        lambda: audit_of([(0.1, 0.2, None)], flipped=[]),
    ],
)
def test_nonsense_is_refused(call) -> None:
    with pytest.raises(ValueError, match=r"\d"):
        call()


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=40))
def test_auc_is_the_share_of_pairs_in_the_right_order(rows: list[tuple[int, bool]]) -> None:
    scores, truths = [score / 6 for score, _ in rows], [truth for _, truth in rows]
    pairs = [
        (s > t) + 0.5 * (s == t)
        for s, right in zip(scores, truths, strict=True)
        for t, other in zip(scores, truths, strict=True)
        if right and not other
    ]

    assert auc(scores, truths) == (pytest.approx(sum(pairs) / len(pairs)) if pairs else None)


def test_audit_counts_flips_and_differences() -> None:
    audit = audit_of([(0.4, 0.6, True), (0.9, 0.8, True), (0.2, 0.2, False), (0.5, 0.5, None)])

    assert (audit.rows, audit.flips, audit.flip_rate, audit.truth_rows) == (4, 1, 0.25, 3)
    low, high = audit.interval or (math.nan, math.nan)
    assert (round(low, 4), round(high, 4)) == (0.0063, 0.8059)
    assert audit.mean_difference == pytest.approx(0.075)
    assert audit.max_difference == pytest.approx(0.2)
    assert (audit.auc_compressed, audit.auc_full) == (1.0, 1.0)
    assert Audit.model_validate_json(audit.model_dump_json()) == audit


def test_caller_says_what_flipped_with_more_than_two_labels() -> None:
    assert audit_of([(0.3, 0.4, None), (0.2, 0.9, None)], flipped=[True, False]).flips == 1


def test_audit_without_rows() -> None:
    audit = audit_of([])

    assert audit == Audit()
    assert (audit.flip_rate, audit.interval, audit.max_difference, audit.auc_full) == (None, None, None, None)
    assert audit_lines(audit) == [("audit", "no row was scored in full as well")]


def test_lines_for_the_table() -> None:
    audit = Audit(
        rows=200,
        flips=3,
        flip_rate=0.015,
        interval=exact_interval(3, 200),
        mean_difference=0.004,
        max_difference=0.62,
        auc_compressed=0.9981,
        auc_full=0.9994,
        truth_rows=200,
    )
    assert audit_lines(audit) == [
        (
            "audit",
            "200 rows also in full: 3 flips (1.5 %, 95 % interval 0.3-4.3 %), "
            "score difference 0.004 mean, 0.62 largest",
        ),
        ("audit AUC", "0.998 as scored, 0.999 in full (200 rows with a known answer)"),
    ]


def test_lines_of_one_row_and_one_class() -> None:
    assert audit_lines(audit_of([(0.7, 0.6, True)])) == [
        (
            "audit",
            "1 row also in full: 0 flips (0 %, 95 % interval 0.0-97.5 %), score difference 0.1 mean, 0.1 largest",
        ),
        ("audit AUC", "none: the known answers (1) are all the same"),
    ]
    rare = audit_of([(0.9, 0.1, None)] + [(0.1, 0.1, None)] * 9999)
    assert "1 flip (0.01 %, 95 % interval 0.0003-0.06 %)" in audit_lines(rare)[0][1]

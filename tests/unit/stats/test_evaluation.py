"""What scores are worth: the figures are scikit-learn's, and the intervals hold what they say."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, norm, pearsonr, spearmanr, t
from sklearn.calibration import calibration_curve
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    brier_score_loss,
    confusion_matrix,
    f1_score,
    log_loss,
    precision_recall_curve,
    precision_recall_fscore_support,
    roc_auc_score,
    roc_curve,
)

from prefillcli.stats.evaluation import (
    Ranking,
    closest_call,
    correlation,
    evaluate,
    evaluate_labels,
    evaluate_ordered,
    expected_calibration_error,
    nearest,
    reliability,
    surest_wrong,
)
from prefillcli.stats.intervals import mean_estimate

SCORES = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1 / 3, 1.0]), st.floats(0, 1))
ROWS = st.lists(st.tuples(SCORES, st.booleans()), min_size=1, max_size=60)
BOTH = ROWS.filter(lambda rows: len({right for _, right in rows}) == 2)


def arrays(rows: list[tuple[float, bool]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([score for score, _ in rows]), np.array([right for _, right in rows])


def simulated(rows: int, seed: int, shift: float = 1.5) -> tuple[np.ndarray, np.ndarray]:
    """Scores of which the positive ones are larger, too sure of themselves; 40 % are positive."""
    draws = np.random.default_rng(seed)
    truth = draws.random(rows) < 0.4
    return 1 / (1 + np.exp(-2 * (draws.normal(size=rows) + shift * (truth - 0.4)))), truth


@settings(max_examples=30, deadline=None)
@given(rows=BOTH)
def test_the_figures_are_those_of_scikit_learn(rows: list[tuple[float, bool]]) -> None:
    scores, truth = arrays(rows)
    found = evaluate(scores, truth)
    assert found.rows == len(rows)
    assert found.accuracy.value == pytest.approx(accuracy_score(truth, scores >= 0.5))
    assert found.auc.value == pytest.approx(roc_auc_score(truth, scores))
    assert found.average_precision.value == pytest.approx(average_precision_score(truth, scores))
    assert found.brier.value == pytest.approx(brier_score_loss(truth, scores))
    assert found.log_loss.value == pytest.approx(log_loss(truth, scores))
    assert found.confusion == confusion_matrix(~truth, ~(scores >= 0.5), labels=[False, True]).tolist()
    expected = precision_recall_fscore_support(truth, scores >= 0.5, labels=[True, False], zero_division=0)
    for at, label in enumerate(found.by_label):
        assert label.rows == expected[3][at]
        assert (label.precision.value or 0, label.recall.value or 0) == pytest.approx(
            (expected[0][at], expected[1][at])
        )
        assert label.f1 == pytest.approx(expected[2][at])
        assert label.auc.value == pytest.approx(roc_auc_score(truth, scores))
    assert found.by_label[1].average_precision == pytest.approx(average_precision_score(~truth, 1 - scores))


@pytest.mark.parametrize(("binning", "strategy"), [("equal-width", "uniform"), ("equal-mass", "quantile")])
@settings(max_examples=30, deadline=None)
@given(rows=ROWS, bins=st.integers(2, 20))
def test_the_reliability_bins_are_those_of_scikit_learn(
    binning: str, strategy: str, rows: list[tuple[float, bool]], bins: int
) -> None:
    scores, truth = arrays(rows)
    shares, means = (
        calibration_curve(truth, scores, n_bins=bins, strategy=strategy, pos_label=True)
        if len(set(truth.tolist())) == 2
        else (None, None)
    )
    found = reliability(scores, truth, bins, binning)
    assert sum(each.rows for each in found) == len(rows)
    if shares is not None:
        assert [each.share for each in found] == pytest.approx(shares.tolist())
        assert [each.mean_probability for each in found] == pytest.approx(means.tolist())
        error = sum(each.rows * abs(m - s) for each, m, s in zip(found, means, shares, strict=True)) / len(rows)
        assert expected_calibration_error(scores, truth, bins, binning) == pytest.approx(error)
    for each in found:
        assert each.low - 1e-12 <= each.mean_probability <= each.high + 1e-12


@settings(max_examples=30, deadline=None)
@given(rows=BOTH)
def test_the_best_threshold_is_the_best_of_all(rows: list[tuple[float, bool]]) -> None:
    scores, truth = arrays(rows)
    best = evaluate(scores, truth).best_f1
    every = {threshold: f1_score(truth, scores >= threshold) for threshold in set(scores.tolist())}
    assert best.f1 == pytest.approx(max(every.values()))
    assert best.f1 == pytest.approx(every[best.threshold])
    assert best.rows == (scores >= best.threshold).sum()


@settings(max_examples=30, deadline=None)
@given(rows=BOTH, wanted=st.floats(0.01, 1))
def test_the_wanted_precision_is_reached_with_the_largest_recall(
    rows: list[tuple[float, bool]], wanted: float
) -> None:
    scores, truth = arrays(rows)
    found = evaluate(scores, truth, wanted_precision=wanted).wanted_precision
    precision, recall, thresholds = precision_recall_curve(truth, scores)
    reaching = [(float(t), p, r) for p, r, t in zip(precision, recall, thresholds, strict=False) if p >= wanted]
    if reaching:
        lowest, precise, recalled = min(reaching)
        reached = found.reached
        assert (reached.threshold, reached.precision, reached.recall) == pytest.approx((lowest, precise, recalled))
        assert found.reason is None
    else:
        assert found.reached is None
        assert found.best.precision == pytest.approx(max(precision[:-1]))
        assert "most precise threshold" in found.reason


@settings(max_examples=20, deadline=None)
@given(data=st.data(), labels=st.integers(3, 5), rows=st.integers(1, 40))
def test_the_figures_of_several_labels_are_those_of_scikit_learn(data: st.DataObject, labels: int, rows: int) -> None:
    weights = st.lists(st.floats(0.01, 1), min_size=labels, max_size=labels)
    raw = np.array(data.draw(st.lists(weights, min_size=rows, max_size=rows)))
    truth = np.array(data.draw(st.lists(st.integers(0, labels - 1), min_size=rows, max_size=rows)))
    probabilities, names = raw / raw.sum(axis=1, keepdims=True), [f"label {at}" for at in range(labels)]
    found, every = evaluate_labels(probabilities, truth, names), list(range(labels))
    predicted = probabilities.argmax(axis=1)
    assert found.accuracy.value == pytest.approx(accuracy_score(truth, predicted))
    assert found.confusion == confusion_matrix(truth, predicted, labels=every).tolist()
    assert found.log_loss.value == pytest.approx(log_loss(truth, probabilities, labels=every))
    brier = brier_score_loss(truth, probabilities, labels=every, scale_by_half=False)
    assert found.brier.value == pytest.approx(brier)
    known = []
    for at, label in enumerate(found.by_label):
        of_label = truth == at
        assert label.label == names[at]
        assert label.brier == pytest.approx(((probabilities[:, at] - of_label) ** 2).mean())
        if 0 < of_label.sum() < rows:
            known.append(roc_auc_score(of_label, probabilities[:, at]))
            assert label.auc.value == pytest.approx(known[-1])
            assert label.average_precision == pytest.approx(average_precision_score(of_label, probabilities[:, at]))
        else:
            assert label.auc.value is None
            assert names[at] in label.auc.reason
    assert found.auc.value == (pytest.approx(np.mean(known)) if known else None)
    sureness = probabilities.max(axis=1)
    assert found.calibration_error.value == pytest.approx(expected_calibration_error(sureness, predicted == truth))


def test_the_curves_of_many_rows_are_drawn_by_some_of_their_points() -> None:
    scores, truth = simulated(5000, seed=1)
    found = evaluate(scores, truth)
    false_positives, true_positives, _ = roc_curve(truth, scores, drop_intermediate=False)
    every = set(zip(false_positives.tolist(), true_positives.tolist(), strict=True))
    drawn = list(zip(found.roc.false_positive_rate, found.roc.true_positive_rate, strict=True))
    assert set(drawn) <= every
    assert (drawn[0], drawn[-1], len(drawn) <= 201) == ((0, 0), (1, 1), True)
    area = np.trapezoid(found.roc.true_positive_rate, found.roc.false_positive_rate)
    assert area == pytest.approx(roc_auc_score(truth, scores), abs=0.002)
    precision, recall, _ = precision_recall_curve(truth, scores)
    pairs = set(zip(recall.tolist(), precision.tolist(), strict=True))
    curve = found.precision_recall
    assert set(zip(curve.recall, curve.precision, strict=True)) <= pairs
    assert curve.recall[-1] == 1


@pytest.mark.parametrize("truth", [True, False])
def test_of_one_kind_of_rows_there_is_no_area_but_a_reason(truth: bool) -> None:
    found = evaluate(np.array([0.2, 0.6, 0.9]), np.full(3, truth), ("good", "bad"), wanted_precision=0.9)
    assert found.auc.value is None
    assert found.auc.reason == f"good is the right answer of {'every' if truth else 'no'} row"
    assert (found.roc, found.accuracy.value) == (None, pytest.approx(2 / 3 if truth else 1 / 3))
    assert found.brier.value is not None
    if not truth:
        assert (found.best_f1, found.average_precision.value, found.wanted_precision.reached) == (None, None, None)
        assert found.wanted_precision.reason == "there are no positive rows"


def test_of_no_rows_there_is_nothing_but_reasons() -> None:
    for found in (
        evaluate(np.zeros(0), np.zeros(0, bool), without_truth=4, errors=2),
        evaluate_labels(np.zeros((0, 3)), np.zeros(0, np.int64), list("abc"), without_truth=4, errors=2),
    ):
        assert (found.rows, found.without_truth, found.errors) == (0, 4, 2)
        for estimate in (found.accuracy, found.auc, found.brier, found.log_loss, found.calibration_error):
            assert estimate.value is None
            assert estimate.reason
        assert (found.reliability, found.best_f1, found.roc) == ([], None, None)


def test_accuracy_has_the_exact_interval() -> None:
    scores, truth = simulated(300, seed=3)
    right = int(((scores >= 0.5) == truth).sum())
    expected = binomtest(right, 300).proportion_ci(0.95, method="exact")
    assert evaluate(scores, truth).accuracy.interval == pytest.approx((expected.low, expected.high))


def test_rows_that_are_perfectly_separated_leave_the_area_uncertain() -> None:
    low, high = Ranking.of(np.array([0.1, 0.2, 0.3, 0.8, 0.9]), np.array([0, 0, 0, 1, 1], bool)).area_interval()
    assert high == 1
    assert low == pytest.approx(binomtest(2, 2).proportion_ci(0.95, method="exact").low)
    many = Ranking.of(np.arange(2000) / 2000, np.arange(2000) >= 1000).area_interval()
    assert 0.995 < many[0] < 1


def covered(intervals: list[tuple[float, float]], value: float) -> float:
    return float(np.mean([low <= value <= high for low, high in intervals]))


@pytest.mark.parametrize(("rows", "shift"), [(40, 1.5), (300, 0.3), (300, 2.5)])
def test_the_interval_of_the_area_holds_it(rows: int, shift: float) -> None:
    true = float(norm.cdf(shift / np.sqrt(2)))
    rankings = [Ranking.of(*simulated(rows, seed, shift)) for seed in range(300)]
    share = covered([ranking.area_interval() for ranking in rankings if ranking.area is not None], true)
    assert 0.93 <= share <= 0.98


@pytest.mark.nightly
def test_the_bootstrap_holds_average_precision_and_calibration_error() -> None:
    scores, truth = simulated(200_000, seed=0)
    whole, parts = evaluate(scores, truth), []
    for at in range(150):
        rows = slice(100 * at, 100 * at + 100)
        parts.append(evaluate(scores[rows], truth[rows]))
    for name in ("average_precision", "brier", "log_loss", "calibration_error", "calibration_error_equal_mass"):
        share = covered([getattr(part, name).interval for part in parts], getattr(whole, name).value)
        assert 0.88 <= share <= 0.99, name


def test_the_calibration_error_of_calibrated_scores_may_be_nothing() -> None:
    found = []
    for seed in range(40):
        draws = np.random.default_rng(seed)
        scores = draws.random(300)
        found.append(evaluate(scores, draws.random(300) < scores))
    assert np.mean([each.calibration_error.value for each in found]) > 0.03, "chance alone makes it that large"
    for name in ("calibration_error", "calibration_error_equal_mass"):
        assert np.mean([getattr(each, name).interval[0] == 0 for each in found]) >= 0.88


def test_groups_of_scores_give_the_intervals_of_single_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, truth = simulated(4000, seed=7)
    grouped = evaluate(scores, truth)
    monkeypatch.setattr("prefillcli.stats.evaluation._MOST_GROUPS", 10_000)
    single = evaluate(scores, truth)
    for name in ("average_precision", "calibration_error", "calibration_error_equal_mass"):
        one, other = getattr(grouped, name), getattr(single, name)
        assert one.value == other.value
        width = other.interval[1] - other.interval[0]
        assert one.interval == pytest.approx(other.interval, abs=0.15 * width), name


def test_the_intervals_are_the_same_every_time() -> None:
    scores, truth = simulated(500, seed=9)
    assert evaluate(scores, truth) == evaluate(scores.copy(), truth.copy())


def test_the_mean_of_one_value_has_no_interval() -> None:
    assert mean_estimate(np.array([0.25])).model_dump() == {"value": 0.25, "interval": None, "reason": None}


def test_the_surest_wrong_rows_come_first() -> None:
    scores = np.array([0.9, 0.99, 0.2, 0.6, 0.005, 0.7])
    probabilities, truth = np.stack([scores, 1 - scores], axis=1), np.array([1, 1, 0, 0, 0, 0])
    assert surest_wrong(probabilities, truth, 3) == [4, 1, 0]
    assert surest_wrong(probabilities, truth, 10) == [4, 1, 0, 2]
    assert surest_wrong(probabilities, probabilities.argmax(axis=1), 10) == []


def test_of_equally_near_rows_the_first_are_taken() -> None:
    scores = np.array([0.5, 0.4, 0.6, 0.5, 0.1, 0.5])
    assert nearest(scores, 0.5, 2) == [0, 3]
    assert nearest(scores, 0.5, 4)[:3] == [0, 3, 5]
    assert closest_call(np.array([[0.8, 0.1, 0.1], [0.4, 0.35, 0.25], [0.3, 0.3, 0.4]]), 2) == [1, 2]


@pytest.mark.parametrize("threshold", [1e-9, 0.003, 0.5, 0.97, 1.0])
def test_no_row_far_from_a_threshold_is_near_it(threshold: float) -> None:
    scores = np.array([0.0, 4e-12, 5e-10, 2e-3, 0.01, 0.3, 0.74, 0.76, 0.95, 0.985, 1.0])
    odds = [Fraction(score) * (1 - Fraction(threshold)) for score in scores.tolist()]
    others = [Fraction(threshold) * (1 - Fraction(score)) for score in scores.tolist()]
    near = [at for at, (own, other) in enumerate(zip(odds, others, strict=True)) if own <= 3 * other <= 9 * own]
    assert sorted(nearest(scores, threshold, 20)) == near


def test_no_row_is_near_where_all_are_sure() -> None:
    assert nearest(np.array([4e-12, 2e-11, 0.99]), 0.5, 20) == []
    assert closest_call(np.array([[0.98, 0.01, 0.01], [0.1, 0.2, 0.7]]), 20) == []


@pytest.mark.parametrize("scores", [[0.1, 1.5], [0.1, -0.1], [0.1, float("nan")], [0.1]])
def test_what_is_no_probability_is_refused(scores: list[float]) -> None:
    with pytest.raises(ValueError, match="probabilit"):
        evaluate(np.array(scores), np.array([True, False]))


NUMBERS = st.lists(
    st.tuples(st.sampled_from([1.0, 2.0, 2.5, 4.0]), st.one_of(st.sampled_from([1.0, 3.0]), st.floats(-9, 9))),
    min_size=3, max_size=40,
)  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(rows=NUMBERS)
def test_the_figures_of_numbers_are_those_of_scipy(rows: list[tuple[float, float]]) -> None:
    said, right = (np.array(side) for side in zip(*rows, strict=True))
    found = evaluate_ordered(said, said[::-1], right)
    assert found.rows == len(rows)
    for figures, own in ((found.mean, said), (found.likeliest, said[::-1])):
        assert figures.mean_error.value == pytest.approx(np.abs(own - right).mean())
        assert figures.root_mean_square_error.value == pytest.approx(np.sqrt(((own - right) ** 2).mean()))
        if np.ptp(own) == 0 or np.ptp(right) == 0:
            assert (figures.spearman.value, figures.pearson.value) == (None, None)
            assert "same number" in (figures.spearman.reason or "")
            continue
        assert figures.spearman.value == pytest.approx(spearmanr(own, right).statistic)
        if np.ptp(right) > 1e-3:  # closer numbers are told apart by rounding errors
            assert figures.pearson.value == pytest.approx(pearsonr(own, right).statistic, abs=1e-6)


def test_the_intervals_of_numbers_are_fishers_and_students() -> None:
    draws = np.random.default_rng(3)
    right = draws.normal(size=50)
    said = right + draws.normal(size=50)
    found = evaluate_ordered(said, said, right).mean
    wanted = pearsonr(said, right).confidence_interval(0.95)
    assert found.pearson.interval == pytest.approx((wanted.low, wanted.high))
    value, reach = np.arctanh(found.spearman.value), norm.ppf(0.975) * np.sqrt((1 + found.spearman.value**2 / 2) / 47)
    assert found.spearman.interval == pytest.approx((np.tanh(value - reach), np.tanh(value + reach)))
    squares = (said - right) ** 2
    low, high = t.interval(0.95, 49, squares.mean(), squares.std(ddof=1) / np.sqrt(50))
    assert found.root_mean_square_error.interval == pytest.approx((np.sqrt(low), np.sqrt(high)))


@pytest.mark.parametrize("ranks", [True, False])
def test_the_intervals_of_correlations_of_grades_hold_what_they_say(ranks: bool) -> None:
    """Grades from 1 to 5 beside what a judge says of them, as many rows as a small test set has."""

    def correlated(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        draws = np.random.default_rng(seed)
        right = draws.integers(1, 6, rows).astype(np.float64)
        return right + 1.5 * draws.normal(size=rows), right

    true = correlation(*correlated(400_000, 0), ranks=ranks).value
    found = [correlation(*correlated(100, seed), ranks=ranks).interval or (1, 1) for seed in range(1, 401)]
    held = sum(low <= true <= high for low, high in found)
    assert 0.92 <= held / len(found) <= 0.985


def test_the_interval_of_a_perfect_correlation_is_left_out() -> None:
    said = np.arange(9.0)
    assert correlation(said, said**3, ranks=True).model_dump() == {"value": 1.0, "interval": None, "reason": None}
    assert correlation(said[:1], said[:1]).value is None
    with pytest.raises(ValueError, match="9 numbers beside 8"):
        correlation(said, said[1:])

"""Calibrated exits: what they promise holds, and where nothing can be promised there are none."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, hypergeom

from prefillcli.engines.base import Readings
from prefillcli.reading.exits import policy
from prefillcli.reading.exits.policy import ExitPolicy, policy_of
from prefillcli.reading.exits.proof import (
    CAUTIONS,
    ExitCosts,
    ExitProof,
    LearningRows,
    cautions_of_labels,
    class_sizes,
    halves,
    judge_classes,
    least_caution,
    most_flips,
    prove_exits,
    work_of,
)
from tests.unit.reading.exits.populations import LAYERS, population

RESAMPLINGS = 200
ALLOWED = 0.03
SURE = 0.01  # a test here fails by chance in one of a hundred seeds at most, and seeds are fixed


def exits_of(rows: LearningRows, max_flips: float = ALLOWED, **more: object) -> ExitProof:
    return prove_exits(rows, layers=LAYERS, max_flips=max_flips, **more)  # type: ignore[arg-type]


def leave(policy: ExitPolicy, rows: LearningRows) -> tuple[np.ndarray, np.ndarray]:
    """The layer that each row leaves after, and its label: an own account of a policy, row by row."""
    layer, label = np.full(len(rows), LAYERS - 1), rows.final.argmax(axis=1)
    inside = np.ones(len(rows), dtype=bool)
    for each in policy.exits:
        found = policy.decide(each.layer, rows.readings[each.layer])
        going = inside & found.decided
        layer[going], label[going] = each.layer, found.logprobs.argmax(axis=1)[going]
        inside &= ~found.decided
    return layer, label


def flip_rates(policy: ExitPolicy | None, rows: LearningRows) -> list[float]:
    if policy is None:
        return [0.0] * rows.final.shape[1]
    truth, (_, label) = rows.final.argmax(axis=1), leave(policy, rows)
    return [float(np.mean(label[truth == each] != each)) for each in range(rows.final.shape[1])]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("labels", "offset", "heavy"),
    [(2, 0.0, False), (2, 1.0, False), (2, 0.0, True), (3, 0.0, False)],
    ids=["balanced", "one label is rarer", "heavy tails", "three labels"],
)
def test_more_than_allowed_flip_in_one_of_twenty_jobs_at_most(
    labels: int, offset: float, heavy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each class. The rates are those of a large population, of which every job calibrates on other rows.

    The promise does not depend on the probes, so the network, which takes longest, is left out.
    """
    monkeypatch.delitem(policy.FITS, "mlp")  # type: ignore[arg-type]
    everybody = population(10_000, labels=labels, seed=1, offset=offset, heavy=heavy)
    drawn = np.random.default_rng(0)
    broken, left = np.zeros(labels, dtype=int), []
    for job in range(RESAMPLINGS):
        rows = everybody.chosen(drawn.choice(len(everybody), 400 * labels, replace=False))
        found = calibrate_few_layers(rows, job)
        if found.policy is not None:
            broken += np.array(flip_rates(found.policy, everybody)) > ALLOWED
            left.append(found.findings.gain)
    assert len(left) > RESAMPLINGS / 4  # the promise is tested on jobs that have exits
    for each in broken:
        assert binomtest(int(each), RESAMPLINGS, 0.05, alternative="greater").pvalue > SURE


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("labels", "offset", "heavy"),
    [(2, 2.0, False), (2, 0.0, False), (2, 2.0, True), (3, 1.0, False)],
    ids=["one label is rare", "balanced", "heavy tails", "three labels"],
)
def test_more_than_allowed_of_all_rows_flip_in_one_of_twenty_jobs_at_most(
    labels: int, offset: float, heavy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    repetitions = 150
    monkeypatch.delitem(policy.FITS, "mlp")  # type: ignore[arg-type]
    everybody = population(10_000, labels=labels, seed=1, offset=offset, heavy=heavy)
    drawn = np.random.default_rng(0)
    truth, broken, jobs = everybody.truth, 0, 0
    for job in range(repetitions):
        rows = everybody.chosen(drawn.choice(len(everybody), 400, replace=False))
        found = calibrate_few_layers(rows, job, flips_of="all")
        if found.policy is not None:
            broken += float(np.mean(leave(found.policy, everybody)[1] != truth)) > ALLOWED
            jobs += 1
    assert jobs > repetitions / 4
    assert binomtest(broken, repetitions, 0.05, alternative="greater").pvalue > SURE


def test_bounds_for_rows_drawn_without_replacement_hold_for_each_answer() -> None:
    """The most flips that pass, where one row more of an answer than is allowed flips; sizes are not known."""
    rows, of, size, bad, allowed = 600, 1200, 600, 13, 0.02
    draws, wrong, jobs = np.random.default_rng(1), 0, 600
    for flips, others, rest in draws.multivariate_hypergeometric([bad, size - bad, of - size], rows, jobs):
        truth = np.repeat([0, 0, 1], [flips, others, rest])
        flipped = np.repeat([True, False, False], [flips, others, rest])
        fitted = draws.permutation(flips + others)[: (flips + others) // 2]
        judged = np.delete(np.arange(flips + others), fitted)
        found = class_sizes(truth, np.zeros(len(fitted), np.int64), 2, of)[0]
        assert found is not None
        # Those that fit may have taken flips with them: then fewer than are allowed are left, and to pass is right.
        too_many = bad - flipped[fitted].sum() > allowed * (size - len(fitted))
        wrong += too_many and flipped[judged].sum() <= most_flips(len(judged), allowed, 0.951, found)
    assert binomtest(int(wrong), jobs, 0.05, alternative="greater").pvalue > SURE


def test_a_large_part_of_a_job_proves_more_than_the_same_rows_of_a_larger_one() -> None:
    rows = population(780, seed=0)
    rows = LearningRows({4: rows.readings[4]}, rows.final, rows.weights)
    alone, part, all_rows = exits_of(rows), exits_of(rows, of=1560), exits_of(rows, of=1560, flips_of="all")
    assert exits_of(rows, of=15_600).findings == alone.findings
    for few, many in zip(alone.findings.classes, part.findings.classes, strict=True):
        assert few.caution is not None
        assert many.caution is not None
        assert (few.flips, -few.caution) < (many.flips, -many.caution)
    for each in (*part.findings.classes, *all_rows.findings.classes):
        size = 1170 * each.judged // 390  # about as many as the judged ones are drawn from
        assert each.bound <= ALLOWED
        assert hypergeom.cdf(each.flips, size, math.ceil(each.bound * size), each.judged) < 0.05


def test_a_rare_class_does_not_stop_exits_where_the_flips_of_all_rows_are_bounded() -> None:
    rows = population(2000, seed=0, offset=3.2)
    assert exits_of(rows).policy is None
    found = exits_of(rows, flips_of="all", labels=("No", "Yes"))
    assert found.policy is not None
    (everyone,) = found.findings.classes
    assert (everyone.label, everyone.fitted, everyone.judged) == ("all rows", 1000, 1000)
    assert binom.cdf(everyone.flips, 1000, ALLOWED) <= 0.05
    judge = halves(rows, 0, "all")[1]
    assert int((leave(found.policy, judge)[1] != judge.truth).sum()) <= everyone.flips
    for each in found.policy.exits:
        assert each.thresholds[0] == each.thresholds[1] < math.inf


def test_the_rows_that_judge_all_rows_together_are_drawn_without_regard_to_their_labels() -> None:
    rows = population(400, seed=0)
    drawn = [int(halves(rows, seed, "all")[1].truth.sum()) for seed in range(30)]
    assert len(set(drawn)) > 5
    assert len({int(halves(rows, seed)[1].truth.sum()) for seed in range(30)}) == 1


def test_too_few_rows_for_all_rows_together_say_how_many_it_takes() -> None:
    found = exits_of(population(120, seed=0), flips_of="all")
    assert found.policy is None
    assert found.reason == (
        "60 rows were judged, and it takes 99 without a flip to prove at most 3.00%: about 198 learning rows in all"
    )


def calibrate_few_layers(rows: LearningRows, seed: int, **more: object) -> ExitProof:
    """Two layers are enough for what is promised, and quicker."""
    few = LearningRows({layer: rows.readings[layer] for layer in (3, 5)}, rows.final, rows.weights)
    return exits_of(few, seed=seed, **more)


@pytest.mark.parametrize("seed", range(5))
def test_hidden_states_that_know_nothing_give_no_exits(seed: int) -> None:
    found = exits_of(population(1500, seed=seed, blind=True), seed=seed)
    assert found.policy is None
    assert found.reason is not None
    assert "no exit would save work at 3.00% flips" in found.reason


def test_probes_that_fit_noise_are_caught_by_the_judging_half() -> None:
    """Readings that tell the fitting half's answers, and nothing about any other row."""
    rows = population(1200, seed=3, blind=True)
    fit, _ = halves(LearningRows({}, rows.final, np.arange(1200.0)), seed=0)
    told = np.isin(np.arange(1200), fit.weights.astype(int))
    margin = np.diff(rows.final, axis=1)
    readings = {}
    for layer, each in rows.readings.items():
        hidden = np.column_stack(
            [np.where(told[:, None], margin, -margin), each.hidden[:, 1:] * 0.01, np.full(1200, 5)]
        )
        readings[layer] = Readings(hidden.astype(np.float32), each.logits, each.before)
    found = exits_of(LearningRows(readings, rows.final, rows.weights))
    assert found.policy is None
    assert found.reason is not None
    assert "the judged rows prove at most 3.00% flips only where too few rows leave to save work" in found.reason


def test_a_rare_class_stops_exits_and_the_reason_says_how_many_rows_it_takes() -> None:
    rows = population(2000, seed=0, offset=3.2)
    positive = int((rows.final.argmax(axis=1) == 1).sum())
    assert 10 < positive < 80
    found = exits_of(rows, labels=("No", "Yes"))
    assert found.policy is None
    assert found.reason is not None
    judged = positive - positive // 2
    total = found.findings.judged
    assert f"the full read answers {judged} of {total:,} judged rows with 'Yes'" in found.reason
    assert "it takes 99 without a flip to prove at most 3.00%" in found.reason
    assert f"about {2 * math.ceil(total * 99 / judged):,} learning rows in all" in found.reason
    assert [each.rows_needed for each in found.findings.classes] == [99, 99]


def test_a_label_that_never_comes_first_stops_exits() -> None:
    rows = population(800, labels=3, seed=0)
    final = rows.final.copy()
    final[:, 2] -= 100
    found = exits_of(LearningRows(rows.readings, final, rows.weights), labels=("a", "b", "c"))
    assert found.policy is None
    assert found.reason is not None
    assert "answers 0 of 401 judged rows with 'c'" in found.reason or "answers 0 of 400 judged rows" in found.reason


def test_rows_of_a_rare_class_may_leave_where_the_others_are_protected() -> None:
    """Two labels: what leaves with the rare one can only flip rows of the common one, which are many."""
    rows = population(2500, seed=0, offset=2.0)
    few = LearningRows({1: rows.readings[1], 4: rows.readings[4]}, rows.final, rows.weights)
    found = exits_of(few, max_flips=0.012, costs=ExitCosts(reading=0.0, regroup=0.0))
    common, rare = found.findings.classes
    assert rare.judged < rare.rows_needed <= common.judged
    assert found.policy is not None
    for each in found.policy.exits:
        assert math.isinf(each.thresholds[0])
        assert math.isfinite(each.thresholds[1])
    assert found.findings.exits[0].thresholds[0] is None


def test_the_same_rows_give_the_same_exits() -> None:
    rows = population(800, seed=4)
    one, two = exits_of(rows, seed=7), exits_of(rows, seed=7)
    assert one.policy is not None
    assert two.policy is not None
    assert json.dumps(one.policy.to_json()) == json.dumps(two.policy.to_json())
    assert one.findings == two.findings
    assert exits_of(rows, seed=8).findings.classes != one.findings.classes


def test_what_was_found_is_what_the_policy_does() -> None:
    rows = population(1600, seed=2)
    found = exits_of(rows)
    assert found.policy is not None
    said = found.findings
    assert found.policy.layers == tuple(each.layer for each in said.exits)
    fit, judge = halves(rows, 0)
    assert (said.fitted, said.judged) == (len(fit), len(judge))
    for number, each in enumerate(said.classes):
        assert each.fitted == int((fit.final.argmax(axis=1) == number).sum())
        assert each.bound <= ALLOWED
        assert binom.cdf(each.flips, each.judged, ALLOWED) <= 0.05
        assert flip_rates(found.policy, judge)[number] <= each.flips / each.judged
    layer, _ = leave(found.policy, judge)
    assert sum(each.leaving for each in said.exits) == pytest.approx(np.mean(layer < LAYERS - 1), abs=0.06)
    assert 1 < (said.gain or 0) < 8
    rates = [point.flip_rate for point in said.curve]
    assert rates[0] <= rates[-1]
    assert [point.caution for point in said.curve] == sorted((point.caution for point in said.curve), reverse=True)


def test_rows_with_values_that_are_not_finite_are_left_out() -> None:
    rows = population(800, seed=5)
    final, hidden = rows.final.copy(), rows.readings[2].hidden.copy()
    final[3, 0], hidden[5, 1] = np.nan, np.inf
    broken = dict(rows.readings) | {2: Readings(hidden, rows.readings[2].logits, rows.readings[2].before)}
    good = np.setdiff1d(np.arange(800), [3, 5])
    found = exits_of(LearningRows(broken, final, rows.weights)).findings
    assert found.dropped == 2
    assert found.model_copy(update={"dropped": 0}) == exits_of(rows.chosen(good)).findings


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_hardly_any_rows_give_a_reason(rows: int) -> None:
    found = exits_of(population(rows, seed=0))
    assert found.policy is None
    assert found.reason


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 300), st.integers(0, 12), st.sampled_from([0.01, 0.03, 0.1]), st.integers(0, 2**32 - 1))
def test_the_level_of_a_class_is_the_last_one_before_the_first_failure(
    rows: int, wrong: int, allowed: float, seed: int
) -> None:
    draws = np.random.default_rng(seed)
    danger = np.full(rows, -math.inf)
    danger[: min(rows, wrong)] = np.exp(draws.normal(0, 1, min(rows, wrong)))
    found = least_caution(danger, allowed, 0.95)
    passed = []
    for caution in CAUTIONS:
        flips = int((danger >= caution).sum())
        if rows == 0 or binom.cdf(flips, rows, allowed) > 0.05:  # the same test as the exact bound's
            break
        passed.append((caution, flips))
    assert found.passed == len(passed)
    assert (found.caution, found.flips) == (passed[-1] if passed else (math.inf, 0))


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_no_class_flips_more_than_its_own_test_has_counted(labels: int, exits: int, seed: int) -> None:
    """Whatever the other classes' cautions are, and whichever exits are dropped."""
    draws = np.random.default_rng(seed)
    truth = draws.integers(0, labels, 600)
    label = np.where(draws.random((exits, 600)) < 0.9, truth, draws.integers(0, labels, (exits, 600)))
    reach = np.exp(draws.normal(0, 1, (exits, 600)))
    tested = judge_classes(reach, label != truth, truth, 0.1, 0.95, (None,) * labels)
    at = np.array(cautions_of_labels(tested, labels))
    for kept in ([*range(exits)], [*range(exits)][1:]):
        decided = reach[kept] >= at[label[kept]]
        left = work_of(decided, kept, np.ones(600), exits + 1, ExitCosts()).left
        answer = np.where(left >= 0, label[kept][left, np.arange(600)] if kept else truth, truth)
        for number, each in enumerate(tested):
            assert int((answer != truth)[truth == number].sum()) <= each.flips


def test_work_is_counted_by_hand() -> None:
    """Four rows of 10, 20, 30 and 40 tokens, ten layers, exits after layers index 3 and 6."""
    costs = ExitCosts(keys=0.1, repeated=0.2, regroup=0.05, reading=2.0)
    decided = np.array([[True, False, False, False], [True, True, False, False]])
    found = work_of(decided, (3, 6), np.array([10.0, 20.0, 30.0, 40.0]), 10, costs)
    assert found.left.tolist() == [0, 1, -1, -1]
    assert found.peeks == (False, True)
    assert found.leaving == (0.25, 0.25)
    layers = 10 * 4 + 20 * 6.1 + 70 * 9.1
    extra = 4 * 2 + 90 * 0.05 + 3 * 2 + 70 * (0.05 + 0.2)
    assert found.layers == pytest.approx(layers / 100)
    assert found.share == pytest.approx((layers + extra) / (100 * 9.1))


def test_a_policy_comes_back_from_its_file() -> None:
    found = exits_of(population(800, seed=4))
    assert found.policy is not None
    again = policy_of(json.loads(json.dumps(found.policy.to_json())))
    assert again.to_json() == found.policy.to_json()
    fresh = population(50, seed=9)
    for layer in found.policy.layers:
        for one, two in zip(
            again.decide(layer, fresh.readings[layer]), found.policy.decide(layer, fresh.readings[layer]), strict=True
        ):
            assert (one == two).all()


def test_work_of_a_first_model_with_layers_inside_it_is_counted_by_hand() -> None:
    """Words, half of a first model, its end, and a model of ten layers, for rows of 10, 20, 30 and 40 tokens."""
    costs = ExitCosts(keys=0.1, regroup=0.05, reading=2.0, first={-11: 0.5, -6: 2.0, -1: 4.0}, ends={-6: -1})
    decided = np.array([[True, False, False, False], [False, True, False, False], [False, False, True, False]])
    tokens = np.array([10.0, 20.0, 30.0, 40.0])
    found = work_of(decided, (-11, -6, -1), tokens, 10, costs)
    assert found.left.tolist() == [0, 1, 2, -1]
    words, half, end = 100 * 0.5, 90 * 2.0 + 3 * 2.0 + 70 * 0.05, 70 * 2.0
    assert found.share == pytest.approx((words + half + end + 40 * 9.1) / (100 * 9.1))
    # Without its end it is not read that far.
    found = work_of(decided[:2], (-11, -6), tokens, 10, costs)
    assert found.share == pytest.approx((words + half + 70 * 9.1) / (100 * 9.1))

"""Rows that a first model cannot read: they go to the model, and are judged as all others are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from prefillcli.engines.base import Readings
from prefillcli.images.image import FIRST_FEATURE
from prefillcli.plan.behind import LabelSet
from prefillcli.reading.exits.first import WIDTH, InnerRule, WordsReader, hashed_words, readings_of
from prefillcli.reading.exits.policy import ExitLayer, ExitPolicy, RidgeProbe
from prefillcli.reading.exits.proof import ExitCosts, LearningRows, prove_exits
from prefillcli.rows.records import BEFORE, Prompt


def test_words_are_counted_and_what_repeats_counts_by_its_logarithm() -> None:
    one, twice = (hashed_words(np.array(tokens, np.int32)) for tokens in ([7], [7, 7]))
    assert np.count_nonzero(one) == 1
    assert np.abs(one).max() == np.float32(np.log(2))
    assert np.count_nonzero(twice) == 2  # the token, and the pair
    assert np.abs(twice).max() == np.float32(np.log(3))
    # Other tokens lie elsewhere, and the order of two counts.
    assert not np.array_equal(hashed_words(np.array([8, 9], np.int32)), hashed_words(np.array([9, 8], np.int32)))
    seen = np.array([8, FIRST_FEATURE + 5, FIRST_FEATURE + 6, 9], np.int32)
    assert np.array_equal(hashed_words(seen), hashed_words(np.array([8, 9], np.int32))), "images have no words"
    many = np.stack([hashed_words(np.array([token], np.int32)) for token in range(4096)])
    assert (np.count_nonzero(many, axis=1) == 1).all()
    assert np.count_nonzero(many.any(axis=0)) > 0.9 * WIDTH * (1 - np.exp(-4096 / WIDTH))  # as many as chance fills
    assert abs(float(np.sign(many).sum())) < 4 * 4096**0.5


def test_where_a_word_decides_words_know_the_answer() -> None:
    draws = np.random.default_rng(1)
    prompts = draws.integers(0, 300, (1600, 30))
    said = draws.random(1600) < 0.5
    prompts[np.arange(1600), draws.integers(0, 30, 1600)] = np.where(said, 901, 902)
    final = np.where(said, 3.0, -3.0)[:, None] * np.array([1.0, -1.0]) + draws.normal(0, 0.1, (1600, 1))
    labels = LabelSet.of([[5], [7]])
    rows = [Prompt(row, own.astype(np.int32), labels=labels) for row, own in enumerate(prompts)]
    found = WordsReader(2).read(rows, lambda tokens: None)
    readings = {BEFORE - 1: readings_of(found), BEFORE: readings_of([None] * 1600)}
    costs = ExitCosts(first={BEFORE - 1: 0.01, BEFORE: 1.0})
    learnt = prove_exits(LearningRows(readings, final, np.ones(1600)), layers=8, max_flips=0.02, costs=costs)
    assert learnt.policy is not None
    assert learnt.policy.layers == (BEFORE - 1,)
    assert learnt.policy.inside is None
    assert learnt.findings.exits[0].leaving > 0.9


def test_what_it_cannot_read_is_judged_too() -> None:
    draws = np.random.default_rng(0)
    margin = draws.normal(size=1200)
    final = np.stack([margin, -margin], axis=1)
    hidden = np.stack([margin, np.full(1200, 0.5)], axis=1).astype(np.float32)
    known = Readings(hidden, final, final)
    unread = draws.random(1200) < 0.4
    first = Readings(*(np.where(unread[:, None], np.nan, each).astype(each.dtype) for each in (hidden, final, final)))
    rows = LearningRows({BEFORE: first, 2: known}, final, np.ones(1200))
    found = prove_exits(rows, layers=8, max_flips=0.05)
    assert (found.findings.dropped, found.findings.fitted + found.findings.judged) == (0, 1200)
    assert found.policy is not None
    assert BEFORE in found.policy.layers
    # Of the rows that it cannot read none leaves before the first layer.
    assert found.policy.decide(BEFORE, first).decided[~unread].mean() > 0.8
    assert not found.policy.decide(BEFORE, first).decided[unread].any()
    assert found.findings.exits[0].leaving < 0.65
    broken = replace(rows, readings={2: replace(known, hidden=np.where(unread[:, None], np.nan, hidden))})
    assert prove_exits(broken, layers=8, max_flips=0.05).findings.dropped == unread.sum()


def test_where_the_end_of_a_first_model_decides_nothing_all_prompts_leave_after_its_last_inner_layer() -> None:
    probe = RidgeProbe(np.array([[1.0, -1.0]], np.float32), np.zeros(2, np.float32))
    policy = ExitPolicy(tuple(ExitLayer(layer, probe, (1.0, 1.0), peek=False) for layer in (2, 5)))
    hidden = np.array([[3.0], [0.0]], np.float32)  # of unit length: a lead of 2, and none
    shown = Readings(hidden, np.zeros((2, 2)), np.zeros((2, 2)))
    for ends, last in ((False, [True, False]), (True, [True, True])):
        rule = InnerRule(policy, ends)
        assert rule.decide(2, shown).decided.tolist() == [True, False]
        assert rule.decide(5, shown).decided.tolist() == last
    # Those in doubt are told apart by what they leave with.
    assert policy.suffices(5, rule.decide(5, shown).logprobs).tolist() == [True, False]

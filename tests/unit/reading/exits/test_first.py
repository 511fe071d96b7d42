"""Rows that a first model cannot read: they go to the model, and are judged as all others are."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from prefillcli.core.request import Request
from prefillcli.engines.base import Readings
from prefillcli.plan.behind import LabelSet
from prefillcli.reading.exits.first import WIDTH, FirstReading, WordsReader, hashed_words, readings_of
from prefillcli.reading.exits.judging import CalibrationRows, ExitCosts, calibrate_exits
from prefillcli.reading.exits.learning import ExitUse, JobExits
from prefillcli.reading.exits.policy import ExitLayer, ExitPolicy, RidgeProbe
from prefillcli.rows.records import BEFORE, Prompt


class Blind:
    """A first model that can read nothing."""

    tokens, seconds, block = 0, 0.0, 2

    def read(self, prompts: Any, tick: Any) -> list[None]:
        return [None] * len(prompts)


def test_where_it_can_read_nothing_it_decides_nothing() -> None:
    probe = RidgeProbe(np.ones((8, 2), np.float32), np.array([9, 0], np.float32))
    policy = ExitPolicy((ExitLayer(BEFORE, probe, (0.0, 0.0)),))
    exits = JobExits(
        policy, ExitUse(status="calibrated", max_flips=0.1, model_layers=4), first={BEFORE: ("blind", Blind())}
    )
    question = Request(Prompt(0, np.arange(5, dtype=np.int32), labels=LabelSet.of([[5], [7]])))
    assert exits.ahead([question] * 3, lambda tokens: None) == ({}, 0)


def test_words_are_counted_and_what_repeats_counts_by_its_logarithm() -> None:
    one, twice = (hashed_words(np.array(tokens, np.int32)) for tokens in ([7], [7, 7]))
    assert np.count_nonzero(one) == 1
    assert np.abs(one).max() == np.float32(np.log(2))
    assert np.count_nonzero(twice) == 2  # the token, and the pair
    assert np.abs(twice).max() == np.float32(np.log(3))
    # Other tokens lie elsewhere, and the order of two counts.
    assert not np.array_equal(hashed_words(np.array([8, 9], np.int32)), hashed_words(np.array([9, 8], np.int32)))
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
    learnt = calibrate_exits(CalibrationRows(readings, final, np.ones(1600)), layers=8, max_flips=0.02, costs=costs)
    assert learnt.policy is not None
    assert learnt.policy.layers == (BEFORE - 1,)
    assert learnt.policy.inside is None
    assert learnt.findings.exits[0].leaving > 0.9


def test_each_of_several_reads_what_is_left_by_those_ahead_of_it() -> None:
    draws = np.random.default_rng(2)
    asked: list[list[int]] = []

    class Sees:
        """Reads a number of each prompt: its first token, or its second, less 50."""

        tokens, seconds, block = 0, 0.0, 7

        def __init__(self, place: int) -> None:
            self.place = place

        def read(self, prompts: Any, tick: Any) -> list[FirstReading]:
            asked.append([prompt.row for prompt in prompts])
            values = [float(prompt.tokens[self.place]) - 50 for prompt in prompts]
            return [FirstReading(np.array([each, 1], np.float32), np.zeros(2), 0, 0.0) for each in values]

    # Unit length makes the sign of what it reads; the bias of 0 is exceeded by all but a value near 0.
    probe = RidgeProbe(np.array([[1, -1], [0, 0]], np.float32), np.zeros(2, np.float32))
    policy = ExitPolicy((ExitLayer(BEFORE - 1, probe, (1.9, 1.9)), ExitLayer(BEFORE, probe, (1.9, math.inf))))
    use = ExitUse(status="calibrated", max_flips=0.1, model_layers=4)
    exits = JobExits(policy, use, first={BEFORE - 1: ("one", Sees(0)), BEFORE: ("two", Sees(1))})
    tokens = np.where(draws.random((40, 2)) < 0.5, 50, draws.choice([10, 90], (40, 2)))
    labels = LabelSet.of([[5], [7]])
    questions = [Request(Prompt(row, own.astype(np.int32), labels=labels)) for row, own in enumerate(tokens)]
    rows, _ = exits.ahead(questions, lambda tokens: None)
    first = {row for row in range(40) if tokens[row, 0] != 50}
    second = {row for row in range(40) if row not in first and tokens[row, 1] == 90}
    assert {number: row.exit_layer for number, row in rows.items()} == dict.fromkeys(first, -1) | dict.fromkeys(
        second, 0
    )
    assert [row for part in asked for row in part] == [*range(40), *(row for row in range(40) if row not in first)]
    assert max(map(len, asked)) == 7
    assert (exits.first_rows[BEFORE - 1], exits.first_rows[BEFORE]) == (40, 40 - len(first))


def test_what_it_cannot_read_is_judged_too() -> None:
    draws = np.random.default_rng(0)
    margin = draws.normal(size=1200)
    final = np.stack([margin, -margin], axis=1)
    hidden = np.stack([margin, np.full(1200, 0.5)], axis=1).astype(np.float32)
    known = Readings(hidden, final, final)
    unread = draws.random(1200) < 0.4
    first = Readings(*(np.where(unread[:, None], np.nan, each).astype(each.dtype) for each in (hidden, final, final)))
    rows = CalibrationRows({BEFORE: first, 2: known}, final, np.ones(1200))
    found = calibrate_exits(rows, layers=8, max_flips=0.05)
    assert (found.findings.dropped, found.findings.fitted + found.findings.judged) == (0, 1200)
    assert found.policy is not None
    assert BEFORE in found.policy.layers
    # Of the rows that it cannot read none leaves before the first layer.
    assert found.policy.decide(BEFORE, first).decided[~unread].mean() > 0.8
    assert not found.policy.decide(BEFORE, first).decided[unread].any()
    assert found.findings.exits[0].leaving < 0.65
    broken = replace(rows, readings={2: replace(known, hidden=np.where(unread[:, None], np.nan, hidden))})
    assert calibrate_exits(broken, layers=8, max_flips=0.05).findings.dropped == unread.sum()

"""Cuts for a rare answer: what they prove holds whatever the scores, and good scores spare rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from prefillcli.reading.exits.rare import Search

ROWS = 1200
JOBS = 100


def kept(answers: Any, scores: Any, seed: int, **targets: float) -> tuple[float, float, int]:
    """Recall and precision of the output, and the rows that are read: an own account of what cuts mean."""
    asked: list[int] = []

    def read(rows: Any) -> Any:
        asked.extend(rows.tolist())
        return answers[rows]

    known = np.random.default_rng([seed, 1]).permutation(len(scores))[:50]
    search = Search(scores, known, answers[known], read, seed=seed, **targets)
    cuts = search.cuts()
    assert len(set(asked) | set(known.tolist())) == len(asked) + len(known)  # no row is read twice
    seen = {*asked, *known.tolist()}
    output = [
        bool(answer) if row in seen or not (score < cuts.low or score >= cuts.high) else bool(score >= cuts.high)
        for row, (answer, score) in enumerate(zip(answers, scores, strict=True))
    ]
    right = int((answers & output).sum())
    free = sum(row not in seen and (score < cuts.low or score >= cuts.high) for row, score in enumerate(scores))
    return right / max(int(answers.sum()), 1), right / max(sum(output), 1), len(scores) - free


def population(seed: int, shape: str) -> tuple[Any, Any]:
    """Answers and scores. Misleading ones lead hidden answers, a little more than is allowed, right below the others,
    or mistake some rows with the highest scores."""
    draws = np.random.default_rng(seed)
    answers = draws.random(ROWS) < 0.2
    scores = draws.normal(0, 1, ROWS) + 3.0 * answers
    if shape == "misleading":
        hidden = draws.random(ROWS) < 0.12
        scores = np.where(answers & hidden, draws.normal(-0.5, 0.1, ROWS), scores)
        scores = np.where(~answers & (draws.random(ROWS) < 0.04), draws.normal(5, 0.1, ROWS), scores)
    return answers, scores


@pytest.mark.nightly
@pytest.mark.parametrize("shape", ["telling", "misleading"])
def test_less_is_kept_than_promised_in_one_of_twenty_jobs_at_most(shape: str) -> None:
    found = [kept(*population(seed, shape), seed, recall=0.9, precision=0.85) for seed in range(JOBS)]
    for number, target in ((0, 0.9), (1, 0.85)):
        failed = sum(each[number] < target for each in found)
        assert binomtest(failed, JOBS, 0.05, alternative="greater").pvalue > 0.01
    if shape == "telling":
        assert np.mean([read for *_, read in found]) < ROWS / 2


def test_scores_that_know_nothing_decide_nothing() -> None:
    answers = np.random.default_rng(0).random(ROWS) < 0.05
    scores = np.random.default_rng(1).normal(0, 1, ROWS)
    assert kept(answers, scores, 0, recall=0.95)[2] > 0.95 * ROWS


def test_rows_without_a_score_are_read() -> None:
    answers, scores = population(0, "telling")
    blind = np.where(np.arange(ROWS) % 3 == 0, math.nan, scores)
    assert kept(answers, blind, 0, recall=0.9, precision=0.85)[2] >= ROWS / 3
    assert kept(answers, np.full(ROWS, math.nan), 0, recall=0.9) == (1.0, 1.0, ROWS)


@pytest.mark.parametrize("rows", [0, 1, 2, 7])
def test_few_rows_and_none(rows: int) -> None:
    answers = np.arange(rows) % 2 == 0
    search = Search(np.arange(rows) / 7, np.zeros(0, np.int64), answers[:0], answers.__getitem__, recall=0.9)
    assert search.cuts().low == -math.inf

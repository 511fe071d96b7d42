"""Rows that a first model cannot read: they go to the model, and are judged as all others are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from prefillcli.core.question import Question
from prefillcli.data.rows import BEFORE, Prompt
from prefillcli.engines.base import Readings
from prefillcli.features.exits.judging import CalibrationRows, calibrate_exits
from prefillcli.features.exits.learning import ExitUse, JobExits
from prefillcli.features.exits.policy import ExitLayer, ExitPolicy, RidgeProbe
from prefillcli.plan.behind import LabelSet


class Blind:
    """A first model that can read nothing."""

    tokens, seconds = 0, 0.0

    def read(self, prompts: Any, tick: Any) -> list[None]:
        return [None] * len(prompts)


def test_where_it_can_read_nothing_it_decides_nothing() -> None:
    probe = RidgeProbe(np.ones((8, 2), np.float32), np.array([9, 0], np.float32))
    policy = ExitPolicy((ExitLayer(BEFORE, probe, (0.0, 0.0)),))
    exits = JobExits(policy, ExitUse(status="calibrated", max_flips=0.1, model_layers=4), first=Blind())  # type: ignore[arg-type]
    question = Question(Prompt(0, np.arange(5, dtype=np.int32), labels=LabelSet.of([[5], [7]])))
    assert exits.ahead([question] * 3, lambda tokens: None) == ({}, 0)


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

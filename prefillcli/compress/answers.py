"""Readings through an engine: plan, packs, answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from prefillcli.compress.reading import Reading
from prefillcli.engines.base import Engine, LabelTokens
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import Plan, make_plan


def plan_readings(readings: Sequence[Reading], limits: Limits, schedule: str = "prefix-tree") -> Plan:
    """The plan of what the target reads."""
    return make_plan(
        [reading.tokens for reading in readings], limits, schedule, [reading.positions for reading in readings]
    )


def answer(
    engine: Engine,
    readings: Sequence[Reading],
    labels: Sequence[LabelTokens],
    tick: Callable[[float], None] = lambda tokens: None,
    schedule: str = "prefix-tree",
) -> npt.NDArray[np.float64]:
    """Label log-probabilities [readings, labels]. `labels` are `Labels.sets`, which the prompts refer to."""
    found: dict[int, npt.NDArray[np.float64]] = {}
    for pack in plan_readings(readings, engine.limits, schedule).packs:
        for answers in engine.answer(pack, lambda i: labels[readings[i].prompt.labels], tick):
            found |= {each.prompt: each.logprobs for each in answers}
    return np.stack([found[number] for number in range(len(readings))])

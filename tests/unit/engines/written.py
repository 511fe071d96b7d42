"""What an engine is asked to write, and the reference for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from prefillcli.engines.base import Answer, Treatment
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.plan import make_plan
from prefillcli.walk.continuations import Beginning, Writing

LABELS = LabelSet.of([[8], [9, 10]])


@dataclass(frozen=True)
class Given:
    """`Continuations` of prompts that are known to be wanted."""

    writing: Writing
    beginnings: Mapping[int, Beginning]
    again: bool = False

    def wanted(self, answers: Sequence[Answer]) -> Mapping[int, Beginning]:
        return {each.prompt: self.beginnings[each.prompt] for each in answers if each.prompt in self.beginnings}

    def of(self, prompts: Collection[int]) -> Given:
        return replace(self, beginnings={key: own for key, own in self.beginnings.items() if key in prompts})


def answers(engine: Any, prompts: Sequence[npt.NDArray[np.int32]], continuations: Given) -> dict[int, Answer]:
    """What an engine says of prompts, and writes behind them."""
    treatment = Treatment(continuations=continuations)
    packs = make_plan(prompts, engine.limits).packs
    found = engine.answer_all(packs, lambda _: LABELS, lambda _: None, treatment)
    return {each.prompt: each for group in found for each in group}

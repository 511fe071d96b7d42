"""Rows are scored again without each section of their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from prefillcli.core.further import Further, Question, WantedRow
from prefillcli.core.request import Request
from prefillcli.data.rows import Float64Array, Prompt, ScoredRow, SectionEffect, Window
from prefillcli.engines.base import Answer
from prefillcli.features.evidence.sections import MOST_SECTIONS, Ablation
from prefillcli.plan.pack import Limits
from prefillcli.stats.evaluation import Measure, label_scores


@dataclass(frozen=True)
class Weighing(Further):
    """Weighs the sections of prompts that `ablation` leaves out, by scores of this `temperature` and `measure`."""

    ablation: Ablation
    temperature: float = 1.0
    measure: Measure = Measure.SHARES
    most = MOST_SECTIONS

    def questions(self, window: Window, row: WantedRow, limits: Limits) -> Sequence[Question]:
        weighed = self.weigh(row.request, row.scored)
        fitting = [
            (place, request)
            for place, request in enumerate(weighed.requests)
            if len(request.tokens) <= limits.max_tokens
        ]
        waiting = {place for place, _ in fitting}

        def take(place: int, answer: Answer | None) -> None:
            waiting.discard(place)
            if answer is not None:
                weighed.take(place, answer)
            if not waiting:
                row.scored.evidence = weighed.effects()

        if not fitting:
            row.scored.evidence = ()
        return [Question(request, partial(take, place)) for place, request in fitting]

    def weigh(self, request: Request, scored: ScoredRow) -> WeighedRow:
        """What has to be read for the evidence of a row that was read by this request."""
        return WeighedRow(self, request.prompt, _whole_answer(request.prompt, scored))

    def score(self, numbers: Float64Array) -> float:
        """The score of the first label."""
        return float(label_scores(numbers, self.temperature, self.measure)[0])

    def close(self) -> None:
        self.ablation.close()


class WeighedRow:
    """A row, scored without each of its sections.

    There is one of the `requests` for each section: the prompt without it. Where the row's own answer, of which
    `whole` are the label numbers, is not of the whole prompt and all layers, the last request is the whole prompt:
    like is compared with like. All are to be read in full and to the last layer. There are none where the prompt has
    no sections.
    """

    def __init__(self, evidence: Weighing, prompt: Prompt, whole: Float64Array | None) -> None:
        self._evidence = evidence
        ablated = evidence.ablation.of(prompt)
        self._sections = [each.section for each in ablated]
        self._numbers: dict[int, Float64Array] = {} if whole is None else {len(ablated): whole}
        prompts = [each.prompt for each in ablated] + ([prompt] if ablated and whole is None else [])
        self.requests = tuple(map(Request, prompts))

    def take(self, place: int, answer: Answer) -> None:
        """The answer to the request at this place among the `requests`."""
        self._numbers[place] = answer.logprobs

    def effects(self) -> tuple[SectionEffect, ...]:
        """By how much each section raises the score of the first label, the largest change first, ties in their order.

        Sections without an answer, or with one that is not a finite number, are left out; so are all where the whole
        prompt has none.
        """
        scores = {place: self._evidence.score(numbers) for place, numbers in self._numbers.items()}
        whole = scores.get(len(self._sections), float("nan"))
        changes = [whole - scores.get(place, float("nan")) for place in range(len(self._sections))]
        found = [
            SectionEffect(name, change)
            for name, change in zip(self._sections, changes, strict=True)
            if np.isfinite(change)
        ]
        return tuple(sorted(found, key=lambda effect: -abs(effect.change)))


def _whole_answer(prompt: Prompt, scored: ScoredRow) -> Float64Array | None:
    """The label numbers of a row's whole prompt after the last layer, if it was read so."""
    if scored.audit is not None:
        return scored.audit
    if scored.exit_layer is None and scored.kept_tokens == len(prompt.tokens):
        return scored.logprobs
    return None

"""What `prefill inspect` adds to a row's score: the text behind it, and the evidence beside that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prefillcli.compress.request import Request
from prefillcli.data.output.columns import ColumnGroups, OutputSchema
from prefillcli.data.prompts.beginnings import Beginnings
from prefillcli.data.prompts.builder import PromptBuilder
from prefillcli.data.prompts.labels import Labels
from prefillcli.data.prompts.sections import Ablation
from prefillcli.data.prompts.templates import rationale_texts
from prefillcli.data.reading.source import Source
from prefillcli.data.rows import ScoredRow, Window
from prefillcli.engines.base import Engine
from prefillcli.jobs.evidence import Evidence
from prefillcli.jobs.follow_up import FollowUp
from prefillcli.jobs.row_choice import RowChoice
from prefillcli.jobs.wanted_rows import JobRationales, LabelledChoice
from prefillcli.jobs.window_work import WantedRow
from prefillcli.jobs.writing_setup import writing_of
from prefillcli.models.open import Opened
from prefillcli.options.inspect import InspectSettings


@dataclass(frozen=True, slots=True)
class ExplainedRow:
    """A row with its text and its evidence, as far as they are asked for; `begins` is what the text goes on behind."""

    scored: ScoredRow
    begins: str = ""


class Explainer:
    """Writes about a row of an input, and weighs its sections, as `prefill score` does with these settings."""

    def __init__(
        self, settings: InspectSettings, opened: Opened, source: Source, builder: PromptBuilder, labels: Labels
    ) -> None:
        self._labels = labels
        self._texts = rationale_texts(settings.rationale_template, labels.names) if settings.rationale else {}
        self.writing = writing_of(settings, opened, labels.names)
        schema = OutputSchema(
            labels=labels.names,
            id_name=settings.id_column,
            carried=source.carried_schema,
            json_carried=source.kind == "jsonl",
            json_text=False,
            truth=None,
            groups=ColumnGroups(),
            measure=labels.measure,
        )
        evidence = None
        if settings.evidence:
            evidence = Evidence(Ablation(builder, labels), settings.temperature, labels.measure)
        self._job = JobRationales(
            LabelledChoice(RowChoice(None, schema), settings.temperature),
            self.writing,
            Beginnings(opened.tokenizer, labels, self._texts) if self._texts else None,
            id_column=settings.id_column,
            evidence=evidence,
        )

    def explain(
        self, engine: Engine, window: Window, request: Request, scored: ScoredRow, tick: Callable[[float], None]
    ) -> ExplainedRow:
        """What is asked for of a row that was read by this request. `tick` as in `Engine.answer`. Raises ResourceError
        if the engine cannot go on."""
        label = self._job.choice.wanted(window, [scored]).get(scored.row)
        if label is None or (self._job.writing is None and self._job.evidence is None):
            return ExplainedRow(scored)
        follow = FollowUp(window, [WantedRow(request, scored, label)], self._job, engine.limits, "prefix-tree")
        sets = self._labels.sets
        for pack in follow.plan.packs:
            treatment = follow.treatment(pack)
            for answers in engine.answer(
                pack, lambda number: sets[follow.requests[number].prompt.labels], tick, treatment
            ):
                follow.take(pack, answers)
        return ExplainedRow(scored, self._texts.get(self._labels.names[label], "").strip())

    def close(self) -> None:
        """Let go of the process that renders templates."""
        if self._job.evidence is not None:
            self._job.evidence.close()

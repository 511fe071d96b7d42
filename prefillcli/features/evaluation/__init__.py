"""The evaluation of scores against right answers, which are in a column of the input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prefillcli.core.feature import Feature
from prefillcli.options.option import Settings, option
from prefillcli.options.requirements import Requirement

if TYPE_CHECKING:
    from prefillcli.core.feature import Job, Labels, Manifest, Opening, RunReport, Section, Window

PANEL = "Evaluation"
PLAN = "evaluation"  # the key of a shard's plan for the `EvaluationPlan`, which `prefill merge` reads
TRUTH = Requirement(
    lambda s: s.truth is not None, "is for the evaluation, but there is none", "name the right answers with --truth"
)


class EvaluationOptions(Settings):
    """The right answers that scores are compared with."""

    truth: str | None = option(
        None,
        "Column with the right answer; kept in the output. The report says what the scores are worth.",
        PANEL, changes="columns", metavar="COLUMN",
    )  # fmt: skip
    wanted_precision: float | None = option(
        None,
        "Report the lowest threshold with this precision, e.g. 0.9, and its recall; for two labels.",
        PANEL, changes="report", metavar="SHARE", requires=TRUTH, gt=0, le=1,
    )  # fmt: skip


class Evaluating(Feature):
    """The evaluation of a job. The key `evaluation` of its report holds a `report.RunEvaluation`."""

    order = 60
    options = {"score": EvaluationOptions}
    keys = {"evaluation": None}

    @classmethod
    def asked(cls, settings: EvaluationOptions) -> bool:
        return settings.truth is not None

    def names_rows(self) -> bool:
        return True

    def meaningless(self, labels: Labels) -> list[str]:
        from prefillcli.stats.evaluation import Measure

        return ["truth"] if labels.measure is Measure.CHANCES else []

    def carried(self) -> list[str | None]:
        return [self.settings.truth, getattr(self.settings, "choices_column", None)]

    def truth_column(self) -> str:
        return str(self.settings.truth)

    def models_opened(self, opening: Opening) -> None:
        from prefillcli.features.evaluation.evaluating import EvaluationPlan

        self._plan = EvaluationPlan.of(self.settings, opening.labels, self.settings.truth)

    def first_window(self, job: Job, window: Window) -> None:
        from prefillcli.features.evaluation.evaluating import require_labels

        if window.index == 0:
            require_labels(window, self._plan, json_text=job.source.kind == "jsonl")

    def shard_ended(self, job: Job) -> Mapping[str, Any]:
        return {PLAN: self._plan.to_json()}

    def ended(self, job: Job) -> None:
        from prefillcli.features.evaluation.evaluating import evaluate_output, with_texts

        with job.clock.phase("evaluate"), job.stop.at_once():
            found = evaluate_output(job.sink.location, self._plan, self.settings.id_column)
            job.report.blocks["evaluation"] = with_texts(found, job) if self.settings.show_text else found

    @classmethod
    def merged(cls, report: RunReport, output: str, manifest: Manifest) -> None:
        from prefillcli.features.evaluation.evaluating import EvaluationPlan, evaluate_output

        plan = EvaluationPlan.of_json(manifest.plan.get(PLAN))
        if plan is not None:
            report.blocks["evaluation"] = evaluate_output(output, plan, manifest.job.id_name)

    @classmethod
    def section(cls, report: RunReport) -> Section | None:
        if report.blocks["evaluation"] is None:
            return None
        from prefillcli.features.evaluation.evaluating import section

        return section(report.blocks["evaluation"])


FEATURE = Evaluating

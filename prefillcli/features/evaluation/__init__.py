"""The evaluation of scores against right answers, which are in a column of the input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prefillcli.core.feature import Feature
from prefillcli.errors import UsageError, did_you_mean
from prefillcli.options.groups import split_names
from prefillcli.options.option import Settings, option
from prefillcli.options.requirements import Requirement

if TYPE_CHECKING:
    from prefillcli.core.feature import Job, Labels, Manifest, Opening, RunReport, Section
    from prefillcli.judging.evaluation import EvaluationPlan, RunEvaluation

PLAN = "evaluation"  # the key of a shard's plan for the `EvaluationPlan`, which `prefill merge` reads




class Evaluating(Feature):
    """The evaluation of a job. The key `evaluation` of its report holds an `evaluating.RunEvaluation`, and
    `evaluations` holds one for each of several questions."""

    order = 60
    options = {"score": EvaluationOptions}
    keys = {"evaluation": None, "evaluations": {}}

    @classmethod
    def asked(cls, settings: EvaluationOptions) -> bool:
        return settings.truth is not None

    def names_rows(self) -> bool:
        return True

    def meaningless(self, labels: Labels) -> list[str]:
        from prefillcli.stats.evaluation import Measure

        return ["truth"] if labels.measure is Measure.CHANCES else []

    def check(self) -> None:
        _ = self._columns  # raises UsageError

    @property
    def _columns(self) -> dict[str, str]:
        # The column with the right answers to each question; without several, to the only one, which has no name.
        truth = self.settings.truth
        if getattr(self.settings, "questions", None) is None:
            return {"": truth}
        pairs = [[side.strip() for side in text.partition("=")] for text in split_names(truth)]
        found = {name: column for name, _, column in pairs}
        if not all(name and column for name, _, column in pairs) or len(found) < len(pairs):
            raise UsageError(
                f"--truth {truth}: with --questions it names the column of each question once\n"
                "write it like relevant=is_relevant,tone=right_tone"
            )
        return found

    def carried(self) -> list[str | None]:
        return [*self._columns.values(), getattr(self.settings, "choices_column", None)]

    def truth_column(self) -> str | None:
        return self._columns.get("")

    def labels_named(self, opening: Opening) -> None:
        from prefillcli.judging.evaluation import require_labels

        for plan in self._planned(opening).values():
            require_labels(opening.source, plan)

    def models_opened(self, opening: Opening) -> None:
        self._plans = self._planned(opening)  # which question is calibrated is known now

    def _planned(self, opening: Opening) -> dict[int, EvaluationPlan]:
        # The plan of each question with right answers, by its number.
        from prefillcli.judging.evaluation import EvaluationPlan

        schema, labels = opening.schema(), opening.labels.each or (opening.labels,)
        answers = {own.name: (number, own) for number, own in enumerate(schema.questions or (schema,))}
        found = {}
        for name, column in self._columns.items():
            if name not in answers:
                raise UsageError(
                    f"--truth {name}={column}: no question {name!r}{did_you_mean(name, answers)}\n"
                    f"there are {', '.join(answers)}"
                )
            number, own = answers[name]
            found[number] = EvaluationPlan.of(self.settings, labels[number], own, column)
        return found

    def shard_ended(self, job: Job) -> Mapping[str, Any]:
        return {PLAN: [plan.to_json() for plan in self._plans.values()]}

    def ended(self, job: Job) -> None:
        from prefillcli.judging.evaluation import evaluate_output, with_texts

        with job.clock.phase("evaluate"), job.stop.at_once():
            for number, plan in self._plans.items():
                found = evaluate_output(job.sink.location, plan, self.settings.id_column)
                self._take(
                    job.report, plan.question, with_texts(found, job, number) if self.settings.show_text else found
                )

    @classmethod
    def merged(cls, report: RunReport, output: str, manifest: Manifest) -> None:
        from prefillcli.judging.evaluation import EvaluationPlan, evaluate_output

        for content in manifest.plan.get(PLAN) or ():
            if (plan := EvaluationPlan.of_json(content)) is not None:
                cls._take(report, plan.question, evaluate_output(output, plan, manifest.job.id_name))

    @staticmethod
    def _take(report: RunReport, question: str, found: RunEvaluation) -> None:
        if question:
            report.blocks["evaluations"][question] = found
        else:
            report.blocks["evaluation"] = found

    @classmethod
    def section(cls, report: RunReport) -> Section | Sequence[Section] | None:
        from prefillcli.judging.evaluation import section, summary_of

        if report.blocks["evaluation"] is not None:
            return section(report.blocks["evaluation"])
        of_questions = report.blocks["evaluations"]
        found = [section(own, name) for name, own in of_questions.items()]
        if found:
            found[0].summary = {"evaluations": {name: summary_of(own) for name, own in of_questions.items()}}
        return found


FEATURE = Evaluating

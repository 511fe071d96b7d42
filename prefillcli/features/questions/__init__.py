"""`--questions`: several questions about each row, whose document is computed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from prefillcli.core.feature import Feature, Objection, features_of
from prefillcli.errors import UsageError
from prefillcli.options.option import ANSWERS, Settings, option
from prefillcli.options.requirements import Requirement

if TYPE_CHECKING:
    from pathlib import Path

    from prefillcli.core.feature import (
        Choice,
        Condition,
        Counts,
        Further,
        Group,
        Job,
        Labels,
        LocalModels,
        Manifest,
        Opened,
        Opening,
        OutputSchema,
        PromptBuilder,
        PromptSettings,
        RowTemplate,
        RunReport,
        Section,
    )
    from prefillcli.asking.questions import SecondPass

CORRELATIONS = "correlations"  # in a report, and in the plan of a shard

# Options whose place the file takes.
_REPLACED = {
    "labels": "each question has its labels in the file",
    "label_values": "a question has its values in the file",
    "template": "the file has the templates",
    "prompt_column": "the templates of the file name the columns",
}






class Questions(Feature):
    """The questions of a job. The key `orders` of its report has a list of `report.OrderUse`, the key `audits` one of
    `report.AuditUse`, and `correlations` has a `correlation.Correlations`."""

    order = 4
    options = {"score": QuestionOptions}
    keys = {"orders": None, "audits": None, "correlations": None}
    _templates: Sequence[RowTemplate] = ()
    _second: SecondPass | None = None

    @property
    def columns(self) -> Sequence[Group]:  # type: ignore[override]  # as the options say
        return ("question_rows",) if self.settings.questions_as == "rows" else ()

    @classmethod
    def asked(cls, settings: QuestionOptions) -> bool:
        return settings.questions is not None

    def check(self) -> None:
        settings = self.settings
        for name, why in _REPLACED.items():
            if name in settings.model_fields_set:
                raise UsageError(f"--{name.replace('_', '-')}: {why}\nleave it out, or --questions")
        others = [each for each in features_of(settings) if each is not self and type(each) is not type(self)]
        refused = {
            next(filter(None, (each.learns() for each in others if each.flips and not each.rewrites)), ""): (
                any(each.flips and not each.rewrites for each in others),
                "exits learn what decides between the labels of one question",
            ),
            "--calibrate-with": (
                bool(getattr(settings, "calibrate_with", ())),
                "it asks about nothing with the template of one question",
            ),
            "--choices-column": (
                getattr(settings, "choices_column", None) is not None,
                "each question has its labels in the file",
            ),
        }
        for name, (given, why) in refused.items():
            if given:
                raise UsageError(
                    f"--questions cannot be combined with {name}: {why}\n"
                    "leave that out, or ask one question with --template and --labels"
                )

    def joint(self, option: str) -> Objection | None:
        if option != "--since":
            return None
        return Objection("a row's results depend on all its questions", "score all rows again")

    @property
    def _names(self) -> list[str]:
        return [each.name for each in self._file.questions]

    def starting(self) -> None:
        from prefillcli.asking.question_file import read_questions

        self._file = read_questions(self.settings.questions)
        if self._file.swapped and any("evidence" in each.columns for each in features_of(self.settings)):
            raise UsageError(
                "--evidence: a question with swap has two prompts, in which a section stands in different places\n"
                "leave one of them out"
            )

    def prompt_columns(self, available: Sequence[str]) -> Sequence[str]:
        from prefillcli.asking.questions import compiled

        self._templates = compiled(self._file, available)
        return tuple(dict.fromkeys(name for each in self._templates for name in each.columns))

    def own_labels(self, model: Path) -> bool:
        return True

    def labels(self, opened: Opened) -> Labels:
        from prefillcli.asking.questions import QuestionLabels

        if opened.files.head is not None:
            raise UsageError(
                "--questions: the model's classification head is read, which has one answer to a text\n"
                "read the next token with --head vocabulary"
            )
        return QuestionLabels(opened.tokenizer, self._file, self.settings)

    def answers(self, opening: Opening) -> Sequence[OutputSchema]:
        groups = opening.groups & {"audit", "label_scores", "evidence", "rationales"}
        calibrated = opening.groups & {"calibrated"}
        return tuple(
            replace(each, groups=each.groups | groups | (calibrated if each.name == opening.calibrated else set()))
            for each in self._file.schemas
        )

    def prompt_builder(self, opening: Opening, settings: PromptSettings, available: Sequence[str]) -> PromptBuilder:
        from prefillcli.asking.questions import QuestionsBuilder, compiled

        if getattr(opening.labels, "digest", None) != self._file.digest:
            raise UsageError(f"--questions {self.settings.questions}: the file is not as it was\nmake another Scorer")
        # A builder closes its templates: another one gets its own.
        templates, self._templates = self._templates or compiled(self._file, available), []
        return QuestionsBuilder(opening.opened.tokenizer, settings, available, self._file, templates)

    def condition(self, schema: OutputSchema) -> Condition | None:
        from prefillcli.asking.questions import SecondPass

        settings, waiting = self.settings, self._file.waiting
        others = [each for each in features_of(settings) if each.asks() or each.rewrites]
        # A question that is compressed or audited, or about which more is asked, is asked with all others.
        apart = bool(waiting) and not others and not settings.audit and settings.engine == "torch"
        self._second = SecondPass(schema, waiting) if apart else None
        return self._second

    def further(self, opening: Opening, choice: Choice) -> Further | None:
        return self._second

    def identity(self, opening: Opening, values: dict[str, Any], models: LocalModels) -> Mapping[str, str]:
        from prefillcli.data.output.target import QUESTION_ROWS

        values.pop("questions")
        found = {"questions": self._file.digest}
        return found | {QUESTION_ROWS: ",".join(self._names)} if self.columns else found

    def reported(self, job: Job, counts: Counts | None) -> None:
        from prefillcli.judging.questions import audits_of, orders_of

        job.report.blocks.update({"orders": orders_of(counts), "audits": audits_of(counts)})

    def shard_ended(self, job: Job) -> Mapping[str, Any]:
        return {CORRELATIONS: self._names}

    def ended(self, job: Job) -> None:
        with job.clock.phase("evaluate"), job.stop.at_once():
            self._correlate(job.report, job.sink.location, self._names)

    @classmethod
    def merged(cls, report: RunReport, output: str, manifest: Manifest) -> None:
        from prefillcli.judging.questions import audits_of, orders_of

        report.blocks.update({"orders": orders_of(manifest.counts), "audits": audits_of(manifest.counts)})
        cls._correlate(report, output, manifest.plan.get(CORRELATIONS) or ())

    @staticmethod
    def _correlate(report: RunReport, output: str, names: Sequence[str]) -> None:
        from prefillcli.judging.questions import correlations_of

        if len(names) > 1:
            report.blocks[CORRELATIONS] = correlations_of(output, names)

    @classmethod
    def section(cls, report: RunReport) -> Sequence[Section]:
        orders, audits, correlations = (report.blocks[name] for name in cls.keys)
        if not (orders or audits or correlations):
            return ()
        from prefillcli.judging.questions import correlation_section, section

        sections = [section(orders or [], audits or [])] if orders or audits else []
        return sections if correlations is None else [*sections, correlation_section(correlations)]


FEATURE = Questions

"""Calibrated probabilities beside the scores: from a file of `prefill calibrate`, or from prompts without content."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from prefillcli.core.feature import Command, Feature, SideFile, json_with
from prefillcli.errors import UsageError
from prefillcli.options.groups import NameList, TextList
from prefillcli.options.option import ANSWERS, FILES, RUN, Settings, argument, option
from prefillcli.options.requirements import Requirement

if TYPE_CHECKING:
    from prefillcli.core.feature import Counts, Job, Labels, LocalModels, Opening, PlanEngine, RunReport, Section
    from prefillcli.judging.calibration import Calibration

# The key of a job's plan for the calibration that is learnt from prompts without content.
CONTENT_FREE = "content_free"






def calibrate(settings: CalibrateSettings) -> dict[str, Any]:
    """Fit probabilities to SCORES with right answers: temperature, Platt or isotonic, chosen by cross-validation.

    A table goes to stderr; the last line on stdout is a summary, one JSON object.
    """
    from prefillcli.judging.calibrate import calibrate_job

    return calibrate_job(settings)


class Calibrating(Feature):
    """The probabilities of a job. The key `calibration` of its report holds a `calibration.CalibrationUse`."""

    order = 20
    options = {"score": ProbabilityOptions}
    commands = {"calibrate": Command(CalibrateSettings, calibrate)}
    columns = ("calibrated",)
    plan_keys = (CONTENT_FREE,)
    keys = {"calibration": None}
    side_files = {"calibration": SideFile("a calibration", json_with("labels", "scaling"))}
    calibration: Calibration | None = None

    @classmethod
    def asked(cls, settings: ProbabilityOptions) -> bool:
        return settings.calibrates

    def check(self) -> None:
        if self.settings.calibration is not None and self.settings.calibrate_with:
            raise UsageError("--calibration and --calibrate-with both make the probability: give only one of them")
        if self.settings.calibration is not None and self.settings.label_norm != "none":
            raise UsageError(
                "--label-norm: a --calibration is fitted on log-probabilities of whole labels\n"
                "leave one of them out; --calibrate-with works with both"
            )

    def learns(self) -> str | None:
        return "--calibrate-with" if self.settings.calibrate_with else None

    def meaningless(self, labels: Labels) -> list[str]:
        return ["calibration" if self.settings.calibration is not None else "calibrate-with"]

    def source_opened(self, opening: Opening) -> None:
        from prefillcli.judging.calibration import check_calibration

        check_calibration(self.settings)

    def models_opened(self, opening: Opening) -> None:
        from prefillcli.judging.calibration import read_calibration

        if self.settings.calibration is not None:
            schema = opening.schema()
            asked = {own.name: own for own in schema.questions or (schema,)}
            labels = {name: own.labels for name, own in asked.items()}
            self.calibration = read_calibration(self.settings.calibration, labels)
            if "orders" in asked[self.calibration.question].groups:
                raise UsageError(
                    f"--calibration: the question {self.calibration.question} is asked in both orders, and a mean of "
                    "two answers is not calibrated\nleave it or swap out"
                )
        self._use(opening)

    def identity(self, opening: Opening, values: dict[str, Any], models: LocalModels) -> Mapping[str, str]:
        return {} if self.calibration is None else {"calibration": self.calibration.digest()}

    def identified(self, job: Job) -> None:
        if self.calibration is not None:
            from prefillcli.judging.calibration import require_fitting

            require_fitting(self.calibration, self.settings.calibration, job.report.fingerprint)

    def rows_opened(self, opening: Opening) -> None:
        from prefillcli.judging.calibration import content_free_prompts

        opening.common = content_free_prompts(self.settings, opening)

    def learn(
        self, opening: Opening, engine: PlanEngine, plan: Mapping[str, Any], tick: Callable[[float], None]
    ) -> Mapping[str, Any]:
        if self.calibration is not None:
            return {}
        from prefillcli.judging.calibration import Calibration, contextual_calibration

        if CONTENT_FREE in plan:
            self.calibration = Calibration.model_validate(plan[CONTENT_FREE])
        else:
            self.calibration = contextual_calibration(opening, engine, tick)
        self._use(opening)
        return {CONTENT_FREE: self.calibration.model_dump(mode="json")}

    def _use(self, opening: Opening) -> None:
        if self.calibration is not None:
            opening.probabilities = self.calibration.probabilities
            opening.calibrated = self.calibration.question

    def reported(self, job: Job, counts: Counts | None) -> None:
        if self.calibration is not None:
            job.report.blocks["calibration"] = self.calibration.use()

    @classmethod
    def section(cls, report: RunReport) -> Section | None:
        from prefillcli.report.section import Section

        use = report.blocks["calibration"]
        return None if use is None else Section(lines=[("probability", use.sentence())])


FEATURE = Calibrating

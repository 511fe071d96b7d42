"""The share of each answer over a whole file, with an interval: by some of its rows with `--estimate`, or where exits
decide rows, by all answers and the audit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from prefillcli.core.feature import Feature, Objection
from prefillcli.errors import UsageError
from prefillcli.options.option import FILES, Settings, as_typed, option

if TYPE_CHECKING:
    from prefillcli.core.feature import Counts, Job, Labels, Opening, RunReport, Section

# Options by which rows leave the model, or are read in full beside that.
_OF_EXITS = ("exit", "exit_rows", "exit_profile", "flips_of", "max_flips", "recall", "precision", "audit")




class Estimating(Feature):
    """The estimate of a job. The key `estimate` of its report holds an `estimating.EstimateUse`."""

    order = 35
    options = {"score": EstimateOptions}
    keys = {"estimate": None}

    @classmethod
    def asked(cls, settings: Any) -> bool:
        return settings.estimate is not None or bool(
            settings.audit and (getattr(settings, "exit", False) or getattr(settings, "first", ()))
        )

    def joint(self, option: str) -> Objection | None:
        if self.settings.estimate is None:
            return None
        return Objection("--estimate is about all rows of the input", "leave one of them out")

    def meaningless(self, labels: Labels) -> list[str]:
        return ["estimate"]

    def labels_named(self, opening: Opening) -> None:
        from prefillcli.stats.evaluation import Measure

        if self.settings.estimate is None:
            return
        if opening.labels.measure is not Measure.SHARES or opening.labels.each or "openai" in opening.groups:
            raise UsageError(
                "--estimate: it is about the answers to one question, in scores of this program's own columns\n"
                "leave it out, or ask with --labels"
            )

    def finished(self, job: Job) -> None:  # the models are still loaded
        from prefillcli.judging.estimate import estimate

        if self.settings.estimate is not None:
            with job.clock.phase("evaluate"):
                estimate(job)

    def ended(self, job: Job) -> None:
        from prefillcli.judging.estimate import estimate_audited, is_known

        if self.settings.estimate is None:
            with job.clock.phase("evaluate"), job.stop.at_once():
                estimate_audited(job)
        elif not is_known(job):  # an earlier attempt ended behind its last row
            with job.loaded:
                if getattr(self.settings, "first", ()):
                    job.load_models()
                self.finished(job)

    def reported(self, job: Job, counts: Counts | None) -> None:
        from prefillcli.judging.estimate import stored

        job.report.blocks["estimate"] = None if counts is None else stored(job)

    @classmethod
    def section(cls, report: RunReport) -> Section | None:
        from prefillcli.judging.estimate import section

        found: Any = report.blocks["estimate"]
        return None if found is None else section(found)


FEATURE = Estimating

"""Gates: a finished output that is not what was expected of it ends with exit code 3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefillcli.core.feature import Feature
from prefillcli.options.groups import RowRange
from prefillcli.options.option import Settings, option
from prefillcli.options.requirements import ALL_ROWS, Requirement

if TYPE_CHECKING:
    from prefillcli.report.run import RunReport
    from prefillcli.report.section import Section

PANEL = "Gates"
DRIFT = Requirement(
    lambda s: s.max_drift is not None,
    "is what --max-drift compares with, but that is not given",
    "give --max-drift 0.05",
)


class GateOptions(Settings):
    """When a finished output is not to be trusted."""

    expect_rows: RowRange | None = option(
        None,
        "Rows that the input must have: N, FROM-TO, FROM- or -TO; else the exit code is 3.",
        PANEL, changes="report", metavar="RANGE", requires=ALL_ROWS,
    )  # fmt: skip
    min_label_mass: float | None = option(
        None,
        "Mean label mass of the scored rows below which the exit code is 3: the model does not answer the prompt.",
        PANEL, changes="report", metavar="MASS", requires=ALL_ROWS, gt=0, le=1,
    )  # fmt: skip
    max_drift: float | None = option(
        None,
        "Distance (Kolmogorov-Smirnov, 0 to 1) of the scores' distribution from that of an earlier run above which "
        "the exit code is 3.",
        PANEL, changes="report", metavar="DISTANCE", requires=ALL_ROWS, gt=0, le=1,
    )  # fmt: skip
    drift_from: str | None = option(
        None,
        "run.json of the earlier run that --max-drift compares with. (default: the report that this run replaces)",
        PANEL, changes="report", metavar="PATH", path="file", same_as="report", requires=(ALL_ROWS, DRIFT),
    )  # fmt: skip

    @property
    def row_range(self) -> tuple[int, int | None] | None:
        """The fewest and the most rows that are expected; None where any number is."""
        if self.expect_rows is None:
            return None
        first, dash, last = self.expect_rows.partition("-")
        if not dash:
            return int(first), int(first)
        return int(first or 0), int(last) if last else None


class Gates(Feature):
    """The gates of a run. The keys `gates` and `drift` of its report hold `judging.Gate` and `judging.DriftUse`."""

    order = 15
    options = {"score": GateOptions, "merge": GateOptions}
    keys = {"gates": [], "drift": None}

    def begin(self, report: RunReport) -> None:
        if self.settings.max_drift is not None:
            from prefillcli.features.gates.judging import earlier_scores

            report.blocks["drift"] = earlier_scores(self.settings.drift_from, report.report)

    def judge(self, report: RunReport) -> list[str]:
        from prefillcli.features.gates.judging import judge

        report.blocks["gates"] = list(judge(self.settings, report))
        return [gate.text for gate in report.blocks["gates"] if not gate.passed]

    @classmethod
    def section(cls, report: RunReport) -> Section | None:
        from prefillcli.features.gates.judging import section

        return section(report)


FEATURE = Gates

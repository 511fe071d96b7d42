"""What a finished night must look like: options that end a run with exit code 3 where it does not."""

from __future__ import annotations

from prefillcli.options import requirements
from prefillcli.options.option import GATES, Settings, option
from prefillcli.options.values import RowRange


class GateOptions(Settings):
    """When a finished output is not to be trusted."""

    expect_rows: RowRange | None = option(
        None,
        "Rows that the input must have: N, FROM-TO, FROM- or -TO; else the exit code is 3.",
        GATES, changes="report", metavar="RANGE",
    )  # fmt: skip
    min_label_mass: float | None = option(
        None,
        "Mean label mass of the scored rows below which the exit code is 3: the model does not answer the prompt.",
        GATES, changes="report", metavar="MASS", gt=0, le=1,
    )  # fmt: skip
    max_drift: float | None = option(
        None,
        "Distance (Kolmogorov-Smirnov, 0 to 1) of the scores' distribution from that of an earlier run above which "
        "the exit code is 3.",
        GATES, changes="report", metavar="DISTANCE", gt=0, le=1,
    )  # fmt: skip
    drift_from: str | None = option(
        None,
        "run.json of the earlier run that --max-drift compares with. (default: the report that this run replaces)",
        GATES, changes="report", metavar="PATH", path="file", same_as="report", requires=requirements.DRIFT,
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

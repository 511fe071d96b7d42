"""Everything `prefill calibrate` can be told, and the options of `prefill score` that make probabilities."""

from __future__ import annotations

from typing import Literal

from prefillcli.errors import UsageError
from prefillcli.options.groups import NameList, TextList
from prefillcli.options.option import ANSWERS, FILES, RUN, Settings, argument, option
from prefillcli.options.requirements import Requirement

FIT = "Fit"
TEMPLATE = Requirement(
    lambda s: s.template is not None,
    "replaces the columns of a template, but there is none: what of a prompt is content cannot be known",
    "write the prompt as a --template",
)
CALIBRATE_WITH = Requirement(
    lambda s: bool(s.calibrate_with), "is for --calibrate-with, but that is not given", "give --calibrate-with N/A"
)
TRUTH_FROM = Requirement(
    lambda s: s.truth_from is not None,
    "is for --truth-from, but that is not given",
    "give --truth-from FILE",
    recipe_may_keep=True,
)


class ProbabilityOptions(Settings):
    """Which probabilities are written beside the scores."""

    calibration: str | None = option(
        None,
        "File of prefill calibrate: adds the column probability beside score.",
        ANSWERS, changes="columns", metavar="PATH", path="file",
    )  # fmt: skip
    calibrate_with: TextList = option(
        (),
        "Text without content, like N/A: what the model answers to the template with it is divided out, in the column "
        "probability; repeatable.",
        ANSWERS, changes="columns", metavar="TEXT", repeatable=True, requires=TEMPLATE,
    )  # fmt: skip
    calibrate_columns: NameList = option(
        (),
        "Columns of the template that --calibrate-with replaces, comma-separated. (default: all that hold text)",
        ANSWERS, changes="columns", metavar="NAMES", requires=CALIBRATE_WITH,
    )  # fmt: skip

    @property
    def calibrates(self) -> bool:
        """Whether the output has probabilities beside the scores."""
        return self.calibration is not None or bool(self.calibrate_with)


class CalibrateSettings(Settings):
    """Everything `prefill calibrate` can be told."""

    scores: str = argument(
        ...,
        "Scores of rows with right answers: what prefill score wrote.",
        changes="report",
        path="scores",
        min_length=1,
    )
    truth: str | None = option(
        None,
        "Column with the right answer: a label, or true or false, 1 or 0 for two labels.",
        FILES, changes="report", metavar="COLUMN",
    )  # fmt: skip
    truth_from: str | None = option(
        None,
        "File with the right answers, where the scores have none: rows are found by id, or by their number.",
        FILES, changes="report", metavar="PATH", path="rows",
    )  # fmt: skip
    id_column: str | None = option(
        None,
        "Column with the ids, in the scores and in --truth-from. (default: the one that the scores were made with)",
        FILES, changes="report", metavar="NAME", requires=TRUTH_FROM,
    )  # fmt: skip
    output: str = option(
        "calibration.json",
        "Where the calibration goes.",
        FILES, changes="files", short="-o", metavar="PATH", path="calibration",
    )  # fmt: skip
    method: Literal["auto", "temperature", "platt", "isotonic"] = option(
        "auto",
        "What is fitted; auto: what has the smallest log loss in cross-validation. Isotonic is for two labels.",
        FIT, changes="report",
    )  # fmt: skip
    folds: int = option(5, "Parts of the cross-validation.", FIT, changes="report", metavar="N", ge=2, le=100)
    seed: int = option(0, "Seed for the parts.", FIT, changes="report", metavar="N", ge=0, lt=2**32)
    quiet: bool = option(False, "Warnings and errors only.", RUN, changes="report", short="-q")
    debug: bool = option(False, "Show tracebacks.", RUN, changes="report")

    def check(self) -> None:
        super().check()
        if self.truth is None:
            raise UsageError("no --truth given: name the column with the right answer")

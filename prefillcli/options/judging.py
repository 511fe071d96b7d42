"""The options that judge the answers: evaluation, gates, calibration, estimates, rejects, review."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainSerializer, model_validator

from prefillcli.errors import UsageError, did_you_mean
from prefillcli.options.groups import QUOTED, NameList, RowRange, TextList, split_repeated
from prefillcli.options.option import (
    ANSWERS,
    EVALUATION,
    FIT,
    GATES,
    INPUT,
    OUTPUT,
    Options,
    argument,
    option,
)
from prefillcli.options.requirements import ALL_ROWS, SHOWN_TEXT, Requirement

TRUTH = Requirement(lambda s: bool(s.truth.columns), "needs --truth", "name the right answers with --truth")


def _read_truth(value: object) -> dict[str, str] | None:
    # Columns by question, of texts like tone=right_tone or of a mapping; the name of the only question may be empty.
    if value is None:
        return None
    if isinstance(value, Mapping):
        pairs = [(str(name), str(column)) for name, column in value.items()]
    else:
        texts = [text.partition("=") for text in split_repeated(value)]
        pairs = [(name, column) if equals else ("", name) for name, equals, column in texts] or [("", "")]
    found = {name.strip(): column.strip() for name, column in pairs}
    if not all(found.values()) or len(found) < len(pairs) or (len(found) > 1 and "" in found):
        raise ValueError(
            "must be a column, or the column of each question once, like relevant=is_relevant,tone=right_tone"
        )
    return found


def truth_text(truth: Mapping[str, str] | None) -> str | None:
    """Return columns by question as one text, which reports and the identity of a job have."""
    return None if truth is None else ",".join(f"{name and name + '='}{column}" for name, column in truth.items())


def truth_option(name: str, column: str) -> str:
    """Return the words that give a column with the right answers to a question; the name of the only one is empty."""
    return f"--truth {name and name + '='}{column}"


def truth_by_question(truth: Mapping[str, str], questions: Collection[str]) -> dict[str, str]:
    """Return the columns with right answers by question, of `questions`: the only one needs no name. Raises
    UsageError."""
    names, found = list(questions), {}
    for given, column in truth.items():
        name = names[0] if not given and len(names) == 1 else given
        if name not in names:
            problem = (
                f"no question {name!r}{did_you_mean(name, names)}" if name else "it is of one of several questions"
            )
            advice = f"there are {', '.join(names)}" + ("" if name else f": write it like {names[0]}={column}")
            raise UsageError(f"{truth_option(given, column)}: {problem}\n{advice}")
        found[name] = column
    return found


class TruthOptions(Options):
    """The right answers that scores are compared with."""

    truth: Annotated[
        dict[str, str] | None, BeforeValidator(_read_truth), PlainSerializer(truth_text, when_used="json")
    ] = option(
        None,
        "Column with the right answers: labels, options or levels, or yes and no for two labels. Of several questions "
        "NAME=COLUMN, comma-separated or repeated. prefill score copies it to the output.",
        EVALUATION, level="first", changes="columns", metavar="[NAME=]COLUMN", repeatable=True,
    )  # fmt: skip

    @property
    def columns(self) -> Mapping[str, str]:
        """The columns by question; the name of the only one may be empty."""
        return self.truth or {}


class EvaluationOptions(Options):
    """What the report has about scores and right answers."""

    wanted_precision: float | None = option(
        None,
        "Report the lowest threshold with this precision, e.g. 0.9, and its recall; for two labels.",
        EVALUATION, changes="report", metavar="SHARE", requires=TRUTH, gt=0, le=1,
    )  # fmt: skip

    show_text: bool = option(
        False,
        "Show the text of the rows that the report names, and a few rationales. Without it the report has no "
        "text, and its page one prompt of each question.",
        EVALUATION, changes="report", requires=SHOWN_TEXT,
    )  # fmt: skip


DRIFT = Requirement(
    lambda s: s.gates.max_drift is not None,
    "needs --max-drift, which compares with it",
    "give --max-drift 0.05",
)


class GateOptions(Options):
    """The conditions under which a finished output is not to be trusted."""

    expect_rows: RowRange | None = option(
        None,
        "Number of rows that the input must have: N, FROM-TO, FROM- or -TO; otherwise the exit code is 3.",
        GATES, changes="report", metavar="RANGE", requires=ALL_ROWS,
    )  # fmt: skip
    min_label_mass: float | None = option(
        None,
        "Lowest mean label mass of the scored rows. Below it the model does not answer the prompt, and the exit "
        "code is 3.",
        GATES, changes="report", metavar="MASS", requires=ALL_ROWS, gt=0, le=1,
    )  # fmt: skip
    max_drift: float | None = option(
        None,
        "Largest distance (Kolmogorov-Smirnov, 0 to 1) of the scores' distribution from that of an earlier run. "
        "Above it the exit code is 3.",
        GATES, changes="report", metavar="DISTANCE", requires=ALL_ROWS, gt=0, le=1,
    )  # fmt: skip
    drift_from: str | None = option(
        None,
        "run.json of the earlier run that --max-drift compares with. (default: the report that this run replaces)",
        GATES, changes="report", metavar="PATH", path="file", same_as="report", requires=(ALL_ROWS, DRIFT),
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


CONTENT = Requirement(
    lambda s: s.prompts.template is not None or s.asking.questions is not None or s.requests.format is not None,
    "needs a --template or --questions, whose columns it replaces, or --format: which part of another prompt is "
    "content cannot be known",
    "write the prompt as a --template",
)


CALIBRATE_WITH = Requirement(
    lambda s: bool(s.probabilities.calibrate_with), "needs --calibrate-with", "give --calibrate-with N/A"
)


TRUTH_FROM = Requirement(
    lambda s: s.labelled.truth_from is not None,
    "needs --truth-from",
    "give --truth-from FILE",
    recipe_may_keep=True,
)


ACCURACY = Requirement(lambda s: s.fit.accuracy is not None, "needs --accuracy", "give --accuracy 0.98")


FITS = Requirement(
    lambda s: s.fit.accuracy is None,
    "has no effect beside --accuracy, which fits nothing",
    "drop --accuracy",
    recipe_may_keep=True,
)


CHOSEN_METHOD = Requirement(
    lambda s: s.fit.prior is None,
    "has no effect beside --prior, which fits nothing to right answers",
    "drop --prior",
    recipe_may_keep=True,
)


FOLDED = Requirement(
    lambda s: s.fit.prior is None or s.labelled.judged,
    "needs right answers: without them --prior is measured on no rows",
    "give --truth COLUMN",
    recipe_may_keep=True,
)


class ProbabilityOptions(Options):
    """The probabilities that are written beside the scores."""

    calibration: str | None = option(
        None,
        "File written by prefill calibrate; adds the column probability beside score.",
        ANSWERS, changes="columns", metavar="PATH", path="file",
    )  # fmt: skip
    calibrate_with: TextList = option(
        (),
        "Text without content, such as N/A: the model's answer to it is divided out, in the column probability, "
        "or NAME.calibrated of each question, or in the answers to requests; repeatable.",
        ANSWERS, changes="columns", metavar="TEXT", repeatable=True, requires=CONTENT, text=True,
    )  # fmt: skip
    calibrate_columns: NameList = option(
        (),
        f"Columns of prompts that --calibrate-with replaces, comma-separated. {QUOTED} (default: all that hold text)",
        ANSWERS, level="rare", changes="columns", metavar="NAMES", requires=CALIBRATE_WITH,
    )  # fmt: skip

    @property
    def calibrates(self) -> bool:
        """True if the output has probabilities beside the scores."""
        return self.calibration is not None or bool(self.calibrate_with)


class LabelledOptions(TruthOptions):
    """Scores of rows, and their right answers."""

    scores: str = argument(
        ...,
        "Scores of rows, with right answers unless --prior needs none: what prefill score wrote.",
        changes="report",
        path="scores",
        min_length=1,
    )
    truth_from: str | None = option(
        None,
        "File with the right answers, if the scores have none, such as a --review file that a person has filled "
        "in, with the columns NAME.right; rows are matched by id, or by number.",
        INPUT, changes="report", metavar="PATH", path="rows",
    )  # fmt: skip
    review_blank: Literal["unseen", "confirmed"] = option(
        "unseen",
        "What a blank right answer in a review file means. confirmed: a person saw the answer and it is right; "
        "unseen: nobody has looked.",
        INPUT, changes="report", requires=TRUTH_FROM,
    )  # fmt: skip
    id_column: str | None = option(
        None,
        "Column with the ids, in the scores and in --truth-from. (default: the one that the scores were made with)",
        INPUT, changes="report", metavar="NAME", requires=TRUTH_FROM,
    )  # fmt: skip

    @property
    def judged(self) -> bool:
        """True if right answers are given."""
        return self.truth is not None or self.truth_from is not None


class FitOptions(Options):
    """What is fitted to them, and where it goes."""

    output: str = option(
        "calibration.json",
        "Where the calibration goes, or the floors. (default: calibration.json, with --accuracy floors.json)",
        OUTPUT, changes="files", short="-o", metavar="PATH", path="calibration",
    )  # fmt: skip
    accuracy: float | None = option(
        None,
        "Instead of fitting, find the lowest probability from which answers are right at this rate, with 95 % "
        "confidence: a floor for --review-below.",
        FIT, changes="report", metavar="RATE", gt=0, lt=1,
    )  # fmt: skip
    per_answer: bool = option(
        False, "Find a floor for each answer, from which this answer is right at that rate.",
        FIT, changes="report", requires=ACCURACY,
    )  # fmt: skip
    method: Literal["auto", "temperature", "platt", "isotonic"] = option(
        "auto",
        "Method to fit; auto: the one with the smallest log loss in cross-validation. Isotonic is for two labels.",
        FIT, changes="report", requires=(FITS, CHOSEN_METHOD),
    )  # fmt: skip
    prior: Literal["rows"] | None = option(
        None,
        "Instead of fitting, take out what the model prefers whatever the row says, which needs no right answers. "
        "rows: the mean log-probability of each answer over all rows, for each question.",
        FIT, changes="report", metavar="rows", requires=FITS,
    )  # fmt: skip
    folds: int = option(
        5, "Folds of the cross-validation.",
        FIT, changes="report", metavar="N", requires=(FITS, FOLDED), ge=2, le=100,
    )  # fmt: skip
    seed: int = option(
        0, "Seed for the folds.", FIT, changes="report", metavar="N", requires=(FITS, FOLDED), ge=0, lt=2**32
    )

    @model_validator(mode="before")
    @classmethod
    def _name_floors(cls, values: Any) -> Any:
        # The file is named after what it holds.
        if isinstance(values, dict) and values.get("accuracy") is not None and values.get("output") is None:
            return values | {"output": "floors.json"}
        return values


class EstimateOptions(Options):
    """The number of rows that are read for an estimate."""

    estimate: int | None = option(
        None,
        "Read only N random rows, and report the share of each answer in the whole input, with a 95 % interval. "
        "With --first a small model, or words, reads all rows, which narrows the interval.",
        INPUT, changes="report", metavar="N", ge=20,
    )  # fmt: skip


def _as_text(value: object) -> object:
    # In a recipe a floor is a number.
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


REVIEW_BELOW = Requirement(
    lambda s: s.review.review_below is not None, "needs --review-below", "give --review-below 0.9"
)


class ReviewOptions(Options):
    """The answers that a person should look at."""

    review_below: Annotated[str, BeforeValidator(_as_text)] | None = option(
        None,
        "Add the column review: the questions of a row whose answer has a probability below P. NAME=P,... sets it "
        "by question; a file of prefill calibrate --accuracy has a floor for each.",
        ANSWERS, changes="columns", metavar="P|FILE", path="file",
    )  # fmt: skip
    review: str | None = option(
        None,
        "Also write the rows to review, and those without an answer, to this file, e.g. look.csv, for a person to "
        "fill in: ids, kept columns, questions, answers, and an empty column NAME.right for each right one.",
        OUTPUT, changes="files", metavar="PATH", path="review", requires=REVIEW_BELOW,
    )  # fmt: skip

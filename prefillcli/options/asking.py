"""The options of the question to each row."""

from __future__ import annotations

from typing import Any, Literal

from prefillcli.errors import UsageError
from prefillcli.options.groups import LabelValues, NameList
from prefillcli.options.option import ANSWERS, FILES, PROMPTS, Settings, option
from prefillcli.options.requirements import Requirement
from prefillcli.rows.output import format_of


class ValueOptions(Settings):
    """The numbers that labels stand for."""

    label_values: LabelValues = option(
        (),
        "Number that each label stands for, e.g. 1,2,3,4,5; adds the column mean, the expected value of the answer.",
        ANSWERS, changes="columns", metavar="NUMBERS",
    )  # fmt: skip


class ChoiceOptions(Settings):
    """The answers of each row."""

    choices_column: str | None = option(
        None,
        "Column with the row's own answers, a list of texts, instead of --labels.",
        ANSWERS, changes="scores", metavar="COLUMN",
    )  # fmt: skip


QUESTIONS = Requirement(lambda s: s.questions is not None, "needs --questions", "name their file with --questions")


class QuestionOptions(Settings):
    """Several questions about each row."""

    questions: str | None = option(
        None,
        "YAML file with several questions about each row. Each adds columns NAME.score, NAME.prediction, ...; what "
        "the questions share is computed once.",
        ANSWERS, level="first", changes="scores", metavar="PATH", path="file",
    )  # fmt: skip
    questions_as: Literal["columns", "rows"] = option(
        "columns",
        "Give each question its own columns, or its own rows.",
        ANSWERS, changes="columns", requires=QUESTIONS,
    )  # fmt: skip


TARGET = Requirement(
    lambda s: s.target_column is not None,
    "needs --target-column",
    "name its column with --target-column",
)


class LikelihoodOptions(Settings):
    """The texts whose likelihood is asked for."""

    target_column: str | None = option(
        None,
        "Column with a text: the score is its log-probability after the prompt. If the prompt is empty, the text "
        "is a whole document.",
        ANSWERS, changes="scores", metavar="COLUMN",
    )  # fmt: skip
    token_logprobs: bool = option(
        False,
        "Also write the log-probability of each token of the target.",
        ANSWERS, changes="columns", requires=TARGET,
    )  # fmt: skip
    stride: int | None = option(
        None,
        "Tokens that each window of a long document predicts, e.g. 512. (default: as many as it holds)",
        ANSWERS, changes="scores", metavar="N", requires=TARGET, ge=1,
    )  # fmt: skip


class PairOptions(Settings):
    """Pairs of texts: a reranker's files name all that it needs; for other cross-encoders, the user does."""

    pair_column: str | None = option(
        None,
        "Column with the second text of a pair, for an encoder: the tokenizer encodes the prompt and it together.",
        PROMPTS, changes="scores", metavar="NAME",
    )  # fmt: skip


BATCH_ID = "custom_id"  # the field of a batch file with a line's id


class BatchInput(Settings):
    """The reading of batch files."""

    served_model_name: NameList = option(
        (),
        "Names by which the lines of a batch file may ask for the model. (default: --model, and the end of its path)",
        ANSWERS, changes="scores", metavar="NAMES",
    )  # fmt: skip


class BatchOptions(BatchInput):
    """The answering of batch files."""

    batch_format: Literal["openai"] | None = option(
        None,
        "The input is an OpenAI batch file: write its answers as the lines of a batch output, to a .jsonl file.",
        FILES, changes="columns",
    )  # fmt: skip

    def check(self) -> None:
        super().check()
        if self.batch_format is None:
            return
        settings: Any = self
        if settings.id_column not in (None, BATCH_ID):
            raise UsageError(f"--id-column {settings.id_column}: with --batch-format ids are {BATCH_ID}\nleave it out")
        form = None if settings.output is None else format_of(settings.output)
        if form is None or form.parquet or form.delimiter:
            raise UsageError("--batch-format: a batch output is JSON Lines\ngive --output a path that ends in .jsonl")

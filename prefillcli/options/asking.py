"""The options of the question to each row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import model_validator

from prefillcli.options.groups import QUOTED, LabelValues, NameList, split_names
from prefillcli.options.option import ANSWERS, INPUT, OUTPUT, PROMPTS, Options, option
from prefillcli.options.requirements import Requirement
from prefillcli.prompts.questions import Question
from prefillcli.rows.output import ANSWER


def asked_question(ask: str, options: Any, levels: Any) -> dict[str, Any]:
    """Return the question of `--ask`, as a question file has it."""
    entry: dict[str, Any] = {"name": ANSWER, "type": "predicate", "instructions": ask}
    if options:
        return entry | {"type": "choice", "choices": list(split_names(options))}
    return entry | {"type": "score", "levels": list(split_names(levels))} if levels else entry


def question_text(questions: Sequence[Any]) -> str:
    """Return the text of a question file with these questions."""
    entries = [each.to_json() if isinstance(each, Question) else each for each in questions]
    return json.dumps({"questions": entries}, ensure_ascii=False, indent=1)


class ChoiceOptions(Options):
    """Answers that each row has of its own, and the numbers that labels stand for."""

    label_values: LabelValues = option(
        (),
        "Number for each label, e.g. 1,2,3,4,5; adds the column mean, the expected value of the answer.",
        ANSWERS, changes="columns", metavar="NUMBERS",
    )  # fmt: skip
    choices_column: str | None = option(
        None,
        "Column with each row's own answers, a list of texts; replaces --labels.",
        ANSWERS, changes="scores", metavar="COLUMN",
    )  # fmt: skip


ASKED_TYPED = Requirement(
    lambda s: s.asking.questions is not None or s.requests.format is not None,
    "needs --questions or --format",
    "name a file of questions with --questions",
)


ASK = Requirement(lambda s: s.asking.ask is not None, "needs --ask", "ask a question with --ask TEXT")


class AskOptions(Options):
    """Typed questions about each row: one of --ask, or several of a file."""

    ask: str | None = option(
        None,
        "Ask this about each row; {{ product }} inserts a column. Yes or no, unless --options or --levels is "
        "given. The column answer has the probability of yes, the chosen option or the expected level.",
        ANSWERS, level="first", changes="scores", metavar="TEXT", text=True,
    )  # fmt: skip
    options: NameList = option(
        (),
        f"Options that --ask chooses from, comma-separated: billing,technical,other. {QUOTED}",
        ANSWERS, level="first", changes="scores", metavar="NAMES", requires=ASK,
    )  # fmt: skip
    levels: NameList = option(
        (),
        "Levels that --ask scores by, lowest first: calm,annoyed,angry (counted from 0), or numbers: 1,2,3,4,5.",
        ANSWERS, level="first", changes="scores", metavar="NAMES", requires=ASK,
    )  # fmt: skip
    orders: int = option(
        1,
        "Ask N times with the options reordered, and average.",
        ANSWERS, changes="scores", metavar="N", requires=ASKED_TYPED, ge=1,
    )  # fmt: skip
    questions: str | None = option(
        None,
        "YAML or JSON with several questions about each row: a file, or its text. Each adds columns NAME, "
        "NAME.probabilities, ...; text that questions share is computed once.",
        ANSWERS, level="first", changes="scores", metavar="PATH", path="template",
    )  # fmt: skip

    @property
    def asks_once(self) -> bool:
        """True if the only question is that of `--ask`."""
        return self.ask is not None and self.questions == question_text(
            [asked_question(self.ask, self.options, self.levels)]
        )

    @model_validator(mode="before")
    @classmethod
    def _with_questions(cls, given: Any) -> Any:
        # The question of --ask is a question file of one, and so are questions from Python.
        if not isinstance(given, dict):
            return given
        asked, ask = given.get("questions"), given.get("ask")
        if isinstance(ask, str) and asked is None:
            try:
                asked = [asked_question(ask, given.get("options") or (), given.get("levels") or ())]
            except ValueError:  # the option's own validator says why
                return given
        if isinstance(asked, Mapping):
            asked = json.dumps({"questions": asked}, ensure_ascii=False, indent=1, default=str)
        if isinstance(asked, Sequence) and not isinstance(asked, str):
            asked = question_text(asked)
        elif isinstance(asked, str) and asked.lstrip().startswith("{") and "\n" not in asked:
            asked = f"{asked}\n"  # a text, and no path; settings that are validated again keep theirs
        return given if asked is None else {**given, "questions": asked}


TARGET = Requirement(
    lambda s: s.likelihood.target_column is not None,
    "needs --target-column",
    "name its column with --target-column",
)


class LikelihoodOptions(Options):
    """The texts whose likelihood is asked for."""

    target_column: str | None = option(
        None,
        "Column with a text to score by its log-probability after the prompt. If the prompt is empty, the text is "
        "a whole document.",
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
        ANSWERS, level="rare", changes="scores", metavar="N", requires=TARGET, ge=1,
    )  # fmt: skip


class PairOptions(Options):
    """Pairs of texts: a reranker's files name all that it needs; for other cross-encoders, the user does."""

    pair_column: str | None = option(
        None,
        "Column with the second text of a pair, for an encoder, which reads both together.",
        PROMPTS, changes="scores", metavar="NAME",
    )  # fmt: skip


BATCH_ID = "custom_id"  # the field of a batch file with a line's id


class RequestOptions(Options):
    """The requests that rows may be, in the form of an API."""

    served_model_name: NameList = option(
        (),
        f"Names by which requests may ask for the model, comma-separated. {QUOTED} (default: --model, and the end of "
        "its path)",
        ANSWERS, level="rare", changes="scores", metavar="NAMES",
    )  # fmt: skip
    format: Literal["openai", "systemone"] | None = option(
        None,
        "API whose requests with typed questions the rows are. (default: as the first row is)",
        INPUT, changes="scores", metavar="openai|systemone",
    )  # fmt: skip


class AnsweredOptions(RequestOptions):
    """Requests that are answered."""

    format: Literal["openai", "systemone"] | None = option(
        None,
        "Answer requests (a batch file, or bodies with typed questions) in the form of this API, to a .jsonl "
        "file. Typed questions are always answered so.",
        OUTPUT, changes="columns", metavar="openai|systemone",
    )  # fmt: skip

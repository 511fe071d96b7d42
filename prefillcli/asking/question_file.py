"""The file of `--questions`."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prefillcli.asking.forms import Order, orders_of, text_of, with_answers
from prefillcli.asking.requests import typed_question
from prefillcli.core.condition import RowCondition
from prefillcli.errors import UsageError, brief, did_you_mean, without_secrets
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.groups import LabelTexts, LabelValues, as_yaml
from prefillcli.options.load import reason_of
from prefillcli.options.plain_yaml import parse_yaml
from prefillcli.prompts.labels import parse_labels, require_values
from prefillcli.prompts.layouts import LayoutForm
from prefillcli.prompts.questions import Choice, Question, Score, typed
from prefillcli.prompts.templates import is_rendered, names_template
from prefillcli.rows.filesystems import read_given, utf8_text
from prefillcli.rows.output.answers import AnswerColumns
from prefillcli.rows.output.columns import COLUMN_TYPES, ROW_COLUMN, Groups, ResultRows
from prefillcli.rows.output.schema import OutputSchema

_MOST_BYTES = 1 << 20


class QuestionEntry(BaseModel):
    """A question as the file has it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    type: Literal["predicate", "choice", "score", "noul"] | None = None
    instructions: Any = None  # what is asked: a text, or JSON
    choices: Any = None  # the options of a choice: values, descriptions by value, or objects as in OpenAI's API
    levels: Any = None  # of a scale, the lowest first: texts, or objects as in OpenAI's API
    criteria: Any = None  # options, levels or sides as in System One
    orders: int | None = Field(None, ge=1)  # of its options, in which it is asked
    labels: LabelTexts | None = None
    values: LabelValues = ()  # the number that each label stands for
    text: str | None = None  # Jinja text after the document, instead of the question
    template: str | None = None  # Jinja text instead of document and text
    when: str | None = None  # a condition on the answers to earlier questions
    swap: tuple[str, ...] | None = None  # two columns, whose values are asked about in both orders


class _Content(BaseModel):
    # The whole file.
    model_config = ConfigDict(extra="forbid", frozen=True)

    document: str | None = None
    questions: tuple[QuestionEntry, ...] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Holds:
    """Finds the rows for which a condition holds. It can be pickled."""

    condition: RowCondition

    def __call__(self, rows: ResultRows) -> frozenset[int]:
        found = rows.values(self.condition.columns)
        pairs = zip(rows.numbers.tolist(), zip(*found.values(), strict=True), strict=True)
        return frozenset(row for row, values in pairs if self.condition(dict(zip(found, values, strict=True))))


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """A question of a file: the template of its whole prompt, or of the document before it (None: the prompt column
    holds documents), the rows of which it is asked (None: all), the two columns whose values are exchanged in its
    other prompt, and the orders of its options in its prompts."""

    question: Question
    template: str | None
    when: Holds | None
    swap: tuple[str, ...] | None

    orders: Sequence[Order] = ()  # none: the prompt is the user's own
    apart: bool = False  # whether each of these is one option, about which its prompt asks alone

    @property
    def first(self) -> Order | None:
        """The order of its options in its first prompt; None: its own."""
        return self.orders[0] if self.apart else None

    @property
    def put(self) -> bool:
        """Whether the prompt says behind the document what is asked."""
        return bool(self.orders)

    @property
    def rendered(self) -> bool:
        """Whether what is asked has columns of the row in it."""
        return self.put and is_rendered(self.question.instructions)

    @property
    def name(self) -> str:
        """The name of the question."""
        return self.question.name


@dataclass(frozen=True, slots=True)
class QuestionFile:
    """The questions of a file, and the digest of its whole content."""

    questions: tuple[AskedQuestion, ...]
    digest: str

    def in_layout(self, form: LayoutForm) -> QuestionFile:
        """Return them with the prompts that the layout of a model has of each."""
        asked = [
            each
            if (orders := form.orders(each.question)) is None
            else replace(each, orders=orders, apart=form.asks_apart(each.question))
            for each in self.questions
        ]
        return replace(self, questions=tuple(asked))

    @property
    def further(self) -> list[tuple[int, Order | None]]:
        """The prompts after the first ones of all questions: the number of the question, and the order of its options;
        None where two values are exchanged."""
        return [
            (number, order)
            for number, each in enumerate(self.questions)
            for order in (*([None] if each.swap else []), *each.orders[1:])
        ]

    @property
    def waiting(self) -> dict[int, int]:
        """The numbers of the prompts that may wait for the answers to others, with the number of their question: its
        condition is on questions that are asked of all rows."""
        always = {each.name for each in self.questions if each.when is None}
        found = {
            number: number
            for number, each in enumerate(self.questions)
            if each.when is not None and {name.partition(".")[0] for name in each.when.condition.columns} <= always
        }
        others = enumerate(self.further, len(self.questions))
        return found | {part: number for part, (number, _) in others if number in found}

    @property
    def answers(self) -> tuple[AnswerColumns, ...]:
        """The columns of the answers to each question. The other prompts come after those of all questions."""
        return answers_to(self.questions)


def answers_to(questions: Sequence[AskedQuestion]) -> tuple[AnswerColumns, ...]:
    """Return the columns of the answers to each of these questions."""
    others = itertools.count(len(questions))
    return tuple(
        AnswerColumns(
            labels=each.question.names,
            name=each.name,
            when=each.when,
            type=each.question.type,
            options=tuple(option.value for option in each.question.options),
            values=each.question.values,
            groups=Groups(["orders"] if (count := bool(each.swap) + len(each.orders[1:])) and not each.apart else ()),
            others=tuple(next(others) for _ in range(count)),
        )
        for each in questions
    )


def read_questions(
    path: str, document: str | None = None, option: str = "--questions", orders: int = 1
) -> QuestionFile:
    """Read the file at a path or URL, or the text of one. `document` is the template of documents where it has none,
    and `orders` the number of orders in which options are listed. Raises UsageError, which names the file, the key and
    the nearest known one."""
    if names_template(path):
        shown = f"{option} {without_secrets(path)}"
        text = utf8_text(option, path, read_given(option, path, most=_MOST_BYTES))
    else:
        shown, text = option, path
    try:
        loaded = parse_yaml(text)
    except ValueError as error:
        raise UsageError(f"{shown}: not valid YAML: {brief(error)}") from None
    if not isinstance(loaded, dict):
        raise UsageError(f"{shown}: it must be a mapping with the keys {', '.join(_Content.model_fields)}")
    if "questions" in loaded and not loaded["questions"]:
        raise UsageError(f"{shown}: questions is empty\nlist them below it, each with its name")
    if "questions" not in loaded and set(loaded) <= set(ScoreSettings.options()) | {"input"}:
        raise UsageError(
            f"{shown}: it is a recipe, which has options, and no file of questions\ngive it with --recipe"
        )
    if isinstance(named := loaded.get("questions"), dict):  # a map from names to questions
        listed = [{"name": name, **each} if isinstance(each, dict) else each for name, each in named.items()]
        loaded = loaded | {"questions": listed}
    try:
        content = _Content.model_validate(loaded)
    except ValidationError as error:
        raise UsageError(f"{shown}: {_why(error, loaded)}") from None
    if document is not None and content.document is not None:
        raise UsageError(f"{shown}: it has a document, and --template names another\nleave one of them out")
    document = document or content.document
    done: list[AskedQuestion] = []
    for each in content.questions:
        done.append(_checked(each, document, done, shown, orders))
    if orders > 1 and not any(len(each.orders) > 1 for each in done):
        raise UsageError(f"--orders {orders}: no question lists its options, as a choice and a score do\nleave it out")
    if content.document is not None and all(each.template is not None for each in content.questions):
        raise UsageError(f"{shown}: document is not used, as each question has its own template\nleave it out")
    parts = [
        [
            *(each.name, each.template, each.question.answers),
            [text_of(each.question, order) for order in each.orders],
            *(each.when and each.when.condition.text, each.question.values, each.swap),
        ]
        for each in done
    ]
    return QuestionFile(tuple(done), hashlib.sha256(json.dumps(parts).encode()).hexdigest())


def _checked(
    entry: QuestionEntry, document: str | None, before: Sequence[AskedQuestion], shown: str, orders: int
) -> AskedQuestion:
    where = f"{shown}: question {entry.name!r}"
    if not entry.name.isidentifier():
        raise UsageError(
            f"{where}: a name consists of letters, digits and underscores, and does not begin with a digit"
        )
    if entry.name in {each.name for each in before}:
        raise UsageError(f"{where}: the name is given twice")
    if entry.name in COLUMN_TYPES or entry.name == ROW_COLUMN:
        raise UsageError(f"{where}: every output has a column {entry.name}\ncall the question otherwise")
    if entry.text is not None and entry.template is not None:
        raise UsageError(f"{where}: it has both text and template\ngive text, after the document, or its own template")
    if entry.type is None and entry.text is None and entry.template is None:
        raise UsageError(
            f"{where}: it has neither type nor text nor template\n"
            "give its type and instructions, or labels with text, after the document, or with its own template"
        )
    if entry.text is not None and document is None:
        raise UsageError(f"{where}: text stands after the document, but the file has no document")
    try:
        question = _typed(entry) if entry.type is not None else _labelled(entry)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    if entry.swap is not None and (len(entry.swap) != 2 or len(set(entry.swap)) != 2):
        raise UsageError(f"{where}: swap {list(entry.swap)}: name two different columns, as in swap: [a, b]")
    when = None if entry.when is None else _condition(entry.when, f"{where}: when", before)
    if entry.template is not None or entry.text is not None:
        if entry.orders is not None:
            raise UsageError(f"{where}: orders: its prompt is its own, and lists the options in one order")
        return AskedQuestion(question, entry.template or f"{document}{entry.text}", when, entry.swap)
    if entry.swap is not None:
        raise UsageError(f"{where}: swap exchanges two columns of its own template, and it has none")
    if entry.orders is not None and entry.orders > 1 and not isinstance(question, Choice | Score):
        raise UsageError(f"{where}: orders: a predicate is yes or no, and lists no options\nleave it out")
    return AskedQuestion(with_answers(question), document, when, None, orders_of(question, entry.orders or orders))


def _labelled(entry: QuestionEntry) -> Question:
    # A question whose prompt is the user's, with labels.
    if entry.labels is None:
        raise UsageError("the key 'labels' is missing")
    for key in _TYPED:
        if getattr(entry, key) is not None:
            raise UsageError(f"{key}: it belongs to a question with a type\nadd type: predicate, choice or score")
    try:
        labels = parse_labels(entry.labels)
    except UsageError as error:
        raise UsageError(str(error).replace("--labels", "labels")) from None
    _check_values(entry, [each.name for each in labels])
    return typed(labels, entry.values, entry.name)


def _check_values(entry: QuestionEntry, names: Sequence[str]) -> None:
    # Raise UsageError unless its values, if it has some, are a number for each of its labels or levels.
    try:
        if "values" in entry.model_fields_set:
            require_values(entry.values, names)
    except UsageError as error:
        raise UsageError(str(error).replace("--label-values", "values").replace("--labels", "labels")) from None


_TYPED = ("instructions", "choices", "levels", "criteria")


def _typed(entry: QuestionEntry) -> Question:
    # A question with a type, in the forms of the APIs, or shorter.
    if "labels" in entry.model_fields_set:
        raise UsageError("labels: a question with a type has choices or levels\nleave it out")
    if "values" in entry.model_fields_set and entry.type != "score":
        raise UsageError("values: they are numbers for labels, or for the levels of a score\nleave it out")
    given = {key: getattr(entry, key) for key in ("type", *_TYPED)}
    body = {key: value for key, value in given.items() if value is not None}
    if entry.text is not None or entry.template is not None:  # which asks by itself
        body.setdefault("instructions", entry.name)
    for key, inner in (("choices", "value"), ("levels", "label")):
        if isinstance(found := body.get(key), dict):
            found = [{inner: value, "description": told} for value, told in found.items()]
        if isinstance(found, str):
            raise UsageError(f"{key}: {as_yaml(found)} is one text, and a list is needed: {key}: [a, b]")
        if isinstance(found, list):
            listed = [each if isinstance(each, dict) else {inner: each} for each in found]
            body[key] = [each | _as_option(each, inner, f"{key}[{at}]") for at, each in enumerate(listed)]
    if isinstance(found := body.get("criteria"), list):
        body["criteria"] = [each if type(each) is not int else str(each) for each in found]
    question = typed_question(body, entry.name)
    if isinstance(question, Score):
        _check_values(entry, question.names)
        return replace(question, numbers=entry.values or _numbers([each.text for each in question.options]))
    return question


def _numbers(levels: Sequence[str]) -> tuple[float, ...]:
    # What levels stand for: numbers for themselves, names for their places from 0. Raises UsageError.
    try:
        found = tuple(map(float, levels))
    except ValueError:
        found = ()
    if not found or not all(map(math.isfinite, found)):
        return tuple(map(float, range(len(levels))))
    if list(found) != sorted(set(found)):
        raise UsageError(f"levels {', '.join(levels)}: the lowest comes first, and no number twice")
    return found


def _as_option(given: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    # The value of an option as text, unless it is a boolean or missing. A whole number in YAML is written as it is.
    if key not in given or isinstance(value := given[key], str) or (type(value) is bool and key == "value"):
        return {}
    if type(value) is int:
        return {key: str(value)}
    raise UsageError(f"{where}: {as_yaml(value)} is not text: put it in quotes")


def _condition(text: str, where: str, before: Sequence[AskedQuestion]) -> Holds:
    # A condition on the answers to the questions before.
    condition = RowCondition(text, where)
    output = OutputSchema(questions=answers_to(before))
    known = output.conditional
    asked = {each.name for each in before}
    names = [field.name for field in known if field.name.partition(".")[0] in asked]
    for column in sorted(condition.columns):
        if column not in names:
            raise UsageError(
                f"{where} {text!r}: no earlier question gives {column}{did_you_mean(column, names)}\n"
                "a condition uses answers to questions above, like relevant or tone.confidence"
            )
    condition.check(known, labels=output.predictions)
    return Holds(condition)


def _why(error: ValidationError, loaded: dict[Any, Any]) -> str:
    # The first fault of a file, with its place.
    first = error.errors()[0]
    place: tuple[int | str, ...] = first["loc"][:3]
    said, key = "", str(place[-1])
    if len(place) > 1 and place[0] == "questions":
        number = int(place[1])
        entry = loaded["questions"][number]
        name = entry.get("name") if isinstance(entry, dict) else None
        said = f"question {name!r}: " if isinstance(name, str) else f"question number {number + 1}: "
        key = str(place[2]) if len(place) > 2 else ""
    if first["type"] == "extra_forbidden":
        known = list((QuestionEntry if said else _Content).model_fields)
        return f"{said}unknown key {key!r}{did_you_mean(key, known)}\nthere are {', '.join(known)}"
    if first["type"] == "missing":
        return f"{said}the key {key!r} is missing"
    if not key:
        return f"{said}{reason_of(first)}"
    value = as_yaml(first["input"])[:100]
    if key == "type":  # of which System One's noul is suggested to nobody
        near = did_you_mean(value, ("predicate", "choice", "score"))
        return f"{said}type {value}: should be predicate, choice or score{near}"
    return f"{said}{key} {value}: {reason_of(first)}"

"""Right answers: which answer a value stands for, which row it is of, and the values that stand for nothing. They are
read here beside the answers of an output, for all who judge these.

They come from a column of a data set, or from a person who wrote them into a review file with a spreadsheet, which
turns 000012 into 12, Yes into TRUE and 1 into 1.0.
"""

from __future__ import annotations

import difflib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from itertools import repeat
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict

from prefillcli.errors import PrefillError, UsageError, counted, did_you_mean
from prefillcli.options.judging import LabelledOptions, truth_by_question, truth_option
from prefillcli.prompts.labels import label_of, plain_form
from prefillcli.prompts.questions import Label
from prefillcli.report.section import visible
from prefillcli.rows.input.source import Source
from prefillcli.rows.output.answers import AnswerColumns
from prefillcli.rows.output.columns import ROW_COLUMN
from prefillcli.rows.output.destination import Destination, Job, Manifest
from prefillcli.rows.records import RowBatch
from prefillcli.rows.values import to_python
from prefillcli.runtime import log
from prefillcli.stats.arrays import BoolArray, Float64Array, Int64Array
from prefillcli.stats.labels import Measure, label_probabilities

# Values as answers.


def as_number(answer: Any) -> float | None:
    """Return the finite number that a value is, or stands for as text."""
    try:
        found = float(answer)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) and not isinstance(answer, bool) else None


def number_of(value: Any) -> float:
    """Return a number of a column; NaN for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def is_blank(answer: Any) -> bool:
    """Return whether a cell for a right answer has none."""
    if isinstance(answer, float):
        return math.isnan(answer)
    return answer is None or (isinstance(answer, str) and not answer.strip())


# Values that stand for nothing.


_MOST_NAMED = 5
_MOST_COMPARED = 20_000  # ids, of which the nearest is looked for
_ALIKE, _ALIKE_IDS = 0.6, 0.5  # of two texts, as difflib measures it
_LONGEST = 40  # characters of a value


class Mistake(BaseModel):
    """A value that stands for nothing, and the known one that is most like it. Both are untrusted."""

    model_config = ConfigDict(frozen=True)

    value: str
    rows: int
    near: str | None  # None: nothing is like it


class Mistakes(BaseModel):
    """Right answers that are no answer of a question, or ids of no row."""

    model_config = ConfigDict(frozen=True)

    rows: int
    examples: tuple[Mistake, ...]  # the most frequent ones

    @classmethod
    def of(
        cls, counts: Mapping[str, int], known: Iterable[str], *, alike: float = _ALIKE, left_out: int = 0
    ) -> Mistakes | None:
        """Return the mistakes in values with these counts of rows, and in rows that were `left_out` of the counts,
        where the `known` ones were possible; None without any."""
        if not counts:
            return None
        forms = {plain_form(each): each for _, each in zip(range(_MOST_COMPARED), known, strict=False)}
        most = sorted(counts, key=lambda value: (-counts[value], value))[:_MOST_NAMED]
        examples = []
        for value in most:
            close = difflib.get_close_matches(plain_form(value), forms, n=1, cutoff=alike)
            near = forms[close[0]] if close else None
            examples.append(Mistake(value=_short(value), rows=counts[value], near=near and _short(near)))
        return cls(rows=sum(counts.values()) + left_out, examples=tuple(examples))

    @property
    def text(self) -> str:
        """The examples, for a message."""
        said = [
            f"{visible(each.value, line=True)}{f' ({each.rows:,} rows)' if each.rows > 1 else ''}"
            f"{f', nearest is {visible(each.near, line=True)}' if each.near else ''}"
            for each in self.examples
        ]
        named = sum(each.rows for each in self.examples)
        return "; ".join([*said, *([f"and {self.rows - named:,} more"] if self.rows > named else [])])


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


# Right answers and the rows that they are of.


# Of a review file: how the names of its columns for right answers end, and its last column.
RIGHT, REVIEW = "right", "review"


@dataclass(frozen=True, slots=True)
class RightAnswers:
    """The right answers to a question: those of a column of the scores, or those of another file."""

    truth: str  # the column that has them
    key: str  # the column of the scores that has them too, or that finds them in the other file
    found: Mapping[str, Any] | None = None  # by id or row number
    blank: int = 0  # rows of a review file that have none and count as not looked at

    def of_row(self, value: Any) -> Any:
        """Return the right answer of a row with this value of the column `key`; None: it has none."""
        answer = value if self.found is None else self.found.get(_key(value))
        return None if is_blank(answer) else answer


@dataclass(frozen=True, slots=True)
class FoundTruth:
    """The right answers to questions of an output."""

    answers: dict[str, RightAnswers]  # by question
    unknown_ids: Mistakes | None = None  # of the file that has them


def find_truth(
    given: LabelledOptions, asked: Mapping[str, AnswerColumns], available: Sequence[str], job: Job | None
) -> FoundTruth:
    """Return the right answers to the `asked` questions of an output with the `available` columns: those of the
    columns that the settings name, or of all columns for them in a review file.

    Raises UsageError where they cannot be found.
    """
    if given.truth_from is not None:
        return _of_file(given, Source.open([given.truth_from]), asked, available, job)
    named = truth_by_question(given.columns, asked)
    for truth in named.values():
        if truth in (own.column("") for own in asked.values()):
            raise UsageError(
                f"--truth {truth}: in {given.scores} this column has the answers of the model\n"
                "name the column with the right ones, or their file with --truth-from"
            )
        if truth not in available:
            raise UsageError(
                f"{given.scores}: no column {truth!r}{did_you_mean(truth, available)}\nscore with --truth {truth}, "
                "which keeps it, or name the file that has it with --truth-from"
            )
    return FoundTruth({name: RightAnswers(truth, truth) for name, truth in named.items()})


def _of_file(
    given: LabelledOptions,
    source: Source,
    asked: Mapping[str, AnswerColumns],
    available: Sequence[str],
    job: Job | None,
) -> FoundTruth:
    columns, other = source.available, given.truth_from
    reviewed = {name: f"{name}.{RIGHT}" for name in asked if f"{name}.{RIGHT}" in columns and REVIEW in columns}
    named = _named_in(given, columns, asked, reviewed)
    own_id = columns[0] if reviewed and columns[0] in available else ROW_COLUMN
    key = given.id_column or (own_id if job is None else job.id_name) or ROW_COLUMN
    if key not in available:
        raise UsageError(
            f"{given.scores}: no column {key!r} to find the rows of --truth-from by\nname it with --id-column"
        )
    confirmed = reviewed if given.review_blank == "confirmed" else ()
    shown = {name: asked[name].column("") for name in named if name in confirmed}
    by_place = key == ROW_COLUMN and given.id_column is None and not reviewed
    answers = _read(source, "" if by_place else key, named, shown, f"--truth-from {other}: {key}")
    found, unknown = _by_row(given, key, answers)
    told = {}
    for name, truth in named.items():
        own = {id_: each[name] for id_, each in found.items() if name in each}
        blank = sum(name not in each for each in answers.values()) if name in reviewed else 0
        told[name] = RightAnswers(truth, key, own, blank)
    if reviewed and given.truth is None:
        told = {name: own for name, own in told.items() if own.found}
        if not told:
            raise UsageError(
                f"--truth-from {other}: no right answer is written in {', '.join(named.values())}\nwrite them; if "
                "blank ones mean that the answer shown was seen and is right, give --review-blank confirmed"
            )
    return FoundTruth(told, unknown)


def _named_in(
    given: LabelledOptions,
    columns: Sequence[str],
    asked: Mapping[str, AnswerColumns],
    reviewed: Mapping[str, str],
) -> Mapping[str, str]:
    # The columns with right answers of a file with these columns, by question; of a review file they are `reviewed`.
    other = given.truth_from
    if given.review_blank == "confirmed" and not reviewed:
        raise UsageError(f"--review-blank confirmed: {other} is not a file of prefill score --review\nleave it out")
    if given.truth is None:
        if not reviewed:
            raise UsageError(f"no --truth given: name the column of {other} with the right answers")
        return reviewed
    named = truth_by_question(given.columns, asked)
    for name, truth in named.items():
        if name in reviewed and truth == asked[name].column(""):
            raise UsageError(
                f"--truth {truth}: in {other} this column has the answers that were shown, and {reviewed[name]} the "
                "right ones\nleave --truth out"
            )
    return named


def _read(
    source: Source, key: str, named: Mapping[str, str], shown: Mapping[str, str], called: str
) -> dict[str, dict[str, Any]]:
    # The right answers to each question by the ids in the column `key`, or by row number. A blank one is that `shown`,
    # if a person was to look at it. Raises UsageError for two to a question of a row.
    asks = [REVIEW] if shown else []
    source.select(
        columns=list(dict.fromkeys([*named.values(), *shown.values(), *asks, *filter(None, [key])])), carried=()
    )
    answers: dict[str, dict[str, Any]] = {}
    bad = 0
    for batch in source.batches():
        bad += len(batch.errors)
        ids = batch.columns[key] if key else batch.rows.tolist()
        for at, (row, id_) in enumerate(zip(batch.rows.tolist(), ids, strict=True)):
            if row in batch.errors or is_blank(id_):
                continue
            known = answers.setdefault(_key(id_), {})
            for name, truth in named.items():
                answer = batch.columns[truth][at]
                if is_blank(answer) and name in shown and name in doubted(batch.columns[REVIEW][at]):
                    answer = batch.columns[shown[name]][at]
                if is_blank(answer):
                    continue
                if plain_form(known.setdefault(name, answer)) != plain_form(answer):
                    raise UsageError(f"{called} {id_} has two right answers: {known[name]}, {answer}")
    if bad:
        log.warning(f"--truth-from {source.paths[0]}: {counted(bad, 'row')} cannot be read, and left out")
    return answers


def tell_blank(given: LabelledOptions, right: RightAnswers, rows: int, agreed: int) -> None:
    """Warn where none of the rows with a right answer `agreed` with the model, in a review file with blank ones:
    somebody may have written only what was wrong."""
    if right.blank and rows and not agreed:
        log.warning(
            f"{given.truth_from}: all {counted(rows, 'right answer')} in {right.truth} differ from the model's, "
            f"and {right.blank:,} are blank, which counts as not looked at\n"
            "if blank ones mean that the answer shown was seen and is right, give --review-blank confirmed"
        )


def doubted(reasons: Any) -> list[str]:
    """Return the questions that a cell of the column `review` names, as `reason` wrote it."""
    return [each.partition(":")[0].strip() for each in str(reasons or "").split(";")]


def reason(name: str, why: str) -> str:
    """Return the part of a cell of the column `review` that says why a person should look at a question."""
    return f"{name}: {why}"


def _by_row(
    given: LabelledOptions, key: str, answers: Mapping[str, dict[str, Any]]
) -> tuple[dict[str, dict[str, Any]], Mistakes | None]:
    # What is known of each row of the scores, by its own id, and the ids that are of no row. An id that a spreadsheet
    # has changed is that of the only row, of those without the very same one, that it may come from.
    rows = {
        _key(id_): None for batch in Source.open([given.scores], columns=[key]).batches() for id_ in batch.columns[key]
    }
    found = {id_: own for id_, own in answers.items() if id_ in rows}
    left = [id_ for id_ in answers if id_ not in rows]
    if not left:
        return found, None
    forms: dict[str, list[str]] = defaultdict(list)
    for id_ in rows:
        if id_ not in found:
            forms[_form(id_)].append(id_)
    changed = Counter(map(_form, left))
    strange = []
    for id_ in left:
        if changed[form := _form(id_)] == 1 and len(forms[form]) == 1:
            found[forms[form][0]] = answers[id_]
        else:
            strange.append(id_)
    free = [id_ for id_ in rows if id_ not in found]
    unknown = Mistakes.of(dict.fromkeys(strange, 1), free, alike=_ALIKE_IDS)
    if unknown is None or not free:  # all rows have one: a file about more of them
        return found, None
    what = f"--truth-from {given.truth_from}"
    if not found:
        raise UsageError(
            f"{what}: none of its {counted(unknown.rows, 'id')} is one of {given.scores}: {unknown.text}\n"
            "name the column with the ids with --id-column, or give the scores of these rows"
        )
    log.warning(
        f"{what}: {counted(unknown.rows, 'id')} of no row of {given.scores}, left out: {unknown.text}\n"
        f"correct them: they should be as in its column {key}"
    )
    return found, unknown


def _key(value: Any) -> str:
    # An id as text, the same for any kind of file that the id is read from.
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


_DIGITS = 40


def _form(id_: str) -> str:
    # What stays the same of an id in a spreadsheet: of a number its value.
    text = id_.strip()
    try:
        number = Decimal(text)
    except InvalidOperation:
        return text.casefold()
    if not number.is_finite() or abs(number.adjusted()) > _DIGITS:
        return text.casefold()
    return str(int(number)) if number == number.to_integral_value() else str(number.normalize())


# The answers of an output, and whether they are right.


_UNKNOWN = -1
_MOST_COUNTED = 1000  # different values that are no answer
_SAME, _MORE_THAN_ALL = 1e-6, 1e-3
BROKEN, NO_PROBABILITIES, NO_ANSWER = "that cannot be read", "whose answer has no probabilities", "without an answer"
NO_TRUTH, NO_OPTION = "without a right answer", "whose right answer is none of the options"


@dataclass(frozen=True, slots=True)
class TruthPlan:
    """The answers to a question, and the column with the right ones."""

    between: ClassVar[bool] = False  # whether a number between the levels of a scale is a right answer

    own: AnswerColumns
    truth: str
    labels: tuple[Label, ...]  # none where rows have their own choices
    choices: str | None = None  # the kept column with the choices of each row

    @property
    def option(self) -> str:
        """The option that names the column, for messages."""
        return truth_option(self.own.name, self.truth)

    @property
    def names(self) -> list[str]:
        """The names of the labels."""
        return [label.name for label in self.labels]

    def name_of(self, number: int) -> str:
        """Return the label of this number; of choices the number itself."""
        return self.labels[number].name if self.labels else str(number)

    @property
    def values(self) -> bool:
        """Whether scores are values; those of the first label then rank the rows."""
        return self.own.measure is Measure.VALUES

    @property
    def numbers(self) -> tuple[float, ...]:
        """What each label stands for; none unless they are ordered."""
        return self.own.values

    @property
    def by_label(self) -> bool:
        """Whether each label has a score of its own, and the first one's does not suffice."""
        return len(self.labels) > 2 and not self.values

    def number_of(self, answer: Any, choices: Any = None) -> int | None:
        """Return the number of the label, or of the row's choice, that a right answer stands for, by its name or by
        the number of its level; None if it is none."""
        if not isinstance(answer, str | int | float | bool):
            return None
        if self.choices is None:
            found = label_of(answer, self.labels)
            if found is None and (number := as_number(answer)) in self.numbers:
                return self.numbers.index(number)
            return found
        if isinstance(choices, str):  # CSV has no lists, and a column of JSON Lines may hold others too
            with suppress(ValueError, RecursionError):
                choices = json.loads(choices)
        if not isinstance(choices, list) or isinstance(answer, bool):
            return None
        if answer in choices:
            return choices.index(answer)
        number = as_number(answer)
        return int(number) if number is not None and number in range(len(choices)) else None

    def value_of(self, answer: Any) -> float | None:
        """Return the number that a right answer stands for, where labels are ordered: that of its label, or itself."""
        if not self.numbers:
            return None
        number = self.number_of(answer)
        return as_number(answer) if number is None else self.numbers[number]

    def knows(self, answer: Any, choices: Any = None) -> bool:
        """Return whether a value is a right answer."""
        return self.number_of(answer, choices) is not None or (self.between and self.value_of(answer) is not None)

    def mistakes(self, values: Mapping[str, int], left_out: int = 0) -> Mistakes | None:
        """Return the right answers, of these values as JSON with the number of rows of each, that stand for nothing.
        So do those of the rows that were `left_out`."""
        found: dict[str, int] = {}
        for text, rows in values.items():
            try:
                value = json.loads(text)
            except ValueError:
                value = text  # what cannot be JSON is named as it is
            if not is_blank(value) and not self.knows(value):
                found[value if isinstance(value, str) else text] = rows
        return Mistakes.of(found, self.names, left_out=left_out)

    def tell(self, mistakes: Mistakes | None) -> None:
        """Warn of right answers that are none of the options, where there are some."""
        if mistakes is not None:
            what = "is" if mistakes.rows == 1 else "are"
            options = ", ".join(self.names) or "the choices of their rows"
            log.warning(
                f"{self.option}: {counted(mistakes.rows, 'right answer')} {what} none of {options}: {mistakes.text}\n"
                "they count as unknown: correct them, or leave them blank"
            )

    def no_answer(self, mistakes: Mistakes) -> UsageError:
        """Return the error that no value of the column is an answer."""
        if self.choices:
            return UsageError(
                f"{self.option}: none of its values is a choice of its row: {mistakes.text}\n"
                "give the column the texts of choices, or their numbers from 0, or leave unknown ones null"
            )
        own = ", ".join(self.names) + (", also yes and no, true and false, 1 and 0" if len(self.labels) == 2 else "")
        return UsageError(
            f"{self.option}: none of its values is a label: {mistakes.text}\n"
            f"the labels are {own}: give the column those values, or leave unknown ones null"
        )


@dataclass(slots=True)
class TruthCounts:
    """The values of a column with right answers."""

    # By value as JSON: its label's number, and the count of rows. If there are very many values that are not a label,
    # only the first.
    values: dict[str, tuple[int | None, int]] = field(default_factory=dict)
    left_out: int = 0  # rows with the others

    def add(self, value: Any, label: int | None, rows: int) -> None:
        text = as_json_text(value)
        if label is not None or text in self.values or len(self.values) < _MOST_COUNTED:
            self.values[text] = label, self.values.get(text, (label, 0))[1] + rows
        else:
            self.left_out += rows


def as_json_text(value: Any) -> str:
    """Return a right answer as JSON; a type instead of a value as a text about it."""
    if isinstance(value, pa.DataType):
        return f"a value of type {value}"
    if isinstance(value, float) and not math.isfinite(value):
        return "null"
    return json.dumps(value, ensure_ascii=False, default=str)


@dataclass(frozen=True, slots=True)
class JudgedAnswers:
    """The rows of an output, or of a piece of it, that have an answer and a known right one."""

    plan: TruthPlan
    # The probability of the first label [rows], or with more than two labels of every label [rows, labels]; of rows
    # with their own choices [rows, choices], 0 after a row's last choice.
    scores: Float64Array
    calibrated: Float64Array | None  # the same after the calibration; None without one
    # The log-probability of each label, if they are read, or of whole choices, NaN after a row's last [rows, labels];
    # else without rows.
    logs: Float64Array
    truth: Int64Array  # the number of the right label, or of the row's choice [rows]
    places: Int64Array  # their places in the output, counted from 0 [rows]
    left_out: Counter[str]  # other rows, by reason
    found: TruthCounts  # of all rows with an answer
    # Where labels stand for numbers: the mean, the number of the likeliest label, and the right number, of all rows
    # that have one [3, rows].
    said: Float64Array

    @property
    def probabilities(self) -> Float64Array:
        """The probabilities of every label [rows, labels]."""
        return self.scores if self.scores.ndim == 2 else np.stack([self.scores, 1 - self.scores], axis=1)

    @property
    def without_truth(self) -> int:
        """Rows that have an answer, but no right one."""
        return self.left_out[NO_TRUTH] + self.left_out[NO_OPTION]

    @property
    def errors(self) -> int:
        """Rows without an answer."""
        return self.left_out.total() - self.without_truth

    @property
    def mistakes(self) -> Mistakes | None:
        """The right answers that are none."""
        return self.plan.mistakes({text: rows for text, (_, rows) in self.found.values.items()}, self.found.left_out)


@dataclass(frozen=True, slots=True)
class AnsweredRows:
    """The rows of an output that have an answer to a question, whether a right one is known or not."""

    own: AnswerColumns
    logs: Float64Array  # the log-probability of each label [rows, labels]
    left_out: Counter[str]  # other rows, by reason


@dataclass(frozen=True, slots=True)
class _Piece:
    table: pa.Table  # the columns of answers, as an output has them
    right: Sequence[Any]  # right answers
    at: Int64Array  # the place of each row's own among them [rows]
    choices: Iterable[Any]  # those of each right answer's row
    broken: BoolArray  # rows that cannot be read [rows]
    odd: BoolArray  # rows with something else than numbers below infinity [rows]


def judged_answers(destination: Destination, plan: TruthPlan) -> JudgedAnswers:
    """Read the answers of an output and the right ones, in 24 bytes a row for two labels.

    Calibrated probabilities take 8 bytes more. Raises what pyarrow raises, or ValueError, if the output is damaged.
    """
    return _judged(_of_output(destination, plan), plan, logs=False)


def _of_output(destination: Destination, plan: TruthPlan) -> Iterator[_Piece]:
    told = [*plan.own.told, *plan.own.calibrated]
    if plan.choices:
        told = ["score", plan.choices, "scores", "logprobs"]
    json_text = destination.file_format.json_text
    for table in destination.tables(list(dict.fromkeys([plan.truth, *told]))):
        none, choices = np.zeros(len(table), np.bool_), None
        if plan.choices:
            right, at = carried_values(table[plan.truth], json_text=json_text), np.arange(len(table))
            choices = carried_values(table[plan.choices], json_text=json_text)
        else:
            right, at = _different(table[plan.truth], json_text=json_text)
        yield _Piece(table, right, at, choices or repeat(None), none, none)


def carried_values(column: pa.ChunkedArray, *, json_text: bool) -> list[Any]:
    """Return the content of a carried column."""
    values = to_python(column)
    return [None if value is None else json.loads(value) for value in values] if json_text else values


def _different(column: pa.ChunkedArray, *, json_text: bool) -> tuple[list[Any], Int64Array]:
    # The different values of a carried column, and which of them is each row's [rows].
    try:
        encoded = column.combine_chunks().dictionary_encode()
    except pa.ArrowNotImplementedError:  # lists and structs are no answers
        return [column.type, None], column.is_null().to_numpy().astype(np.int64)
    values = carried_values(encoded.dictionary, json_text=json_text)
    at = encoded.indices.cast(pa.int64()).fill_null(len(values))
    return [*values, None], at.to_numpy(zero_copy_only=False)


def _judged(pieces: Iterable[_Piece], plan: TruthPlan, *, logs: bool) -> JudgedAnswers:
    counts, rows, most = TruthCounts(), 0, max(len(plan.labels), 2)
    # A piece without rows, for outputs that have none: its arrays have the right number of dimensions.
    none, numbers = np.empty((0, most) if plan.by_label or plan.choices else 0), np.empty(0, np.int64)
    calibrated, wide = none if plan.own.calibrated else None, np.empty((0, most))
    left_out, said = Counter[str](), np.empty((3, 0))
    found = [JudgedAnswers(plan, none, calibrated, wide, numbers, numbers, left_out, counts, said)]
    for piece in pieces:
        found.append(_of_piece(piece, rows, plan, counts, logs=logs))
        rows += len(piece.table)
    return JudgedAnswers(
        plan,
        scores=_joined([each.scores for each in found], 0.0),
        calibrated=_joined([each.calibrated for each in found if each.calibrated is not None], 0.0),
        logs=_joined([each.logs for each in found], math.nan),
        truth=np.concatenate([each.truth for each in found]),
        places=np.concatenate([each.places for each in found]),
        left_out=sum((each.left_out for each in found), Counter[str]()),
        found=counts,
        said=np.concatenate([each.said for each in found], axis=1),
    )


def _of_piece(piece: _Piece, first: int, plan: TruthPlan, counts: TruthCounts, *, logs: bool) -> JudgedAnswers:
    # `first` is the place of its first row in the output. The values of the truth are counted.
    table, own = piece.table, plan.own
    shares = np.empty((0, 0)) if plan.choices else own.shares_in(table)
    answered = pc.is_valid(table["score"]).to_numpy() if plan.choices else ~np.isnan(shares[:, 0])
    usable, reasons = _usable(piece, own, shares, answered)
    whole = own.logs_in(table) if logs else np.empty((len(table), 0))
    numbers, stands_for, blank = _right_of(piece, usable, plan, counts)
    known = usable & (numbers != _UNKNOWN)
    reasons |= {NO_TRUTH: blank, NO_OPTION: ~known}
    of_labels = slice(None) if plan.by_label else 0  # of two labels the first suffices
    return JudgedAnswers(
        plan,
        scores=_padded(table["scores"], known, 0.0) if plan.choices else shares[known][:, of_labels],
        calibrated=own.calibrated_in(table)[known][:, of_labels] if own.calibrated else None,
        logs=_padded(table["logprobs"], known, math.nan) if plan.choices else whole[known if logs else slice(0)],
        truth=numbers[known],
        places=np.flatnonzero(known) + first,
        left_out=_counted_once(reasons),
        found=counts,
        said=_said(shares, stands_for, usable & ~np.isnan(stands_for), plan.numbers),
    )


def _usable(
    piece: _Piece, own: AnswerColumns, shares: Float64Array, answered: BoolArray
) -> tuple[BoolArray, dict[str, BoolArray]]:
    # The rows of a piece that are `answered` with probabilities [rows], by the answers' `shares`, which are none where
    # rows have their own choices; and for each reason the rows that are not.
    odd = piece.odd
    if len(shares) and own.measure is not Measure.VALUES:
        odd = odd | (answered & ~((shares >= 0) & (shares <= 1)).all(axis=1))
    reasons = {BROKEN: piece.broken, NO_PROBABILITIES: odd, NO_ANSWER: ~answered}
    return answered & ~odd & ~piece.broken, reasons


def _right_of(
    piece: _Piece, usable: BoolArray, plan: TruthPlan, counts: TruthCounts
) -> tuple[Int64Array, Float64Array, BoolArray]:
    # The number of each row's right answer, _UNKNOWN without one, the number that it stands for, NaN without one, and
    # whether it is blank, all [rows]. The values of usable rows are counted; of choices only those that are none.
    found = [plan.number_of(answer, own) for answer, own in zip(piece.right, piece.choices, strict=False)]
    for place, rows in enumerate(np.bincount(piece.at[usable], minlength=len(found)).tolist()):
        if rows and piece.right[place] is not None and (plan.labels or found[place] is None):
            counts.add(piece.right[place], found[place], rows)
    numbers = np.array([_UNKNOWN if number is None else number for number in found], np.int64)
    stands_for = np.array(list(map(plan.value_of, piece.right)), np.float64)  # None becomes NaN
    return numbers[piece.at], stands_for[piece.at], np.array(list(map(is_blank, piece.right)), np.bool_)[piece.at]


def _counted_once(reasons: Mapping[str, BoolArray]) -> Counter[str]:
    # Each row is left out for the first of the reasons that it has.
    found, before = Counter[str](), np.zeros((), np.bool_)
    for why, rows in reasons.items():
        found[why] = int((rows & ~before).sum())
        before = before | rows
    return +found


def _joined(pieces: Sequence[Float64Array], fill: float) -> Any:
    # One below the other; `fill` widens those with fewer columns. None without any.
    if not pieces or pieces[0].ndim == 1:
        return np.concatenate(pieces) if pieces else None
    most = max(each.shape[1] for each in pieces)
    wide = [np.pad(each, ((0, 0), (0, most - each.shape[1])), constant_values=fill) for each in pieces]
    return np.concatenate(wide)


def _padded(column: pa.ChunkedArray, known: BoolArray, fill: float) -> Float64Array:
    # The lists of known rows as one array; `fill` pads the shorter ones.
    lists = column.combine_chunks().filter(pa.array(known))
    counts = np.asarray(pc.list_value_length(lists), np.int64)
    found = np.full((len(counts), int(counts.max(initial=2))), fill)
    found[np.arange(found.shape[1]) < counts[:, None]] = lists.flatten().to_numpy(zero_copy_only=False)
    return found


def _said(shares: Float64Array, values: Float64Array, known: BoolArray, numbers: Sequence[float]) -> Float64Array:
    # The mean, the number of the likeliest label and the right number of known rows [3, rows].
    if not numbers:
        return np.empty((3, 0))
    stand_for, own = np.array(numbers), shares[known]
    return np.stack([own @ stand_for, stand_for[own.argmax(axis=1)], values[known]])


# Outputs that come back with right answers, whoever wrote or copied them.


@dataclass(frozen=True, slots=True)
class LabelledOutput:
    """An output of `prefill score`, or a copy of one, with right answers to some of its questions, or to none."""

    given: LabelledOptions
    source: Source
    job: Job | None  # that wrote it; None where that is not known
    asked: Mapping[str, AnswerColumns]  # its questions by name
    truth: FoundTruth

    @classmethod
    def open(cls, given: LabelledOptions) -> LabelledOutput:
        """Open the scores, and find the right answers, if any are given. Raises UsageError."""
        source, job = Source.open([given.scores]), job_of(given.scores)
        known = {} if job is None else {own.key: own for own in job.answers}
        asked = {name: known.get(name, own) for name, own in AnswerColumns.found_in(source.available).items()}
        if not asked:
            raise UsageError(
                f"{given.scores}: its scores are a head's values, which are not probabilities\n"
                "score with --head probability"
                if "score" in source.available and any(name.startswith("value_") for name in source.available)
                else f"{given.scores}: not an output of prefill score with the probabilities of answers"
            )
        truth = find_truth(given, asked, source.available, job) if given.judged else FoundTruth({})
        return cls(given, source, job, asked, truth)

    @property
    def divided(self) -> bool:
        """Whether the scores are known to be of log-probabilities that --label-norm divides."""
        return self.job is not None and "label_norm" in self.job.fingerprint

    def read(self, name: str, *, exact: bool) -> JudgedAnswers:
        """Read the answers to a question, with their log-probabilities, and the right ones. The score of labels is
        that of their log-probabilities, if it must be `exact`.

        Raises UsageError if no row has both, and for a score that is not that of its columns.
        """
        right, own = self.truth.answers[name], self._named(self.asked[name])
        plan = TruthPlan(own, right.truth, tuple(map(Label, own.labels)))
        found = _judged(self._pieces(own, right, exact=exact), plan, logs=True)
        mistakes, rows = found.mistakes, len(found.truth)
        if not rows and mistakes is not None:
            raise plan.no_answer(mistakes)
        if not rows:
            reasons = ", ".join(f"{count:,} {why}" for why, count in found.left_out.items()) or "it has no rows"
            raise UsageError(
                f"{self.given.scores}: no row has an answer and a right one ({reasons})\n"
                "name the column with the right answers with --truth, or their file with --truth-from"
            )
        plan.tell(mistakes)
        tell_blank(self.given, right, rows, int((found.probabilities.argmax(axis=1) == found.truth).sum()))
        return found

    def answered(self, name: str) -> AnsweredRows:
        """Read the log-probabilities of the answers to a question, in all rows that have them.

        Raises UsageError for a score that is not that of its columns.
        """
        own = self._named(self.asked[name])
        logs, left_out = [np.empty((0, len(own.labels)))], Counter[str]()
        for piece in self._pieces(own, None, exact=False):
            shares = own.shares_in(piece.table)
            usable, reasons = _usable(piece, own, shares, ~np.isnan(shares[:, 0]))
            logs.append(own.logs_in(piece.table)[usable])
            left_out += _counted_once(reasons)
        return AnsweredRows(own, np.concatenate(logs), left_out)

    def _named(self, own: AnswerColumns) -> AnswerColumns:
        # With the names of its answers, which a copy does not tell: those of its first row that has them.
        if own.labels:
            return own
        columns = [own.name, *own.told]
        for batch in self.source.select(columns=columns, carried=()).batches():
            own = own.named(*(self._cells(batch, name) for name in columns))
            if own.labels:
                return own
        raise UsageError(f"{self.given.scores}: no row has an answer to {own.name} with its probabilities")

    def _cells(self, batch: RowBatch, name: str) -> list[Any]:
        cells = batch.columns[name]
        return list(map(_of_text, cells)) if self.source.kind in ("csv", "tsv") else cells

    def _pieces(self, own: AnswerColumns, right: RightAnswers | None, *, exact: bool) -> Iterator[_Piece]:
        typed = bool(own.name) and own.type != "predicate"
        columns = list(dict.fromkeys([*own.told, *([] if own.name else ["score", *own.logs])]))
        self.source.select(columns=[*columns, *([] if right is None else [right.key])], carried=())
        for batch in self.source.batches():
            cells = {name: _as_output(own, self._cells(batch, name), typed=typed) for name in columns}
            table = pa.table({name: column for name, (column, _) in cells.items()})
            odd = np.logical_or.reduce([odd for _, odd in cells.values()])
            if not own.name:
                if self.source.kind == "parquet":  # others have no infinity, and nothing instead
                    gaps = [pc.is_null(table[each]).to_numpy() for each in own.logs]
                    odd |= pc.is_valid(table["score"]).to_numpy() & np.any(gaps, axis=0)
                self._require_first(own, table, odd, exact=exact)
            answers = [None] * len(table) if right is None else [right.of_row(key) for key in batch.columns[right.key]]
            broken = np.isin(batch.rows, list(batch.errors))
            yield _Piece(table, answers, np.arange(len(answers)), repeat(None), broken, odd)

    def _require_first(self, own: AnswerColumns, table: pa.Table, odd: BoolArray, *, exact: bool) -> None:
        # Raise UsageError unless labels exclude one another, and the first is that of the score: in a copy the columns
        # may have another order, and with more than two labels a temperature changes the score alone.
        score, logs = table["score"].to_numpy(), own.logs_in(table)
        if np.any(np.exp(logs[~odd]).sum(axis=1) > 1 + _MORE_THAN_ALL):
            raise UsageError(
                f"{self.given.scores}: its labels do not exclude one another: their probabilities add up to more than "
                f"1\nscore one of them, with --labels {own.labels[0]}"
            )
        with np.errstate(invalid="ignore"):
            clear = ~odd & (np.diff(np.sort(logs, axis=1)[:, -2:], axis=1)[:, 0] > _SAME)
        first = logs.argmax(axis=1) == 0
        wrong = clear & (score > 0.5 + _SAME) & (score <= 1) & ~first
        if len(own.labels) == 2:
            wrong |= clear & (score < 0.5 - _SAME) & (score >= 0) & first
        elif exact and own.told == own.logs:
            wrong |= np.abs(label_probabilities(logs)[:, 0] - score) > _SAME
        if wrong.any() and not self.divided:
            raise UsageError(
                f"{self.given.scores}: score is not the probability of {own.labels[0]} by the columns "
                f"{', '.join(own.logs)}\n"
                "give an output as prefill score wrote it"
                + (", of a job without --temperature" if exact else ", or put its columns back in their order")
            )


def job_of(path: str) -> Job | None:
    """Return the job that wrote an output; None where that is not known."""
    with suppress(PrefillError, OSError, ValueError):
        destination = Destination.parse(path)
        if (published := destination.published()) is not None:
            return published.job
        if (manifest := Manifest.load(destination.work)) is not None:
            return manifest.job
    return None


def _of_text(text: Any) -> Any:
    # A cell of a table of texts, which has numbers and JSON; None in a row that cannot be read.
    for read in (float, json.loads):
        with suppress(ValueError, TypeError, RecursionError):
            return read(text)
    return text or None


def _as_output(own: AnswerColumns, cells: Sequence[Any], *, typed: bool) -> tuple[pa.Array, BoolArray]:
    # The cells of a column of numbers, or of one `typed` by all answers, as an output has them: NaN for what is no
    # number. And the rows with such [rows].
    found: list[Any] = [None if cell is None else number_of(cell) for cell in cells]
    sums, kind = found, pa.float64()
    if typed:
        found = [None if cell is None else _numbers(cell, own.labels) for cell in cells]
        sums = [None if cell is None else sum(cell.values()) for cell in found]
        kind = pa.struct([(label, pa.float64()) for label in own.labels])
    return pa.array(found, kind), np.array([each is not None and not each < math.inf for each in sums], np.bool_)


def _numbers(cell: Any, labels: Sequence[str]) -> dict[str, float]:
    return {label: number_of(cell.get(label) if isinstance(cell, dict) else None) for label in labels}

"""Right answers: which answer a value stands for, which row it is of, and the values that stand for nothing.

They come from a column of a data set, or from a person who wrote them into a review file with a spreadsheet, which
turns 000012 into 12, Yes into TRUE and 1 into 1.0.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any

from pydantic import BaseModel, ConfigDict

from prefillcli.errors import UsageError, counted, did_you_mean
from prefillcli.options.judging import LabelledOptions, truths_by_question
from prefillcli.prompts.labels import label_of, plain_form
from prefillcli.prompts.questions import Label
from prefillcli.report.section import visible
from prefillcli.rows.input.source import Source
from prefillcli.rows.output.answers import AnswerColumns
from prefillcli.rows.output.columns import ROW_COLUMN
from prefillcli.rows.output.destination import Job
from prefillcli.runtime import log

# Values as answers.


def as_number(answer: Any) -> float | None:
    """Return the finite number that a value is, or stands for as text."""
    try:
        found = float(answer)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) and not isinstance(answer, bool) else None


def answer_number(answer: Any, labels: Sequence[Label], numbers: Sequence[float] = ()) -> int | None:
    """Return the number of the label that a right answer stands for, by its name or by the number of its level; None
    if it is neither. `numbers` are those that the labels of a scale stand for."""
    if not isinstance(answer, str | int | float | bool):
        return None
    found = label_of(answer, labels)
    if found is None and (number := as_number(answer)) in numbers:
        return numbers.index(number)
    return found


def is_blank(answer: Any) -> bool:
    """Return whether a cell for a right answer has none."""
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


def tell_answers(where: str, mistakes: Mistakes | None, options: Iterable[str]) -> None:
    """Warn of right answers that are none of the options, where there are some."""
    if mistakes is not None:
        what = "is" if mistakes.rows == 1 else "are"
        log.warning(
            f"{where}: {counted(mistakes.rows, 'right answer')} {what} none of {', '.join(options)}: {mistakes.text}\n"
            "they count as unknown: correct them, or leave them blank"
        )


@dataclass(slots=True)
class AnswerNumbers:
    """Reads right answers as the numbers of labels, and counts those that are none."""

    labels: Sequence[Label]
    numbers: Sequence[float] = ()  # that the labels of a scale stand for
    unknown: Counter[str] = field(default_factory=Counter)

    def of(self, answer: Any) -> int | None:
        """Return the number of the label that a right answer stands for; None if it is none."""
        found = answer_number(answer, self.labels, self.numbers)
        if found is None:
            self.unknown[str(answer)] += 1
        return found

    def mistakes(self, where: str) -> Mistakes | None:
        """Return the right answers that were no labels, and warn of them."""
        names = [each.name for each in self.labels]
        found = Mistakes.of(self.unknown, names)
        tell_answers(where, found, names)
        return found


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
    named = _named(given, asked, available)
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


def _named(given: LabelledOptions, asked: Mapping[str, AnswerColumns], available: Sequence[str]) -> dict[str, str]:
    # The columns with right answers, of the available ones, by question. The only question needs no name.
    truth = given.truth or ""
    if given.question or (len(asked) == 1 and ("=" not in truth or truth in available)):
        return {given.question or next(iter(asked)): truth}
    named = truths_by_question(truth)
    for name in named:
        if name not in asked:
            raise no_question(given.scores, name, asked)
    return named


def no_question(path: str, name: str, asked: Iterable[str]) -> UsageError:
    """Return the error that an output has no answers to a question of this name."""
    names = list(asked)
    return UsageError(
        f"{path}: it has no answers to a question {name!r}{did_you_mean(name, names)}\nit has those to "
        f"{', '.join(names)}"
    )


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
        return {name: own for name, own in reviewed.items() if given.question in ("", name)}
    named = _named(given, asked, columns)
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

"""`prefill calibrate --accuracy`: rows with answers and right answers become floors of probability."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from prefillcli.errors import ResourceError, UsageError, did_you_mean, without_secrets
from prefillcli.judging.review import AnswerFloor, FloorFile, QuestionFloors, Value
from prefillcli.options.judging import CalibrateSettings, truths_by_question
from prefillcli.prompts.labels import YES_NO, label_of
from prefillcli.prompts.questions import Label
from prefillcli.report.section import WIDTH, numbers_table, stderr_console
from prefillcli.rows.input.source import Source
from prefillcli.rows.output.columns import ANSWER
from prefillcli.rows.output.store import write_sealed
from prefillcli.runtime import log
from prefillcli.scoring.path_table import require_apart, require_json
from prefillcli.scoring.shell import shell
from prefillcli.stats.acceptance import lowest_floor, lowest_floors
from prefillcli.stats.evaluation import BoolArray, Float64Array, Int64Array, label_probabilities
from prefillcli.tools.calibrate import PLAIN, RightAnswers, job_of, number_of

_LOGPROB = "logprob_"
_SAME = 1e-6


class GivenAnswers(NamedTuple):
    """The columns of an output with the answers to a question.

    `labels`: `score` and the numbers of each label. `predicate`: the probability of yes. `options`: the value of a
    choice or the expectation of a score, and the probability of each option by its name.
    """

    type: Literal["labels", "predicate", "options"]
    names: tuple[str, ...]
    labels: tuple[str, ...] = ()
    divided: bool = False  # whether the scores need not follow from the log-probabilities of the labels

    @classmethod
    def all_of(cls, available: Sequence[str]) -> dict[str, GivenAnswers]:
        """Return those of each question in an output with these columns, by its name; see `ANSWER`."""
        found = {}
        labels = tuple(name.removeprefix(_LOGPROB) for name in available if name.startswith(_LOGPROB))
        if len(labels) > 1 and "score" in available:
            scores = [f"score_{label}" for label in labels]
            divided = set(scores) <= set(available)
            numbers = scores if divided else [_LOGPROB + label for label in labels]
            found[ANSWER] = cls("labels", ("score", *numbers), labels, divided)
        for question in (name.removesuffix(".label_mass") for name in available if name.endswith(".label_mass")):
            if f"{question}.probabilities" in available:
                found[question] = cls("options", (question, f"{question}.probabilities"))
            elif question in available:
                found[question] = cls("predicate", (question,))
        return found

    def agrees(self, values: Sequence[Any]) -> bool:
        """Return whether the score of a row is that of its log-probabilities, as far as both are known. It is not in a
        copy whose columns have another order, nor, of more than two labels, after a temperature."""
        if self.type != "labels" or self.divided:
            return True
        score, *logprobs = map(number_of, values)
        if len(logprobs) > 2:
            return not abs(label_probabilities(np.array(logprobs))[0] - score) > _SAME
        gap = logprobs[0] - logprobs[1]
        return not (abs(gap) > _SAME and abs(score - 0.5) > _SAME and (gap > 0) != (score > 0.5))

    def probabilities(self, values: Sequence[Any]) -> list[float]:
        """Return the probability of each option, of the values of a row in these columns; NaN where there is none."""
        if self.type == "options":
            return [number_of(each) for each in values[1].values()] if isinstance(values[1], dict) else []
        score, *numbers = map(number_of, values)
        if self.type == "predicate" or len(self.labels) == 2:
            return [score, 1 - score]
        if self.names[1].endswith(f"score_{self.labels[0]}"):
            return numbers
        found: list[float] = label_probabilities(np.array(numbers)).tolist()
        return found

    def value(self, values: Sequence[Any], answer: int) -> Value:
        """Return what the option of this number is called, for a row that has chosen it."""
        if self.type == "labels":
            return self.labels[answer]
        if self.type == "predicate":
            return answer == 0
        return str(list(values[1])[answer])

    def is_right(self, values: Sequence[Any], answer: int, truth: Any) -> bool | None:
        """Return whether this option of a row is the right one; None if the right answer is none of the options."""
        if not isinstance(truth, PLAIN):
            return None
        named = values[1] if self.type == "options" else self.labels
        labels = [Label(name) for name in named] or YES_NO
        right = label_of(truth, labels)
        if right is None and isinstance(values[0], float) and isinstance(truth, int | float):  # the number of a level
            right = int(truth) if truth in range(len(labels)) else None
        return None if right is None else right == answer


@dataclass(frozen=True, slots=True)
class LabelledAnswers:
    """The answers to a question in rows with a right answer."""

    probabilities: Float64Array  # of the given answer [rows]
    answers: Int64Array  # its number among the options [rows]
    right: BoolArray  # whether it is right [rows]
    values: dict[int, Value]  # the name of each option that was given
    options: int  # their number
    left_out: dict[str, int]  # other rows, by reason


def read_labelled_answers(source: Source, own: GivenAnswers, truth: RightAnswers) -> LabelledAnswers:
    """Read the answers in the columns of one question, and whether they are right.

    Raises UsageError for scores that are not those of their log-probabilities, and what `Source` does.
    """
    source.select(columns=list(dict.fromkeys([*own.names, truth.key])), carried=())
    left_out: Counter[str] = Counter()
    rows: list[tuple[float, int, bool]] = []  # probability and number of the answer, and whether it is right
    values: dict[int, Value] = {}
    options = 0
    for batch in source.batches():
        own_columns = [batch.columns[name] for name in (*own.names, truth.key)]
        if source.kind in ("csv", "tsv"):  # whose values are texts
            own_columns[:-1] = [list(map(_of_text, column)) for column in own_columns[:-1]]
        for row, *cells, key in zip(batch.rows.tolist(), *own_columns, strict=True):
            if not own.agrees(cells):
                columns = ", ".join(own.names[1:])
                raise UsageError(
                    f"{own.names[0]} is not the probability of {own.labels[0]} by the columns {columns}\n"
                    "give an output as prefill score wrote it, of a job without --temperature"
                )
            answer = truth.of_row(key)
            shares = [] if cells[0] is None else own.probabilities(cells)
            if row in batch.errors:
                left_out["that cannot be read"] += 1
            elif cells[0] is None:
                left_out["without an answer"] += 1
            elif not shares or not all(0 <= each <= 1 for each in shares):
                left_out["whose answer has no probabilities"] += 1
            elif answer is None or answer == "":
                left_out["without a right answer"] += 1
            elif (right := own.is_right(cells, chosen := int(np.argmax(shares)), answer)) is None:
                left_out["whose right answer is none of the options"] += 1
            else:
                rows.append((max(shares), chosen, right))
                values.setdefault(chosen, own.value(cells, chosen))
                options = max(options, len(shares))
    return LabelledAnswers(
        probabilities=np.array([share for share, _, _ in rows], np.float64),
        answers=np.array([chosen for _, chosen, _ in rows], np.int64),
        right=np.array([right for _, _, right in rows], np.bool_),
        values=values,
        options=options,
        left_out=dict(left_out),
    )


def _of_text(text: str) -> Any:
    with suppress(ValueError):
        return json.loads(text)
    return text or None


def _floors(settings: CalibrateSettings) -> FloorFile:
    # The floors of all questions whose right answers are named. Raises UsageError.
    path, accuracy = settings.scores, settings.accuracy or 0.0
    source = Source.open([path])
    asked, job = GivenAnswers.all_of(source.available), job_of(path)
    if not asked:
        if {"question", "labels", "score"} <= set(source.available):
            raise UsageError(f"{path}: it has a row for each question\nscore with --questions-as columns")
        raise UsageError(f"{path}: not an output of prefill score with the probabilities of answers")
    if settings.question:
        truths = {settings.question: settings.truth or ""}
    else:
        truths = {ANSWER: settings.truth or ""} if ANSWER in asked else truths_by_question(settings.truth or "")
    found = {}
    for name, truth in truths.items():
        if name not in asked:
            raise UsageError(
                f"{path}: it has no answers to a question {name!r}{did_you_mean(name, asked)}\n"
                f"it has those to {', '.join(asked)}"
            )
        divided = asked[name].divided or (job is not None and "label_norm" in job.fingerprint)
        right = RightAnswers.of(settings, truth, source.available, job)
        rows = read_labelled_answers(source, asked[name]._replace(divided=divided), right)
        if not len(rows.right):
            reasons = ", ".join(f"{count:,} {why}" for why, count in rows.left_out.items()) or "it has no rows"
            raise UsageError(
                f"{path}: no row has an answer and a right one ({reasons})\n"
                f"name the column with the right answers to {name}, or their file with --truth-from"
            )
        found[name] = QuestionFloors(truth=truth, floors=_floors_of(rows, settings), left_out=rows.left_out)
    return FloorFile(
        accuracy=accuracy,
        questions=found,
        scores=without_secrets(path),
        job={} if job is None else job.fingerprint,
    )


def _floors_of(rows: LabelledAnswers, settings: CalibrateSettings) -> tuple[AnswerFloor, ...]:
    accuracy = settings.accuracy or 0.0
    if not settings.per_answer:
        return (AnswerFloor.of(None, lowest_floor(rows.probabilities, rows.right, accuracy)),)
    found = lowest_floors(rows.probabilities, rows.right, rows.answers, rows.options, accuracy)
    return tuple(AnswerFloor.of(value, found[at]) for at, value in sorted(rows.values.items()))


HEADER = ["question", "answer", "labelled rows", "floor", "accepted", "errors", "right, at least"]


def print_floors(floors: FloorFile, path: str) -> None:
    """Print a line for each floor, and how to use the file."""
    console = stderr_console(WIDTH)
    rows = [HEADER]
    for name, question in floors.questions.items():
        for own in question.floors:
            answer = "any" if own.answer is None else str(own.answer)
            figures = ["none", "", "", ""]
            if own.floor is not None and own.bound is not None:
                figures = [f"{own.floor:g}", f"{own.share:.1%}", f"{own.errors:,}", f"{own.bound:.4f}"]
            rows.append([name, answer, f"{own.rows:,}", *figures])
    console.print(numbers_table(rows, words=(0, 1)))
    console.print()
    for name, question in floors.questions.items():
        left = ", ".join(f"{count:,} {reason}" for reason, count in question.left_out.items())
        if left:
            console.print(f"{name}: left out: {left}")
        for own in question.floors:
            if own.floor is None:
                which = name if own.answer is None else f"{name}, {own.answer}"
                more = "answers are not right often enough at any probability"
                if own.needed is not None:
                    more = f"at the rate of errors seen, about {own.needed:,} labelled rows would prove one"
                console.print(f"{which}: no floor is proven; {more}")
    console.print(
        f"Answers at or above a floor are right at a rate of {floors.accuracy:g} or more, with 95 % confidence: {path}"
    )
    console.print(f"next: prefill score ... --review-below {path} names the questions of each row to review")


@dataclass
class _Ending:
    status: Literal["complete", "failed", "interrupted"] = "failed"
    exit_code: int = 1
    error: str | None = None
    floors: FloorFile | None = None


def floors_job(settings: CalibrateSettings) -> dict[str, Any]:
    """Find the floors, report on stderr, and write the file; return the summary for the last line on stdout.

    Errors are reported on stderr, and become the exit code in the summary.
    """
    ending = _Ending()
    with shell(ending, debug=settings.debug) as stop, stop.at_once():
        require_json(settings.output)
        require_apart(settings)
        floors = ending.floors = _floors(settings)
        try:
            write_sealed(settings.output, floors.model_dump_json())
        except OSError as error:
            raise ResourceError(f"{settings.output}: cannot write: {error.strerror or error}") from None
        ending.status, ending.exit_code = "complete", 0
        if not floors.job:
            log.warning(
                "the scores do not name the job that made them, so prefill score cannot check that the floors are "
                "for its model and prompt"
            )
        if not settings.quiet:
            print_floors(floors, without_secrets(settings.output))
    line: dict[str, Any] = {"status": ending.status, "exit_code": ending.exit_code}
    if ending.floors is not None and ending.status == "complete":
        found = ending.floors.model_dump(include={"accuracy", "confidence", "questions"})
        line |= {"output": settings.output, **found}
    return line | ({"error": ending.error} if ending.error else {})

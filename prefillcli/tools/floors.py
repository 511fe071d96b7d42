"""`prefill calibrate --accuracy`: rows with answers and right answers become floors of probability."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from prefillcli.errors import NOT_AS_EXPECTED, ResourceError, UsageError, counted, without_secrets
from prefillcli.judging.review import AnswerFloor, FloorFile, QuestionFloors, Value
from prefillcli.judging.truth import AnswerNumbers, Mistakes, RightAnswers, find_truth, no_question, tell_blank
from prefillcli.options.commands import CalibrateSettings
from prefillcli.prompts.questions import Label
from prefillcli.report.section import WIDTH, numbers_table, stderr_console
from prefillcli.rows.input.source import Source
from prefillcli.rows.output.answers import LOGPROB, AnswerColumns
from prefillcli.rows.output.store import write_sealed
from prefillcli.runtime import log
from prefillcli.scoring.path_table import require_apart, require_json
from prefillcli.scoring.shell import Ended, shell
from prefillcli.stats.acceptance import lowest_floor, lowest_floors
from prefillcli.stats.arrays import BoolArray, Float64Array, Int64Array
from prefillcli.stats.labels import label_probabilities
from prefillcli.tools.calibrate import job_of, number_of

_SAME = 1e-6


@dataclass(frozen=True, slots=True)
class LabelledAnswers:
    """The answers to a question in rows with a right answer."""

    probabilities: Float64Array  # of the given answer [rows]
    answers: Int64Array  # its number among the options [rows]
    right: BoolArray  # whether it is right [rows]
    values: Sequence[Value]  # the name of each option
    left_out: dict[str, int]  # other rows, by reason
    mistakes: Mistakes | None  # right answers that are none of the options


def read_labelled_answers(source: Source, own: AnswerColumns, truth: RightAnswers, *, norm: bool) -> LabelledAnswers:
    """Read the answers in the columns of one question, and whether they are right. With a `norm`, the score of labels
    is not that of their log-probabilities.

    Raises UsageError for scores that are not, and what `Source` does.
    """
    scores = [f"score_{label}" for label in own.labels]
    divided = norm or set(scores) <= set(source.available)
    names = [own.name, own.told[0]]
    if not own.type:
        names = ["score", *(scores if divided and len(scores) > 2 else (LOGPROB + label for label in own.labels))]
    source.select(columns=list(dict.fromkeys([*names, truth.key])), carried=())
    known, left_out = AnswerNumbers(()), Counter[str]()
    rows: list[tuple[float, int, bool]] = []  # probability and number of the answer, and whether it is right
    for batch in source.batches():
        columns = [batch.columns[name] for name in names]
        if source.kind in ("csv", "tsv"):  # whose values are texts
            columns = [list(map(_of_text, column)) for column in columns]
        own = own.named(columns[0], columns[-1])
        known.labels, known.numbers = [Label(name) for name in own.labels], _numbers_of(own)
        told = columns[-1] if own.type else _of_labels(own.labels, columns, divided=divided)
        found = own.shares([_numbers(own.labels, each) for each in told])
        keys = batch.columns[truth.key]
        for row, given, shares, key in zip(batch.rows.tolist(), columns[0], found, keys, strict=True):
            answer = truth.of_row(key)
            if row in batch.errors:
                left_out["that cannot be read"] += 1
            elif given is None:
                left_out["without an answer"] += 1
            elif not (shares.size and np.all((shares >= 0) & (shares <= 1))):
                left_out["whose answer has no probabilities"] += 1
            elif answer is None:
                left_out["without a right answer"] += 1
            elif (right := known.of(answer)) is None:
                left_out["whose right answer is none of the options"] += 1
            else:
                chosen = int(shares.argmax())
                rows.append((float(shares[chosen]), chosen, right == chosen))
    return LabelledAnswers(
        probabilities=np.array([share for share, _, _ in rows], np.float64),
        answers=np.array([chosen for _, chosen, _ in rows], np.int64),
        right=np.array([right for _, _, right in rows], np.bool_),
        values=(True, False) if own.type == "predicate" else own.labels,
        left_out=dict(left_out),
        mistakes=known.mistakes(f"--truth {truth.truth}"),
    )


def _of_labels(labels: Sequence[str], columns: Sequence[Sequence[Any]], *, divided: bool) -> Iterator[Any]:
    # What tells the probabilities of labels, of `score` and their numbers. Raises UsageError where the score is not
    # that of the numbers: in a copy with columns in another order, or, of more than two labels, after a temperature.
    for values in zip(*columns, strict=True):
        score, *numbers = map(number_of, values)
        if len(labels) == 2:
            gap = numbers[0] - numbers[1]
            agrees = not (abs(gap) > _SAME and abs(score - 0.5) > _SAME and (gap > 0) != (score > 0.5))
            yield score
        else:
            shares = numbers if divided else label_probabilities(np.array(numbers)).tolist()
            agrees = not abs(shares[0] - score) > _SAME
            yield dict(zip(labels, shares, strict=True))
        if not (agrees or divided):
            raise UsageError(
                f"score is not the probability of {labels[0]} by the columns "
                f"{', '.join(LOGPROB + label for label in labels)}\n"
                "give an output as prefill score wrote it, of a job without --temperature"
            )


def _numbers(labels: Sequence[str], value: Any) -> Any:
    # What tells the probabilities of a row, with NaN for everything that is no number.
    if isinstance(value, dict):
        return {each: number_of(value.get(each)) for each in labels}
    return number_of(value) if len(labels) == 2 else None


def _numbers_of(own: AnswerColumns) -> Sequence[float]:
    # What the levels of a scale stand for. In a copy of an output they count from 0.
    return own.values or (range(len(own.labels)) if own.type == "score" else ())


def _of_text(text: str) -> Any:
    with suppress(ValueError):
        return json.loads(text)
    return text or None


def _floors(settings: CalibrateSettings) -> FloorFile:
    # The floors of all questions whose right answers are named. Raises UsageError.
    path, accuracy = settings.labelled.scores, settings.fit.accuracy or 0.0
    source = Source.open([path])
    job = job_of(path)
    known = {} if job is None else {each.name: each for each in job.answers}
    asked = {name: known.get(name, own) for name, own in AnswerColumns.found_in(source.available).items()}
    if not asked:
        raise UsageError(f"{path}: not an output of prefill score with the probabilities of answers")
    if settings.labelled.question and settings.labelled.question not in asked:
        raise no_question(path, settings.labelled.question, asked)
    truth, found = find_truth(settings.labelled, asked, source.available, job), {}
    for name, right in truth.answers.items():
        norm = job is not None and "label_norm" in job.fingerprint
        rows = read_labelled_answers(source, asked[name], right, norm=norm)
        if not len(rows.right):
            reasons = ", ".join(f"{count:,} {why}" for why, count in rows.left_out.items()) or "it has no rows"
            advice = f"name the column with the right answers to {name}, or their file with --truth-from"
            advice = advice if rows.mistakes is None else f"they are {rows.mistakes.text}"
            raise UsageError(f"{path}: no row has an answer and a right one ({reasons})\n{advice}")
        tell_blank(settings.labelled, right, len(rows.right), int(rows.right.sum()))
        floors = _floors_of(rows, settings)
        found[name] = QuestionFloors(truth=right.truth, floors=floors, left_out=rows.left_out, mistakes=rows.mistakes)
    return FloorFile(
        accuracy=accuracy,
        questions=found,
        unknown_ids=truth.unknown_ids,
        scores=without_secrets(path),
        job={} if job is None else job.fingerprint,
    )


def _floors_of(rows: LabelledAnswers, settings: CalibrateSettings) -> tuple[AnswerFloor, ...]:
    accuracy = settings.fit.accuracy or 0.0
    if not settings.fit.per_answer:
        return (AnswerFloor.of(None, lowest_floor(rows.probabilities, rows.right, accuracy), rows.right),)
    found = lowest_floors(rows.probabilities, rows.right, rows.answers, len(rows.values), accuracy)
    return tuple(
        AnswerFloor.of(rows.values[at], found[at], rows.right[rows.answers == at])
        for at in np.unique(rows.answers).tolist()
    )


HEADER = ["question", "answer", "labelled rows", "floor", "accepted", "errors", "right, at least"]


def print_floors(floors: FloorFile, path: str) -> None:
    """Print whether floors are proven, a line for each, and how to use the file."""
    console = stderr_console(WIDTH)
    entries = [own for question in floors.questions.values() for own in question.floors]
    proven = [own for own in entries if own.floor is not None]
    if not proven:
        console.print(no_floor(floors))
        console.print()
    rows = [HEADER]
    for name, question in floors.questions.items():
        for own in question.floors:
            answer = "any" if own.answer is None else str(own.answer)
            figures = ["none", "", "", ""]
            if own.floor is not None and own.bound is not None:
                figures = [f"{own.floor:g}", f"{own.share:.1%}", f"{own.errors:,}", f"{own.bound:.4f}"]
            rows.append([name, answer, f"{own.rows:,}", *figures])
    console.print(numbers_table(rows, words=(0, 1), gap=2 if console.width >= WIDTH else 1))
    console.print()
    for name, question in floors.questions.items():
        left = ", ".join(f"{count:,} {reason}" for reason, count in question.left_out.items())
        if left:
            console.print(f"{name}: left out: {left}")
        for own in question.floors:
            if own.floor is None and len(entries) > 1:
                which = name if own.answer is None else f"{name}, {own.answer}"
                console.print(f"{which}: no floor is proven; {_missing(own)}")
    if proven:
        console.print(
            f"Answers at or above a floor are right at a rate of {floors.accuracy:g} or more, with 95 % confidence: "
            f"{path}"
        )
        console.print(f"next: prefill score ... --review-below {path} names the questions of each row to review")
    elif any(own.needed for own in entries):
        console.print("next: let people look at more rows, drawn at random: prefill score ... --sample N")
    else:
        console.print("next: ask for a lower --accuracy, or make the answers better: another model or question")


def no_floor(floors: FloorFile) -> str:
    """Return the sentence that says that no floor is proven, and what is missing."""
    entries = [own for question in floors.questions.values() for own in question.floors]
    rows = sum(own.rows for own in entries)
    needed = [own.needed for own in entries if own.needed is not None]
    missing = "the answers are not right often enough at any probability"
    if needed:
        missing = f"at the rate of errors seen, about {min(needed):,} labelled rows would prove one"
    return (
        f"No floor is proven for an accuracy of {floors.accuracy:g}: of {counted(rows, 'labelled row')} "
        f"{sum(own.right for own in entries):,} are answered right, and {missing}."
    )


def _missing(own: AnswerFloor) -> str:
    if own.needed is not None:
        return f"at the rate of errors seen, about {own.needed:,} labelled rows would prove one"
    return f"answers are not right often enough at any probability: {own.right:,} of {own.rows:,}"


def floors_job(settings: CalibrateSettings) -> dict[str, Any]:
    """Find the floors, report on stderr, and write the file; return the summary for the last line on stdout.

    Errors are reported on stderr, and become the exit code in the summary.
    """
    ending, floors = Ended(), None
    with shell(ending, debug=settings.run.debug) as stop, stop.at_once():
        require_json(settings.fit.output)
        require_apart(settings)
        floors = _floors(settings)
        try:
            write_sealed(settings.fit.output, floors.model_dump_json())
        except OSError as error:
            raise ResourceError(f"{settings.fit.output}: cannot write: {error.strerror or error}") from None
        ending.status, ending.exit_code = "complete", 0
        if all(own.floor is None for question in floors.questions.values() for own in question.floors):
            ending.exit_code, ending.error = NOT_AS_EXPECTED, no_floor(floors)
            if settings.run.quiet:
                log.error(ending.error)
        if not floors.job:
            log.warning(
                "the scores do not name the job that made them, so prefill score cannot check that the floors are "
                "for its model and prompt"
            )
        if not settings.run.quiet:
            print_floors(floors, without_secrets(settings.fit.output))
    line: dict[str, Any] = {"status": ending.status, "exit_code": ending.exit_code}
    if floors is not None and ending.status == "complete":
        found = floors.model_dump(include={"accuracy", "confidence", "questions"})
        line |= {"output": settings.fit.output, **found}
    return line | ({"error": ending.error} if ending.error else {})

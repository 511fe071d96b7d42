"""`prefill calibrate --accuracy`: rows with answers and right answers become floors of probability."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from prefillcli.errors import NOT_AS_EXPECTED, counted, without_secrets
from prefillcli.judging.review import AnswerFloor, FloorFile, QuestionFloors, Value
from prefillcli.judging.truth import JudgedAnswers, LabelledOutput
from prefillcli.options.commands import CalibrateSettings
from prefillcli.report.section import WIDTH, numbers_table, stderr_console
from prefillcli.rows.output.store import write_sealed
from prefillcli.runtime import log
from prefillcli.scoring.path_table import require_apart, require_json
from prefillcli.scoring.shell import Ended, shell
from prefillcli.stats.acceptance import lowest_floor, lowest_floors


def _floors(settings: CalibrateSettings) -> FloorFile:
    # The floors of all questions whose right answers are named. Raises UsageError.
    output, found = LabelledOutput.open(settings.labelled), {}
    for name, right in output.truth.answers.items():
        rows = output.read(name, exact=True)
        found[name] = QuestionFloors(
            truth=right.truth,
            floors=_floors_of(rows, settings),
            left_out=dict(rows.left_out),
            mistakes=rows.mistakes,
        )
    return FloorFile(
        accuracy=settings.fit.accuracy or 0.0,
        questions=found,
        unknown_ids=output.truth.unknown_ids,
        scores=without_secrets(settings.labelled.scores),
        job={} if output.job is None else output.job.fingerprint,
    )


def _floors_of(rows: JudgedAnswers, settings: CalibrateSettings) -> tuple[AnswerFloor, ...]:
    accuracy, own = settings.fit.accuracy or 0.0, rows.plan.own
    probabilities, answers = rows.probabilities.max(axis=1), rows.probabilities.argmax(axis=1)
    right = answers == rows.truth
    if not settings.fit.per_answer:
        return (AnswerFloor.of(None, lowest_floor(probabilities, right, accuracy), right),)
    values: Sequence[Value] = (True, False) if own.type == "predicate" else own.labels
    found = lowest_floors(probabilities, right, answers, len(values), accuracy)
    return tuple(AnswerFloor.of(values[at], found[at], right[answers == at]) for at in np.unique(answers).tolist())


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
        write_sealed(settings.fit.output, floors.model_dump_json())
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

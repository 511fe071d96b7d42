"""`prefill calibrate --prior`: what a model prefers whatever a row says, taken out without right answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from prefillcli.errors import UsageError, counted, without_secrets
from prefillcli.judging.calibration import (
    Calibration,
    CalibrationSet,
    FittedOn,
    HeldOut,
    Method,
    fit_prior,
    methods_for,
)
from prefillcli.judging.truth import AnsweredRows, JudgedAnswers, LabelledOutput
from prefillcli.options.commands import CalibrateSettings
from prefillcli.report.section import WIDTH, numbers_table, stderr_console
from prefillcli.rows.output import ANSWER
from prefillcli.rows.output.answers import AnswerColumns
from prefillcli.rows.output.store import write_sealed
from prefillcli.runtime import log
from prefillcli.scoring.path_table import require_apart, require_json
from prefillcli.scoring.shell import Ended, shell
from prefillcli.stats.labels import log_shares_of
from prefillcli.tools.calibrate import LEAST_ROWS, in_orders, measured, methods_table, require_whole, warn_of_copy

_METHOD: Method = "batch"


def _priors(settings: CalibrateSettings) -> list[Calibration]:
    # The prior of each question in the rows of an output. A question with too few answers is left out, unless there is
    # no other one. Raises UsageError.
    output, found, few = LabelledOutput.open(settings.labelled), list[Calibration](), list[str]()
    path = settings.labelled.scores
    require_whole(output, list(output.asked))
    for name, own in output.asked.items():
        if in_orders(output, own) and own.temperature != 1:
            raise UsageError(
                f"{path}: the question {name} was asked in several orders with --temperature, and a prior is of the "
                "answers without it\nscore without --temperature"
            )
        rows = output.answered(name)
        if (count := len(rows.logs)) >= LEAST_ROWS:
            found.append(_prior(settings, output, name, rows))
            continue
        others = ", ".join(f"{number:,} {reason}" for reason, number in rows.left_out.items())
        few.append(f"{counted(count, 'row')} with an answer{_to(own)}" + (f" ({others})" if others else ""))
    if not found:
        raise UsageError(f"{path}: {'; '.join(few)}\na prior is of at least {LEAST_ROWS} rows: score more of them")
    for text in few:
        log.warning(f"{path}: {text}, and a prior is of at least {LEAST_ROWS}: this question is left out")
    if output.job is None:
        warn_of_copy()
    return found


def _prior(settings: CalibrateSettings, output: LabelledOutput, name: str, rows: AnsweredRows) -> Calibration:
    own = rows.own
    judged = output.read(name, exact=False) if name in output.truth.answers else None
    held_out = {} if judged is None else _measured(settings, output, judged)
    log_shares = log_shares_of(rows.logs)
    answered = np.bincount(log_shares.argmax(axis=1), minlength=len(own.labels)).tolist()
    fitted = FittedOn(
        scores=without_secrets(settings.labelled.scores),
        truth=None if judged is None else judged.plan.truth,
        rows=len(log_shares),
        rows_by_label=dict(zip(own.labels, answered, strict=True)),
        left_out=dict(rows.left_out),
        mistakes=None if judged is None else judged.mistakes,
        unknown_ids=output.truth.unknown_ids,
        job={} if output.job is None else output.job.fingerprint,
    )
    _warn(f"{own.name}: " if own.name else "", fitted, held_out)
    return Calibration(
        labels=own.labels,
        question=own.name,
        scaling=fit_prior(log_shares),
        fitted_on=fitted,
        held_out=held_out,
        folds=settings.fit.folds if held_out else None,
        seed=settings.fit.seed if held_out else None,
    )


def _measured(settings: CalibrateSettings, output: LabelledOutput, rows: JudgedAnswers) -> dict[str, HeldOut]:
    # What taking the prior out does on held-out rows, beside the methods that these right answers suffice for.
    own, least = rows.plan.own, max(LEAST_ROWS, settings.fit.folds)
    if (count := len(rows.truth)) < least:
        raise UsageError(
            f"{settings.labelled.scores}: {counted(count, 'row')} with an answer{_to(own)} and a right one; at least "
            f"{least} are needed\ngive more right answers, or none: a prior needs none"
        )
    enough = np.bincount(rows.truth, minlength=len(own.labels)).min() >= least and not in_orders(output, own)
    return measured(settings, rows, [*(methods_for(len(own.labels)) if enough else ()), _METHOD])


def _to(own: AnswerColumns) -> str:
    return own.name and f" to {own.name}"


def _warn(question: str, fitted: FittedOn, held_out: dict[str, HeldOut]) -> None:
    # Warn on stderr where taking the prior out makes answers worse, or will if the model is right about a common one.
    common, count = max(fitted.rows_by_label.items(), key=lambda each: each[1])
    # Half way from as many rows of each answer to one answer in all rows.
    if count / fitted.rows > (1 + 1 / len(fitted.rows_by_label)) / 2:
        log.warning(
            f"{question}the model answers {common} in {count / fitted.rows:.0%} of rows; if {common} really is that "
            "common, taking the prior out makes answers worse"
            + ("" if held_out else "\nmeasure it on rows with right answers: --truth COLUMN")
        )
    if not held_out:
        return
    before, after, worse = held_out["none"], held_out[_METHOD], []
    if after.accuracy < before.accuracy:
        worse.append(f"accuracy falls from {before.accuracy:.4f} to {after.accuracy:.4f}")
    if after.log_loss > before.log_loss:
        worse.append(f"the log loss rises from {before.log_loss:.4f} to {after.log_loss:.4f}")
    if worse:
        log.warning(f"{question}taking the prior out hurts: on {after.rows:,} held-out rows {' and '.join(worse)}")


def print_priors(calibrations: Sequence[Calibration], path: str) -> None:
    """Print the prior of each answer, what taking it out does to rows with right answers, and how to use the file."""
    console = stderr_console(WIDTH)
    gap = 2 if console.width >= WIDTH else 1
    rows, left = [["question", "answer", "prior", "answered"]], []
    for each, fitted in _with_rows(calibrations):
        for label, share in (each.prior or {}).items():
            answered = f"{fitted.rows_by_label[label] / fitted.rows:.1%}"
            rows.append([each.question or ANSWER, label, f"{share:.4f}", answered])
        others = "".join(f"; left out: {count:,} {reason}" for reason, count in fitted.left_out.items())
        left.append(f"{each.question or ANSWER}: {counted(fitted.rows, 'row')}{others}")
    console.print(numbers_table(rows, words=(0, 1), gap=gap))
    console.print()
    console.print("\n".join(left))
    for each in calibrations:
        if (held := each.held_out.get(_METHOD)) is not None:
            console.print(f"\n{each.question or ANSWER}: {each.folds} folds of {held.rows:,} rows with right answers")
            console.print(methods_table(each, gap=gap))
    columns = ", ".join(f"{each.question}.calibrated" if each.question else "probability" for each in calibrations)
    console.print(f"\nnext: prefill score ... --calibration {path} adds {columns}")


def _with_rows(calibrations: Sequence[Calibration]) -> list[tuple[Calibration, FittedOn]]:
    return [(each, each.fitted_on) for each in calibrations if each.fitted_on is not None]


def priors_job(settings: CalibrateSettings) -> dict[str, Any]:
    """Take the means, report on stderr, and write the file; return the summary for the last line on stdout.

    Errors are reported on stderr, and become the exit code in the summary.
    """
    ending, made = Ended(), list[Calibration]()
    with shell(ending, debug=settings.run.debug) as stop, stop.at_once():
        require_json(settings.fit.output)
        require_apart(settings)
        made = _priors(settings)
        content = made[0] if len(made) == 1 else CalibrationSet(calibrations=tuple(made))
        write_sealed(settings.fit.output, content.model_dump_json())
        ending.status, ending.exit_code = "complete", 0
        if not settings.run.quiet:
            print_priors(made, without_secrets(settings.fit.output))
    line: dict[str, Any] = {"status": ending.status, "exit_code": ending.exit_code}
    if ending.status == "complete":
        found = {each.question or ANSWER: _summary(each, fitted) for each, fitted in _with_rows(made)}
        line |= {"output": settings.fit.output, "method": _METHOD, "questions": found}
    return line | ({"error": ending.error} if ending.error else {})


def _summary(calibration: Calibration, fitted: FittedOn) -> dict[str, Any]:
    held = calibration.held_out
    beside = {"before": held["none"].model_dump(), "after": held[_METHOD].model_dump()} if held else {}
    return {"rows": fitted.rows, "prior": calibration.prior, **beside}

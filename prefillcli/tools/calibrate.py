"""`prefill calibrate`: rows with scores and right answers become a calibration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table

from prefillcli.errors import UsageError, counted, without_secrets
from prefillcli.judging.calibration import (
    Calibration,
    FittedOn,
    HeldOut,
    Method,
    PlattScaling,
    best_method,
    cross_validate,
    fit_scaling,
    methods_for,
)
from prefillcli.judging.truth import JudgedAnswers, LabelledOutput
from prefillcli.options.commands import CalibrateSettings
from prefillcli.options.judging import LabelledOptions
from prefillcli.report.section import WIDTH, numbers_table, stderr_console
from prefillcli.rows.input.source import Source
from prefillcli.rows.output.answers import AnswerColumns
from prefillcli.rows.output.store import write_sealed
from prefillcli.runtime import log
from prefillcli.scoring.path_table import require_apart, require_json
from prefillcli.scoring.shell import Ended, shell
from prefillcli.stats.labels import label_probabilities, log_shares_of

_EXIT = "exit_layer"
_BOTH_ORDERS = "order_decided"


def _read(given: LabelledOptions) -> tuple[LabelledOutput, JudgedAnswers]:
    # The answers to the only question with right answers. Raises UsageError for one that cannot be calibrated.
    found, path = LabelledOutput.open(given), given.scores
    name, *others = found.truth.answers
    if others:
        raise UsageError(
            f"{path}: there are right answers to {name}, {', '.join(others)}, and a calibration is of one question\n"
            f"name its column, like --truth {name}={found.truth.answers[name].truth}"
        )
    require_whole(found, [name])
    if in_orders(found, found.asked[name]):
        raise UsageError(
            f"{path}: the question {name} was asked in both orders, and a mean of two answers is not "
            "calibrated\nscore without swap, or take its prior out: --prior rows"
        )
    return found, found.read(name, exact=False)


def in_orders(output: LabelledOutput, own: AnswerColumns) -> bool:
    """Return whether an output has the mean of a question's answers in several orders."""
    return own.column(_BOTH_ORDERS) in output.source.available


def require_whole(output: LabelledOutput, names: Sequence[str]) -> None:
    """Raise UsageError for an output that does not tell what a later job would calibrate, of questions of these
    names."""
    path = output.given.scores
    if output.job is None and any(output.asked[name].name for name in names):
        truth = ", and the right answers with --truth-from" if output.given.judged else ""
        raise UsageError(
            f"{path}: a copy of an output does not say what its questions are\ngive the output itself{truth}"
        )
    if output.divided:
        raise UsageError(
            f"{path}: its scores are made of log-probabilities that --label-norm divides, and it has whole ones\n"
            "score without --label-norm, or calibrate without right answers: --calibrate-with"
        )
    if _EXIT in output.source.available and any(
        layer not in (None, "")
        for batch in Source.open([path], columns=[_EXIT]).batches()
        for layer in batch.columns[_EXIT]
    ):
        raise UsageError(
            "rows left early (--exit): their label log-probabilities are not known, and those of the rest alone "
            "make no calibration\nscore some rows without --exit and fit it on those: it holds with --exit too"
        )


# The results of cross-validation for each method, as a table in the terminal.


HEADER = ["held-out rows", "log loss", "+-", "Brier", "ECE", "accuracy", "AUC"]


_SHOWN = {"none": "scores as is", "batch": "prior taken out"}


def methods_table(calibration: Calibration, *, gap: int) -> Table:
    """Return the methods side by side, with a star at the chosen one."""
    rows = [HEADER]
    for method, held in calibration.held_out.items():
        numbers = [held.log_loss, held.log_loss_spread, held.brier, held.ece, held.accuracy]
        name = _SHOWN.get(method, method) + (" *" if method == calibration.scaling.method else "")
        rows.append([name, *(f"{number:.4f}" for number in numbers), "" if held.auc is None else f"{held.auc:.3f}"])
    return numbers_table(rows, gap=gap)


def print_calibration(calibration: Calibration, path: str) -> None:
    """Print the methods side by side, and the chosen one."""
    console = stderr_console(WIDTH)
    chosen, fitted = calibration.scaling.method, calibration.fitted_on
    console.print(methods_table(calibration, gap=2 if console.width >= WIDTH else 1))
    console.print()
    if fitted is not None:
        counts = ", ".join(f"{count:,} {label}" for label, count in fitted.rows_by_label.items())
        left = "".join(f"; left out: {count:,} {reason}" for reason, count in fitted.left_out.items())
        console.print(f"{counted(fitted.rows, 'row')} ({counts}){left}")
    console.print(
        f"* {chosen} is fitted on all of them: {path}\n"
        f"+- is the standard deviation over the {calibration.folds} folds. ECE: expected calibration error."
    )
    console.print(f"next: prefill score ... --calibration {path} adds the column probability")


LEAST_ROWS = 10  # rows of each label that a calibration takes at least


def calibrate_job(settings: CalibrateSettings) -> dict[str, Any]:
    """Fit, report on stderr, and write the file; return the summary for the last line on stdout.

    Errors are reported on stderr, and become the exit code in the summary.
    """
    ending, calibration = Ended(), None
    with shell(ending, debug=settings.run.debug) as stop, stop.at_once():
        require_json(settings.fit.output)
        require_apart(settings)
        calibration = _fitted(settings, *_read(settings.labelled))
        write_sealed(settings.fit.output, calibration.model_dump_json())
        ending.status, ending.exit_code = "complete", 0
        if not settings.run.quiet:
            print_calibration(calibration, without_secrets(settings.fit.output))
    return _summary(ending, calibration, settings)


def _fitted(settings: CalibrateSettings, output: LabelledOutput, rows: JudgedAnswers) -> Calibration:
    # The calibration of these rows. Raises UsageError if there are too few of them, or the method does not suit them.
    labels, truth = rows.plan.own.labels, rows.truth
    able = methods_for(len(labels))
    if settings.fit.method not in ("auto", *able):
        raise UsageError(
            f"--method {settings.fit.method} is for two labels, and there are {len(labels)}: {', '.join(labels)}\n"
            f"give --method {' or '.join(able)}"
        )
    counts = np.bincount(truth, minlength=len(labels))
    least = max(LEAST_ROWS, settings.fit.folds)
    for label, count in zip(labels, counts.tolist(), strict=True):
        if count < least:
            others = ", ".join(f"{count:,} {reason}" for reason, count in rows.left_out.items())
            left_out = f" ({others})" if others else ""
            raise UsageError(
                f"{settings.labelled.scores}: {label} is the right answer of {count} rows{left_out}; at least "
                f"{least} rows of each label are needed\ngive more rows with right answers"
            )
    held_out = measured(settings, rows, able)
    method = best_method(held_out) if settings.fit.method == "auto" else settings.fit.method
    calibration = Calibration(
        labels=labels,
        question=rows.plan.own.name,
        scaling=fit_scaling(method, log_shares_of(rows.logs), truth),
        fitted_on=FittedOn(
            scores=without_secrets(settings.labelled.scores),
            truth=rows.plan.truth,
            rows=len(truth),
            rows_by_label=dict(zip(labels, counts.tolist(), strict=True)),
            left_out=dict(rows.left_out),
            mistakes=rows.mistakes,
            unknown_ids=output.truth.unknown_ids,
            job={} if output.job is None else output.job.fingerprint,
        ),
        held_out=held_out,
        folds=settings.fit.folds,
        seed=settings.fit.seed,
    )
    _warn(calibration)
    return calibration


def measured(settings: CalibrateSettings, rows: JudgedAnswers, methods: Sequence[Method]) -> dict[str, HeldOut]:
    """Return the findings of cross-validation of these methods, and of the scores as they are: with two labels those
    of the output, any --temperature included; with more labels without it."""
    labels, folds, seed = rows.plan.own.labels, settings.fit.folds, settings.fit.seed
    before = rows.probabilities if len(labels) == 2 else label_probabilities(rows.logs)
    return cross_validate(
        log_shares_of(rows.logs), rows.truth, before, labels, methods=methods, folds=folds, seed=seed
    )


def _warn(calibration: Calibration) -> None:
    # Warn on stderr where a calibration is of little use.
    found, method = calibration.held_out, calibration.scaling.method
    if isinstance(calibration.scaling, PlattScaling) and calibration.scaling.slope == 0:
        log.warning("higher scores do not mean more rows of the label: every row gets the same probability")
    elif found[method].log_loss >= found["none"].log_loss:
        log.warning(
            f"on held-out rows the scores as they are have a log loss of "
            f"{found['none'].log_loss:.4f}, calibrated {found[method].log_loss:.4f}: calibrating brings nothing here"
        )
    if calibration.fitted_on is not None and not calibration.fitted_on.job:
        warn_of_copy()


def warn_of_copy() -> None:
    """Warn on stderr that scores do not name their job."""
    log.warning(
        "the scores do not name the job that made them, so prefill score cannot check that the "
        "calibration is for its model and prompt"
    )


def _summary(ending: Ended, calibration: Calibration | None, settings: CalibrateSettings) -> dict[str, Any]:
    line: dict[str, Any] = {"status": ending.status, "exit_code": ending.exit_code}
    if calibration is not None and calibration.fitted_on is not None and ending.status == "complete":
        method = calibration.scaling.method
        before, after = calibration.held_out["none"], calibration.held_out[method]
        line |= {
            "output": settings.fit.output,
            "method": method,
            "rows": calibration.fitted_on.rows,
            "labels": list(calibration.labels),
            "before": before.model_dump(),
            "after": after.model_dump(),
        }
    return line | ({"error": ending.error} if ending.error else {})

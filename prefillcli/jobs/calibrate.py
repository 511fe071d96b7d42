"""`prefill calibrate`: rows with scores and right answers become a calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from prefillcli.data.output.store import put_text
from prefillcli.data.proof.seals import sealed_text
from prefillcli.errors import ResourceError, UsageError
from prefillcli.jobs.labelled_scores import LabelledScores, read_labelled_scores
from prefillcli.jobs.path_table import require_apart
from prefillcli.jobs.paths import require_json
from prefillcli.jobs.shell import shell
from prefillcli.options.calibrate import CalibrateSettings
from prefillcli.redaction import without_secrets
from prefillcli.report.calibration_table import print_calibration
from prefillcli.runtime import log
from prefillcli.runtime.extras import require_extra
from prefillcli.stats.calibration import Calibration, FittedOn, PlattScaling, log_shares_of

LEAST_ROWS = 10
"""Of each label, that a calibration can be fitted on."""


@dataclass
class _Ending:
    status: Literal["complete", "failed", "interrupted"] = "failed"
    exit_code: int = 1
    error: str | None = None
    calibration: Calibration | None = None


def calibrate_job(settings: CalibrateSettings) -> dict[str, Any]:
    """Fit, tell on stderr, and write the file; return the summary for the last line on stdout.

    Errors are told on stderr, and become the exit code in the summary.
    """
    ending = _Ending()
    with shell(ending, debug=settings.debug) as stop, stop.at_once():
        require_json(settings.output)
        require_apart(settings)
        require_extra("eval", "prefill calibrate")
        calibration = ending.calibration = _fitted(settings, read_labelled_scores(settings))
        try:
            put_text(settings.output, sealed_text(calibration.model_dump_json()))
        except OSError as error:
            raise ResourceError(f"{settings.output}: cannot write: {error.strerror or error}") from None
        ending.status, ending.exit_code = "complete", 0
        if not settings.quiet:
            print_calibration(calibration, without_secrets(settings.output))
    return _summary(ending, settings)


def _fitted(settings: CalibrateSettings, rows: LabelledScores) -> Calibration:
    """The calibration of these rows. Raises UsageError if there are too few of them, or the method is not for them."""
    from prefillcli.stats.calibration_fits import best_method, cross_validate, fit_scaling, methods_for

    labels, truth = rows.labels, rows.truth
    able = methods_for(len(labels))
    if settings.method not in ("auto", *able):
        raise UsageError(
            f"--method {settings.method} is for two labels, and there are {len(labels)}: {', '.join(labels)}\n"
            f"give --method {' or '.join(able)}"
        )
    counts = np.bincount(truth, minlength=len(labels))
    least = max(LEAST_ROWS, settings.folds)
    for label, count in zip(labels, counts.tolist(), strict=True):
        if count < least:
            raise UsageError(
                f"{settings.scores}: {label} is the right answer of {count} rows{_said(rows.left_out)}; at least "
                f"{least} rows of each label are needed\ngive more rows with right answers"
            )
    log_shares = log_shares_of(rows.logprobs)
    held_out = cross_validate(log_shares, truth, rows.before, labels, folds=settings.folds, seed=settings.seed)
    method = best_method(held_out) if settings.method == "auto" else settings.method
    calibration = Calibration(
        labels=labels,
        scaling=fit_scaling(method, log_shares, truth),
        fitted_on=FittedOn(
            scores=without_secrets(settings.scores),
            truth=settings.truth or "",
            rows=len(truth),
            rows_by_label=dict(zip(labels, counts.tolist(), strict=True)),
            left_out=rows.left_out,
            job=rows.job,
        ),
        held_out=held_out,
        folds=settings.folds,
        seed=settings.seed,
    )
    _warn(calibration)
    return calibration


def _warn(calibration: Calibration) -> None:
    """Say on stderr where a calibration is of little use."""
    found, method = calibration.held_out, calibration.scaling.method
    if isinstance(calibration.scaling, PlattScaling) and calibration.scaling.slope == 0:
        log.warning("higher scores do not mean more rows of the label: every row gets the same probability")
    elif found[method].log_loss >= found["none"].log_loss:
        log.warning(
            f"on held-out rows the scores as they are have a log loss of "
            f"{found['none'].log_loss:.4f}, calibrated {found[method].log_loss:.4f}: calibrating brings nothing here"
        )
    if calibration.fitted_on is not None and not calibration.fitted_on.job:
        log.warning(
            "the scores do not say which job made them, so prefill score cannot check that the "
            "calibration is for its model and prompt"
        )


def _said(left_out: dict[str, int]) -> str:
    """What else became of rows, for a message."""
    return f" ({', '.join(f'{count:,} {reason}' for reason, count in left_out.items())})" if left_out else ""


def _summary(ending: _Ending, settings: CalibrateSettings) -> dict[str, Any]:
    line: dict[str, Any] = {"status": ending.status, "exit_code": ending.exit_code}
    calibration = ending.calibration
    if calibration is not None and calibration.fitted_on is not None and ending.status == "complete":
        method = calibration.scaling.method
        before, after = calibration.held_out["none"], calibration.held_out[method]
        line |= {
            "output": settings.output,
            "method": method,
            "rows": calibration.fitted_on.rows,
            "labels": list(calibration.labels),
            "before": before.model_dump(),
            "after": after.model_dump(),
        }
    return line | ({"error": ending.error} if ending.error else {})

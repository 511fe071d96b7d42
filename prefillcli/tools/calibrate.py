"""`prefill calibrate`: rows with scores and right answers become a calibration."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prefillcli.errors import PrefillError, ResourceError, UsageError, counted, without_secrets
from prefillcli.judging.calibration import (
    Calibration,
    FittedOn,
    PlattScaling,
    best_method,
    cross_validate,
    fit_scaling,
    methods_for,
)
from prefillcli.judging.truth import AnswerNumbers, Mistakes, RightAnswers, find_truth, tell_blank
from prefillcli.options.commands import CalibrateSettings
from prefillcli.prompts.questions import Label
from prefillcli.report.section import WIDTH, numbers_table, stderr_console
from prefillcli.rows.input.source import Source
from prefillcli.rows.output import ANSWER
from prefillcli.rows.output.answers import LOGPROB, AnswerColumns
from prefillcli.rows.output.destination import Destination, Job, Manifest
from prefillcli.rows.output.store import write_sealed
from prefillcli.runtime import log
from prefillcli.scoring.path_table import require_apart, require_json
from prefillcli.scoring.shell import Ended, shell
from prefillcli.stats.arrays import Float64Array, Int64Array
from prefillcli.stats.labels import label_probabilities, log_shares_of

# An output of `prefill score` is read with right answers beside it.


_VALUE = "value_"
_EXIT = "exit_layer"
_BOTH_ORDERS = "order_decided"
_SAME = 1e-6
_MORE_THAN_ALL = 1e-3


@dataclass(frozen=True, slots=True)
class LabelledScores:
    """Rows with a score and a right answer."""

    labels: tuple[str, ...]  # the positive one first
    question: str  # of several; empty for a job of labels
    scores: Float64Array  # as the output has them [rows]
    logprobs: Float64Array  # over the whole vocabulary [rows, labels]
    truth: Int64Array  # number of the right label [rows]
    truth_column: str  # that has the right answers
    left_out: dict[str, int]  # other rows, by reason
    job: dict[str, str]  # the fingerprint of the job that wrote the scores; empty where it is unknown
    mistakes: Mistakes | None  # right answers that are no label
    unknown_ids: Mistakes | None = None  # of --truth-from

    @property
    def before(self) -> Float64Array:
        """Uncalibrated probabilities [rows, labels]: with two labels those of the scores, any `--temperature`
        included; with more labels without it."""
        if len(self.labels) == 2:
            return np.stack([self.scores, 1 - self.scores], axis=1)
        return label_probabilities(self.logprobs)


def read_labelled_scores(settings: CalibrateSettings) -> LabelledScores:
    """Read the rows of `settings.scores` with the right answers.

    Raises UsageError if `prefill score` did not write them or they have no right answers, and PrefillError if a file
    is damaged.
    """
    path = settings.labelled.scores
    source = Source.open([path])
    job = job_of(path)
    if job is None and settings.labelled.question:
        raise UsageError(
            f"{path}: a copy of an output does not say what its questions are\n"
            "give the output itself, and the right answers with --truth-from"
        )
    own = None if job is None else _asked(job, settings, source)
    labels = tuple(name.removeprefix(LOGPROB) for name in source.available if name.startswith(LOGPROB))
    if "score" in source.available and not labels and any(name.startswith(_VALUE) for name in source.available):
        raise UsageError(
            f"{path}: its scores are a head's values, which are not probabilities\nscore with --head probability"
        )
    if own is not None:
        labels = own.labels
    elif "score" not in source.available or len(labels) < 2:
        raise UsageError(f"{path}: not an output of prefill score: it needs the columns score and {LOGPROB}<label>")
    if job is not None and "label_norm" in job.fingerprint:
        raise UsageError(
            f"{path}: its scores are made of log-probabilities that --label-norm divides, and it has whole ones\n"
            "score without --label-norm, or calibrate without right answers: --calibrate-with"
        )
    asked = own or AnswerColumns(labels=labels)
    truth = find_truth(settings.labelled, {asked.name or ANSWER: asked}, source.available, job)
    right = truth.answers[asked.name or ANSWER]
    exits = [_EXIT] if _EXIT in source.available else []
    wanted = ["score", *(LOGPROB + label for label in labels)] if own is None else own.told
    source.select(columns=[*wanted, right.key, *exits], carried=())
    found = _collect(source, asked, wanted, right, {} if job is None else job.fingerprint)
    _require_order(path, labels, found.logprobs, found.scores)
    if len(found.truth) == 0:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in found.left_out.items()) or "it has no rows"
        seen = "" if found.mistakes is None else f"; the right answers: {found.mistakes.text}"
        raise UsageError(
            f"{path}: no row has a score and a right answer ({reasons})\nthe labels: {', '.join(labels)}{seen}"
        )
    tell_blank(settings.labelled, right, len(found.truth), int((found.before.argmax(axis=1) == found.truth).sum()))
    return replace(found, unknown_ids=truth.unknown_ids)


def _asked(job: Job, settings: CalibrateSettings, source: Source) -> AnswerColumns | None:
    # The columns of the question that the settings name, or of the only one; None for a job of labels.
    path, names = settings.labelled.scores, [each.name for each in job.answers]
    first, equals, _ = (settings.labelled.truth or "").partition("=")  # --truth tone=right_tone
    asked = settings.labelled.question or (names[0] if len(names) == 1 else first.strip() if equals else "")
    if names and asked not in names:
        raise UsageError(
            f"{path}: it has the answers to {', '.join(names)}\nname one of these questions with --question"
        )
    if not names and settings.labelled.question:
        raise UsageError(f"{path}: it has the answers to one question\nleave --question out")
    if f"{asked}.{_BOTH_ORDERS}" in source.available:
        raise UsageError(
            f"{path}: the question {asked} was asked in both orders, and a mean of two answers is not "
            "calibrated\nscore without swap"
        )
    return next((each for each in job.answers if each.name == asked), None)


def _collect(
    source: Source, own: AnswerColumns, wanted: Sequence[str], truth: RightAnswers, job: dict[str, str]
) -> LabelledScores:
    # `wanted` are the columns with the score and the log-probability of each label, or what tells those of a question.
    known = AnswerNumbers([Label(label) for label in own.labels], own.values)
    left_out: Counter[str] = Counter()
    kept: list[tuple[float, list[float], int]] = []  # score, label log-probabilities and right label of each row
    for batch in source.batches():
        if source.kind in ("csv", "tsv"):  # whose values are texts
            for name in (*wanted, _EXIT):
                batch.columns[name] = list(map(_of_text, batch.columns.get(name, ())))
        if any(layer is not None for layer in batch.columns.get(_EXIT, ())):
            raise UsageError(
                "rows left early (--exit): their label log-probabilities are not known, and those of the rest alone "
                "make no calibration\nscore some rows without --exit and fit it on those: it holds with --exit too"
            )
        columns = [batch.columns[name] for name in (*wanted, truth.key)]
        if own.name:
            shares = own.shares(columns[0])
            scores = [None if math.isnan(each) else each for each in shares[:, 0].tolist()]
            columns = [scores, *own.log_shares(shares).T.tolist(), columns[1]]
        for row, score, *logprobs, value in zip(batch.rows.tolist(), *columns, strict=True):
            numbers = [number_of(each) for each in logprobs]
            answer = truth.of_row(value)
            if row in batch.errors:
                left_out["that cannot be read"] += 1
            elif score is None:
                left_out["without a score"] += 1
            elif not 0 <= number_of(score) <= 1 or any(math.isnan(each) or each == math.inf for each in numbers):
                left_out["whose score is no probability"] += 1
            elif answer is None:
                left_out["without a right answer"] += 1
            elif (right := known.of(answer)) is None:
                left_out["whose right answer is no label"] += 1
            else:
                kept.append((number_of(score), numbers, right))
    return LabelledScores(
        labels=own.labels,
        question=own.name,
        scores=np.array([score for score, _, _ in kept], np.float64),
        logprobs=np.array([numbers for _, numbers, _ in kept], np.float64).reshape(-1, len(own.labels)),
        truth=np.array([right for _, _, right in kept], np.int64),
        truth_column=truth.truth,
        mistakes=known.mistakes(f"--truth {truth.truth}"),
        left_out=dict(left_out),
        job=job,
    )


def _of_text(text: str) -> float | str | None:
    with suppress(ValueError):
        return float(text)
    return text or None


def number_of(value: Any) -> float:
    """Return a number of a column; NaN for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def job_of(path: str) -> Job | None:
    """Return the job that wrote an output; None where that is not known."""
    with suppress(PrefillError, OSError, ValueError):
        destination = Destination.parse(path)
        if (published := destination.published()) is not None:
            return published.job
        if (manifest := Manifest.load(destination.work)) is not None:
            return manifest.job
    return None


def _require_order(path: str, labels: Sequence[str], logprobs: Float64Array, scores: Float64Array) -> None:
    # Raise UsageError unless the first label is that of the score: in a copy the columns may have another order.
    if np.any(np.exp(logprobs).sum(axis=1) > 1 + _MORE_THAN_ALL):
        raise UsageError(
            f"{path}: its labels do not exclude one another: their probabilities add up to more than 1\n"
            f"score one of them, with --labels {labels[0]}"
        )
    likeliest = logprobs.argmax(axis=1) == 0 if len(scores) else np.zeros(0, np.bool_)
    clear = np.diff(np.sort(logprobs, axis=1)[:, -2:], axis=1)[:, 0] > _SAME
    wrong = clear & (scores > 0.5 + _SAME) & ~likeliest
    if len(labels) == 2:
        wrong |= clear & (scores < 0.5 - _SAME) & likeliest
    if wrong.any():
        raise UsageError(
            f"{path}: score is not the probability of {labels[0]}, the first of the columns {LOGPROB}<label>\n"
            "give an output as prefill score wrote it, or put its columns back in their order"
        )


# The results of cross-validation for each method, as a table in the terminal.


HEADER = ["held-out rows", "log loss", "+-", "Brier", "ECE", "accuracy", "AUC"]


def print_calibration(calibration: Calibration, path: str) -> None:
    """Print the methods side by side, and the chosen one."""
    console = stderr_console(WIDTH)
    chosen, fitted = calibration.scaling.method, calibration.fitted_on
    rows = [HEADER]
    for method, held in calibration.held_out.items():
        numbers = [held.log_loss, held.log_loss_spread, held.brier, held.ece, held.accuracy]
        name = "scores as is" if method == "none" else method
        area = "" if held.auc is None else f"{held.auc:.3f}"
        rows.append([name + (" *" if method == chosen else ""), *(f"{number:.4f}" for number in numbers), area])
    console.print(numbers_table(rows, gap=2 if console.width >= WIDTH else 1))
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
        calibration = _fitted(settings, read_labelled_scores(settings))
        try:
            write_sealed(settings.fit.output, calibration.model_dump_json())
        except OSError as error:
            raise ResourceError(f"{settings.fit.output}: cannot write: {error.strerror or error}") from None
        ending.status, ending.exit_code = "complete", 0
        if not settings.run.quiet:
            print_calibration(calibration, without_secrets(settings.fit.output))
    return _summary(ending, calibration, settings)


def _fitted(settings: CalibrateSettings, rows: LabelledScores) -> Calibration:
    # The calibration of these rows. Raises UsageError if there are too few of them, or the method does not suit them.
    labels, truth = rows.labels, rows.truth
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
    log_shares = log_shares_of(rows.logprobs)
    held_out = cross_validate(log_shares, truth, rows.before, labels, folds=settings.fit.folds, seed=settings.fit.seed)
    method = best_method(held_out) if settings.fit.method == "auto" else settings.fit.method
    calibration = Calibration(
        labels=labels,
        question=rows.question,
        scaling=fit_scaling(method, log_shares, truth),
        fitted_on=FittedOn(
            scores=without_secrets(settings.labelled.scores),
            truth=rows.truth_column,
            rows=len(truth),
            rows_by_label=dict(zip(labels, counts.tolist(), strict=True)),
            left_out=rows.left_out,
            mistakes=rows.mistakes,
            unknown_ids=rows.unknown_ids,
            job=rows.job,
        ),
        held_out=held_out,
        folds=settings.fit.folds,
        seed=settings.fit.seed,
    )
    _warn(calibration)
    return calibration


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

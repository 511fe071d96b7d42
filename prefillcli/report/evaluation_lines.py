"""The evaluation of a run in a few lines, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterator

from prefillcli.report.evaluated import RunEvaluation
from prefillcli.report.numbers import counted, percent_interval
from prefillcli.report.visible import visible
from prefillcli.stats.intervals import Estimate
from prefillcli.stats.ranking import ThresholdFigures


def evaluation_lines(found: RunEvaluation) -> Iterator[tuple[str, str]]:
    """The lines that an evaluation adds to the table of a run: name and text."""
    yield "evaluation", _rows(found)
    if not found.rows:
        return
    yield "accuracy", _with_interval(found.accuracy, found.confidence, percent=True)
    area = _with_interval(found.auc, found.confidence)
    yield "AUC", f"mean over the labels {area}" if len(found.labels) > 2 and found.auc.value is not None else area
    precision = "mean average precision" if len(found.labels) > 2 else "average precision"
    if found.average_precision.value is not None:
        yield precision, _with_interval(found.average_precision, found.confidence)
    yield "Brier score", _with_interval(found.brier, found.confidence)
    yield "log loss", _with_interval(found.log_loss, found.confidence)
    yield (
        "calibration",
        f"error {_with_interval(found.calibration_error, found.confidence)}, {found.bins} bins of equal width",
    )
    if (calibrated := found.calibrated) is not None:
        error = _with_interval(calibrated.calibration_error, found.confidence)
        others = f"Brier score {calibrated.brier.value:.3f}, accuracy {100 * (calibrated.accuracy.value or 0):.1f} %"
        yield "calibrated", f"error {error}, {others}"
    if found.best_f1 is not None:
        yield "best F1", f"{found.best_f1.f1:.3f} {_at(found.best_f1)}"
    if found.wanted_precision is not None:
        wanted = found.wanted_precision
        text = f"not reached: {wanted.reason}" if wanted.reached is None else _at(wanted.reached)
        yield f"precision {wanted.wanted:g}", text
    yield from _values(found)


def _rows(found: RunEvaluation) -> str:
    text = f"{counted(found.rows, 'row')} with a right answer"
    others = [(found.without_truth, "without one"), (found.errors, "without a score")]
    return ", ".join([text, *(f"{number:,} {what}" for number, what in others if number)])


def _values(found: RunEvaluation) -> Iterator[tuple[str, str]]:
    """What the values of the column were taken for, where that is not plain to see."""
    other = [each for each in found.truth_values if each.label is None or each.value.strip('"') != each.label]
    if other:
        texts = [f"{visible(each.value, line=True)} is {_taken_for(each.label)} ({each.rows:,})" for each in other[:4]]
        yield "truth", ", ".join([*texts, *(["..."] if len(other) > len(texts) else [])])


def _taken_for(label: str | None) -> str:
    return "no label" if label is None else visible(label, line=True)


def _at(figures: ThresholdFigures) -> str:
    return (
        f"at scores from {figures.threshold:.4g}: precision {100 * figures.precision:.1f} %, "
        f"recall {100 * figures.recall:.1f} %, "
        f"{counted(figures.rows, 'row')}"
    )


def _with_interval(estimate: Estimate, confidence: float, *, percent: bool = False) -> str:
    if estimate.value is None:
        return f"none: {visible(estimate.reason or '', line=True)}"
    value = f"{100 * estimate.value:.1f} %" if percent else f"{estimate.value:.3f}"
    if estimate.interval is None:
        return value
    bounds = percent_interval(estimate.interval) if percent else "{:.3f}-{:.3f}".format(*estimate.interval)
    return f"{value} ({100 * confidence:g} % interval {bounds})"

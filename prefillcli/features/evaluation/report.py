"""The evaluation of a run, as `run.json` holds it: the figures, what the truth column holds, and rows to look at."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, Field

from prefillcli.report.section import (
    Box,
    Part,
    Plot,
    Section,
    TableRows,
    Tick,
    counted,
    percent_interval,
    row_name,
    visible,
)
from prefillcli.stats.evaluation import Estimate, Evaluation, ReliabilityBin, ThresholdFigures


class TruthValue(BaseModel):
    """A value of the truth column, and what it was taken for."""

    value: str  # as JSON; untrusted
    label: str | None  # None: for no label
    rows: int


class EvaluatedRow(BaseModel):
    """A row with a right answer. Id and text are untrusted."""

    row: int | None  # None where rows have ids
    id: str | None
    score: float
    truth: str  # a label
    prediction: str
    probability: float  # of the prediction
    text: str | None = None  # the end of what the model read, where it was asked for


class CalibratedFigures(BaseModel):
    """The figures that a calibration changes, of the calibrated probabilities."""

    accuracy: Estimate
    brier: Estimate
    log_loss: Estimate
    calibration_error: Estimate
    calibration_error_equal_mass: Estimate
    reliability: list[ReliabilityBin]

    @classmethod
    def of(cls, found: Evaluation) -> CalibratedFigures:
        """Those of an evaluation of calibrated probabilities."""
        return cls(**{name: getattr(found, name) for name in cls.model_fields})


class RunEvaluation(Evaluation):
    """An evaluation with the rows behind it."""

    truth: str  # the column
    calibrated: CalibratedFigures | None = None  # with --calibration or --calibrate-with; all else is of the scores
    truth_values: list[TruthValue] = Field(default_factory=list)  # the most frequent ones
    surest_wrong: list[EvaluatedRow] = Field(default_factory=list)  # the most probable predictions that are wrong
    near_threshold: list[EvaluatedRow] = Field(default_factory=list)  # the closest calls
    threshold: float | None = None  # to which those are near; None where there are more than two labels


# The evaluation of a run in a few lines, for the terminal and the page.


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
    # What the values of the column were taken for, where that is not plain to see.
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


# What the page of a run shows of its evaluation: charts and tables.


MOST_LABELS = 12  # labels whose confusion fits a page
_SHARES = [Tick(100 * at, f"{100 * at:g} %") for at in (0.0, 0.25, 0.5, 0.75, 1.0)]
_DIAGONAL = "0,100 100,0"


def section(found: RunEvaluation) -> Section:
    """The evaluation in terminal, page and summary."""
    labels = [
        [each.label, f"{each.rows:,}", _percent(each.precision), _percent(each.recall), _number(each.f1),
         _number(each.auc.value), _number(each.average_precision)]
        for each in found.by_label if each.rows
    ]  # fmt: skip
    header = ["label", "rows", "precision", "recall", "F1", "AUC", "average precision"]
    return Section(
        title="Evaluation",
        lines=list(evaluation_lines(found)),
        charts=list(_charts(found)),
        parts=[
            Part(title="Confusion", table=_confusion(found)),
            Part(title="Each label against the rest", table=[header, *labels] if labels else None),
            Part(title="Surest and wrong", table=_rows_table(found.surest_wrong)),
            Part(title="Near the threshold", above=_near_note(found), table=_rows_table(found.near_threshold)),
        ],
        summary={"evaluation": {"rows": found.rows, "accuracy": found.accuracy.value, "auc": found.auc.value}},
    )


def _rows_table(rows: list[EvaluatedRow]) -> TableRows | None:
    if not rows:
        return None
    table = [["row", "score", "right answer", "prediction", "probability"]]
    for row in rows:
        probability = f"{100 * row.probability:.1f} %"
        table.append([row_name(row.row, row.id), f"{row.score:.4f}", row.truth, row.prediction, probability])
        if row.text is not None:
            table.append([row.text])
    return table


def reliability_plot(bins: list[ReliabilityBin], happens: str) -> Plot | None:
    """Bars as high as the share of rows in which it `happens`, beside a diagonal; None without bins."""
    if not bins:
        return None
    boxes = [
        Box(
            x=100 * each.low,
            y=100 - max(100 * each.share, 0.8),
            width=max(100 * (each.high - each.low), 0.6) * 0.92,
            height=max(100 * each.share, 0.8),
            series=0,
            title=f"{each.low:.2f} to {each.high:.2f}: {each.rows:,} rows, said {each.mean_probability:.1%}, "
            f"{happens} {each.share:.1%}",
        )
        for each in bins
    ]
    rows = f"{sum(each.rows for each in bins):,} rows"
    return Plot(
        x=_SHARES,
        y=_SHARES,
        series=[(happens, rows), ("calibrated", "")],
        boxes=boxes,
        lines=[_DIAGONAL],
        first_line=1,
    )


def curve_plot(x: list[float], y: list[float], series: list[tuple[str, str]], beside: str) -> Plot:
    """A curve of shares, with a line beside it as SVG's points."""
    points = " ".join(f"{100 * across:.2f},{100 - 100 * up:.2f}" for across, up in zip(x, y, strict=True))
    return Plot(x=_SHARES, y=_SHARES, series=series, lines=[points, beside])


def _charts(found: RunEvaluation) -> Iterator[Part]:
    several = len(found.labels) > 2
    what = "predictions are right" if several else f"{found.labels[0]} is right" if found.labels else ""
    axes = "Across: the probability that the scores say. Up: how often it is so."
    yield Part(title="Reliability", plot=reliability_plot(found.reliability, what), note=axes)
    if found.calibrated is not None:
        plot = reliability_plot(found.calibrated.reliability, what)
        yield Part(title="Reliability, calibrated", plot=plot, note="The same of the calibrated probabilities.")
    if found.roc is None:
        return
    area = [("ROC", f"AUC {_number(found.auc.value)}"), ("chance", "")]
    plot = curve_plot(found.roc.false_positive_rate, found.roc.true_positive_rate, area, _DIAGONAL)
    note = f"Across: of the {found.labels[1]} rows those found. Up: of the {found.labels[0]} rows those found."
    yield Part(title="ROC", plot=plot, note=note)
    if found.precision_recall is not None:
        curve, height = found.precision_recall, 100 - 100 * _positives(found) / found.rows
        area = [("precision", f"average {_number(found.average_precision.value)}"), ("chance", "")]
        plot = curve_plot(curve.recall, curve.precision, area, f"0,{height:.2f} 100,{height:.2f}")
        note = (
            f"Across: recall, of the {found.labels[0]} rows those found. Up: precision, of those found the right ones."
        )
        yield Part(title="Precision and recall", plot=plot, note=note)


def _positives(found: RunEvaluation) -> float:
    # Rows whose right answer is the first label.
    if found.by_label or found.best_f1 is None:
        return found.by_label[0].rows if found.by_label else 0
    return found.best_f1.rows * found.best_f1.precision / found.best_f1.recall


def _confusion(found: RunEvaluation) -> TableRows | None:
    # None without rows, for values, and for more labels than fit.
    if not found.rows or not found.confusion or len(found.labels) > MOST_LABELS:
        return None
    header = ["right answer", *(f"predicted {label}" for label in found.labels), "rows"]
    rows = [
        [label, *(f"{count:,}" for count in counts), f"{sum(counts):,}"]
        for label, counts in zip(found.labels, found.confusion, strict=True)
    ]
    return [header, *rows]


def _near_note(found: RunEvaluation) -> str:
    if found.threshold is None:
        return "The two likeliest labels differ least."
    return f"The threshold is {found.threshold:.4g}."


def _percent(estimate: Estimate) -> str:
    return "" if estimate.value is None else f"{estimate.value:.1%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"

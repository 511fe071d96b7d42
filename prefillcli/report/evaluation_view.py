"""What the page of a run shows of its evaluation: charts and tables."""

from __future__ import annotations

from typing import Any

from prefillcli.report.charts import Box, Plot, Tick
from prefillcli.report.evaluated import RunEvaluation
from prefillcli.report.evaluation_lines import evaluation_lines
from prefillcli.stats.intervals import Estimate
from prefillcli.stats.reliability import ReliabilityBin

MOST_LABELS = 12
"""Labels whose confusion fits a page."""
_SHARES = [Tick(100 * at, f"{100 * at:g} %") for at in (0.0, 0.25, 0.5, 0.75, 1.0)]
_DIAGONAL = "0,100 100,0"


def evaluation_view(found: RunEvaluation | None) -> dict[str, Any] | None:
    """None without an evaluation."""
    if found is None:
        return None
    return {
        "lines": list(evaluation_lines(found)),
        "charts": [chart for chart in _charts(found) if chart[2] is not None],
        "confusion": _confusion(found),
        "labels": [
            (each.label, f"{each.rows:,}", _percent(each.precision), _percent(each.recall), _number(each.f1),
             _number(each.auc.value), _number(each.average_precision))
            for each in found.by_label if found.rows
        ],
        "rows": [
            ("Surest and wrong", found.surest_wrong, ""),
            ("Near the threshold", found.near_threshold, _near_note(found)),
        ],
    }  # fmt: skip


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


def _charts(found: RunEvaluation) -> list[tuple[str, str, Plot | None]]:
    """Title, what the axes are, and the chart."""
    several = len(found.labels) > 2
    what = "predictions are right" if several else f"{found.labels[0]} is right" if found.labels else ""
    charts: list[tuple[str, str, Plot | None]] = [
        (
            "Reliability",
            "Across: the probability that the scores say. Up: how often it is so.",
            reliability_plot(found.reliability, what),
        )
    ]
    if found.calibrated is not None:
        note = "The same of the calibrated probabilities."
        charts.append(("Reliability, calibrated", note, reliability_plot(found.calibrated.reliability, what)))
    if found.roc is not None:
        area = [("ROC", f"AUC {_number(found.auc.value)}"), ("chance", "")]
        points = found.roc.false_positive_rate, found.roc.true_positive_rate
        note = f"Across: of the {found.labels[1]} rows those found. Up: of the {found.labels[0]} rows those found."
        charts.append(("ROC", note, curve_plot(*points, area, _DIAGONAL)))
    if found.precision_recall is not None and found.roc is not None:
        curve, height = found.precision_recall, 100 - 100 * _positives(found) / found.rows
        area = [("precision", f"average {_number(found.average_precision.value)}"), ("chance", "")]
        flat = f"0,{height:.2f} 100,{height:.2f}"
        note = (
            f"Across: recall, of the {found.labels[0]} rows those found. Up: precision, of those found the right ones."
        )
        charts.append(("Precision and recall", note, curve_plot(curve.recall, curve.precision, area, flat)))
    return charts


def _positives(found: RunEvaluation) -> float:
    """Rows whose right answer is the first label."""
    if found.by_label or found.best_f1 is None:
        return found.by_label[0].rows if found.by_label else 0
    return found.best_f1.rows * found.best_f1.precision / found.best_f1.recall


def _confusion(found: RunEvaluation) -> list[list[str]] | None:
    """None without rows, for values, and for more labels than fit."""
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

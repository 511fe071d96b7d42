"""The evaluation in the table and on the page of a run."""

from __future__ import annotations

import re

import numpy as np
import pytest

from prefillcli.judging.evaluation import (
    MOST_LABELS,
    EvaluatedRow,
    Evaluations,
    RunEvaluation,
    TruthValue,
    evaluation_lines,
)
from prefillcli.judging.truth import Mistakes
from prefillcli.report.run import RunReport, run_html, run_lines, to_json
from prefillcli.stats.evaluation import Evaluation, evaluate, evaluate_labels
from tests.unit.report.test_run_page import HOSTILE, Page, assert_fetches_nothing


def figures(rows: int = 400) -> Evaluation:
    draws = np.random.default_rng(4)
    truth = draws.random(rows) < 0.3
    scores = 1 / (1 + np.exp(-2 * (draws.normal(size=rows) + truth - 0.5)))
    return evaluate(scores, truth, ("good", "bad"), wanted_precision=0.7, without_truth=12, errors=3)


def run_of(found: Evaluation, **more: object) -> RunReport:
    report = RunReport(status="complete", exit_code=0, output="out.parquet")
    report.add(Evaluations({"answer": RunEvaluation.model_validate({**dict(found), "truth": "answer", **more})}))
    return report


def row_of(text: str | None, id: str = "r1") -> EvaluatedRow:
    return EvaluatedRow(row=None, id=id, score=0.9876, truth="bad", prediction="good", probability=0.9876, text=text)


def test_the_table_has_the_figures_with_their_intervals() -> None:
    found = figures()
    lines = dict(run_lines(run_of(found)))
    assert lines["evaluation"] == "400 rows with a right answer, 12 without one, 3 without a score"
    assert f"{100 * found.accuracy.value:.1f} % (95 % interval " in lines["accuracy"]
    for name, estimate in (("AUC", found.auc), ("Brier score", found.brier), ("log loss", found.log_loss)):
        low, high = estimate.interval
        assert lines[name] == f"{estimate.value:.3f} (95 % interval {low:.3f}-{high:.3f})"
    assert f"precision {100 * found.wanted_precision.reached.precision:.1f} %" in lines["precision 0.7"]
    assert lines["best F1"].startswith(f"{found.best_f1.f1:.3f} at scores from {found.best_f1.threshold:.4g}")
    assert "truth" not in lines


def test_what_values_were_taken_for_is_told_where_it_is_not_plain() -> None:
    values = [
        TruthValue(value="1", label="good", rows=1200),
        TruthValue(value='"bad"', label="bad", rows=5),
        TruthValue(value='"\x1b[31mgodo"', label=None, rows=2),
    ]
    mistakes = Mistakes.of({"go\x1bod": 2, "x": 1}, ["good", "bad"])
    lines = dict(
        evaluation_lines(
            run_of(figures(), truth_values=values, mistakes=mistakes).findings["evaluations"].root["answer"]
        )
    )
    assert lines["truth"] == "1 is good (1,200)"
    assert lines["right answers"] == "3 rows with no label: go␛od (2 rows), nearest is good; x"


def test_the_charts_draw_the_figures() -> None:
    found = figures()
    reliability, roc, precision = (each.plot for each in run_of(found).sections()[0].charts)
    for box, each in zip(reliability.boxes, found.reliability, strict=True):
        assert box.x == pytest.approx(100 * each.low)
        assert 100 - box.y == pytest.approx(max(100 * each.share, 0.8))
        assert f"{each.rows:,} rows" in box.title
    points = [tuple(map(float, point.split(","))) for point in roc.lines[0].split()]
    assert points[0] == (0, 100)
    assert points[-1] == (100, 0)
    area = np.trapezoid([1 - up / 100 for _, up in points], [across / 100 for across, _ in points])
    assert area == pytest.approx(found.auc.value, abs=0.01)
    assert len(precision.lines[0].split()) == len(found.precision_recall.recall)
    html = run_html(run_of(found))
    for title in ("Reliability", "ROC", "Precision and recall", "Confusion", "Each label against the rest"):
        assert f"<h3>{title}</h3>" in html
    for line in (*roc.lines, *precision.lines, *reliability.lines):
        assert f'points="{line}"' in html


def test_the_page_shows_rows_without_scripts_and_hostile_text_as_text() -> None:
    hostile = figures().model_copy(update={"labels": [HOSTILE, "bad"]})
    rows = [row_of(f"first line\n{HOSTILE}", id=HOSTILE), row_of(None)]
    report = run_of(hostile, surest_wrong=rows, near_threshold=rows, threshold=0.5)
    html = run_html(report)
    assert_fetches_nothing(html)
    text = Page(html).text
    assert "first line\n<script>alert(1)</script>" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert text.count("0.9876") == 4
    assert html.count("<pre>") == 2, "only rows that have a text show one"


@pytest.mark.parametrize("labels", [3, MOST_LABELS + 1])
def test_several_labels_have_a_confusion_as_far_as_it_fits(labels: int) -> None:
    draws = np.random.default_rng(1)
    probabilities = draws.dirichlet(np.ones(labels), 200)
    names = [f"label{at}" for at in range(labels)]
    report = run_of(evaluate_labels(probabilities, draws.integers(0, labels, 200), names))
    html = run_html(report)
    assert ("<h3>Confusion</h3>" in html) == (labels <= MOST_LABELS)
    assert "<h3>ROC</h3>" not in html
    assert all(name in html for name in names)
    assert dict(run_lines(report))["AUC"].startswith("mean over the labels 0.")


def test_the_points_of_a_curve_take_one_line_of_run_json() -> None:
    lines = to_json(run_of(figures())).splitlines()
    assert len([line for line in lines if re.search(r'"(false|true)_positive_rate": \[0\.0, ', line)]) == 2

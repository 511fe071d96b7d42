"""A row's margin layer by layer: the numbers, and how they are drawn."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from rich.console import Console
from scipy.stats import entropy

from prefillcli.engines.base import Readings
from prefillcli.reading.exits.policy import ExitLayer, ExitPolicy
from prefillcli.stats.arrays import Float64Array
from prefillcli.tools.inspection import (
    MarginCurve,
    inspection_html,
    margin_curve,
    margin_notes,
    margin_plot,
    margin_rows,
    print_inspection,
)
from tests.unit.report.test_inspection import HOSTILE, example

LOGITS = np.array([[0.1, 0.3], [1.0, 0.2], [-0.5, 0.5], [2.0, -1.0], [3.0, 0.5]])  # of embedding and four layers
FINAL = np.array([-0.2, -3.1])


class FixedProbe:
    """Predicts the same, whatever it reads."""

    def __init__(self, *logits: float) -> None:
        self._logits = np.array([logits])

    def logits(self, readings: Readings) -> Float64Array:
        return self._logits


def readings_of(logits: np.ndarray) -> list[Readings]:
    hidden = np.zeros((1, 8), np.float32)
    return [Readings(hidden, after[None], before[None]) for before, after in pairwise(logits)]


def curve(policy: ExitPolicy | None = None) -> MarginCurve:
    return margin_curve(readings_of(LOGITS), FINAL, ["Yes", "No"], policy)


def test_of_two_labels_the_margin_is_the_first_over_the_second() -> None:
    found = curve()
    assert found.what == "Yes over No"
    assert [each.layers for each in found.layers] == [0, 1, 2, 3, 4, 5]
    wanted = [*(LOGITS[:, 0] - LOGITS[:, 1]), FINAL[0] - FINAL[1]]
    assert [each.margin for each in found.layers] == pytest.approx(wanted)
    assert [each.prediction for each in found.layers] == ["No", "Yes", "No", "Yes", "Yes", "Yes"]
    assert [each.changes for each in found.layers] == [False, True, True, True, False, False]
    assert found.settled == 3
    shares = np.exp([*LOGITS, FINAL])
    assert [each.entropy for each in found.layers] == pytest.approx(list(entropy(shares, axis=1, base=2)))


def test_of_more_labels_it_is_the_answer_over_the_best_other() -> None:
    logits = np.array([[1.0, 2.0, 3.0], [0.0, 5.0, 4.0], [1.0, 1.5, 2.0]])
    found = margin_curve(readings_of(logits), np.array([0.5, 2.5, 2.0]), ["a", "b", "c"])
    assert found.what == "b over the best other label"
    assert [each.margin for each in found.layers] == pytest.approx([-1.0, 1.0, -0.5, 0.5])
    assert [each.prediction for each in found.layers] == ["c", "b", "c", "b"]


def test_a_model_of_one_layer_has_its_answer_alone() -> None:
    found = margin_curve([], FINAL, ["Yes", "No"])
    assert [each.layers for each in found.layers] == [0]
    assert margin_plot(found) is None


POLICY = ExitPolicy((
    ExitLayer(1, FixedProbe(0.0, 1.0), (0.5, 1.5)),  # No is ahead, by less than it takes
    ExitLayer(2, FixedProbe(2.0, 0.5), (np.inf, 0.1)),  # Yes never leaves here
    ExitLayer(3, FixedProbe(3.0, 0.5), (2.5, 0.1)),
))  # fmt: skip


def test_exit_layers_have_what_their_probes_say_and_the_row_leaves_once() -> None:
    found = curve(POLICY)
    assert found.left == 4
    assert [each.layers for each in found.layers if each.guess] == [2, 3, 4]
    guesses = [each.guess for each in found.layers if each.guess is not None]
    assert [each.margin for each in guesses] == [-1.0, 1.5, 2.5]
    assert [(each.prediction, each.ahead) for each in guesses] == [("No", 1.0), ("Yes", 1.5), ("Yes", 2.5)]
    assert [each.threshold for each in guesses] == [1.5, np.inf, 2.5]
    assert [each.leaves for each in guesses] == [False, False, True]


def test_a_row_that_has_left_leaves_no_second_time() -> None:
    always = ExitPolicy(tuple(ExitLayer(layer, FixedProbe(1.0, 0.0), (0.0, 0.0)) for layer in (1, 2)))
    assert [each.guess.leaves for each in curve(always).layers if each.guess] == [True, False]
    assert curve(always).left == 2


def test_the_lines_say_where_the_answer_changes_and_where_the_row_would_leave() -> None:
    rows = margin_rows(curve(POLICY))
    assert rows[0] == ["after", "margin", "", "entropy", "prediction", "exit"]
    assert rows[1][:2] == ["0", "-0.200"]
    assert [row[0] for row in rows[1:] if row[4].endswith("←")] == ["1", "2", "3"]
    assert [row[5] for row in rows[3:]] == [
        "No 1.00 of 1.50", "Yes 1.50 never leaves", "Yes 2.50 of 2.50, leaves", "",
    ]  # fmt: skip
    lengths = {row[0]: (row[2].split("│")[0].count("█"), row[2].split("│")[1].count("█")) for row in rows[1:]}
    assert lengths["4"] == (0, 5), "the longest is 3"
    assert lengths["3"] == (0, 6)
    assert lengths["2"] == (2, 0)
    assert {len(row[2]) for row in rows[1:]} == {13}
    assert {len(row[2]) for row in margin_rows(curve())[1:]} == {33}
    notes = " ".join(margin_notes(curve(POLICY)))
    assert "After 3 of 5 layers the prediction is Yes for good" in notes
    assert "would leave after layer 4" in notes
    assert [len(row) for row in margin_rows(curve())] == [5] * 7


def test_the_chart_has_zero_in_the_middle() -> None:
    plot = margin_plot(curve(POLICY))
    assert plot is not None
    top = float(plot.y[-1].text)
    assert [tick.text for tick in plot.y if tick.at == 50] == ["0"]
    points = [tuple(map(float, point.split(","))) for point in plot.lines[0].split()]
    assert [(50 - up) / 50 * top for _, up in points] == pytest.approx(
        [each.margin for each in curve().layers], abs=0.01 * top
    )
    assert [across for across, _ in points] == [0, 20, 40, 60, 80, 100]
    assert len(plot.lines[1].split()) == 3
    infinite = margin_curve(readings_of(LOGITS), np.array([0.0, -np.inf]), ["Yes", "No"])
    assert margin_plot(infinite) is None
    assert margin_rows(infinite)[-1][1] == "+inf"


def test_the_terminal_and_the_page_show_it_and_hostile_labels_as_text() -> None:
    hostile = margin_curve(readings_of(LOGITS), FINAL, [HOSTILE, "No"], POLICY)
    inspection = replace(example(), margins=hostile)
    console = Console(file=io.StringIO(), width=160, force_terminal=False)
    print_inspection(inspection, console)
    text = console.file.getvalue()
    assert "Layer by layer" in text
    assert "would leave after layer 4" in text
    html = inspection_html(inspection)
    assert "<h2>Layer by layer</h2>" in html
    assert "<polyline" in html
    for shown in (text, html):
        assert not set("\x1b\u202e\u200b\x00\x9b") & set(shown)
    assert "<script" not in html
    assert "Layer by layer" not in inspection_html(example())

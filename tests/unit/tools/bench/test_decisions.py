"""`python -m benchmarks.decisions` and `benchmarks.long_options`: what answers to typed questions are worth."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from benchmarks.decisions import Judged, commonest, figures, table
from benchmarks.long_options import asked_of, readings, tables

JUDGED = [
    Judged(("w", "late"), "noul", [0.9, 0.1], 0),
    Judged(("w", "late"), "noul", [0.6, 0.4], 1),
    Judged(("w", "late"), "noul", [0.4, 0.6], 1),
    Judged(("w", "kind"), "choice", [0.2, 0.5, 0.3], 1),
    Judged(("w", "size"), "score", [0.1, 0.1, 0.8], 0),
]
SCORE = {"type": "score", "instructions": "How large?", "criteria": ["None: nothing at all.", "Some: a difference."]}


def test_figures_are_those_of_their_formulas() -> None:
    found = figures(JUDGED[:2])
    assert found["accuracy"] == 0.5
    assert found["brier"] == pytest.approx((2 * 0.1**2 + 2 * 0.6**2) / 2)
    assert found["loss"] == pytest.approx(-(math.log(0.9) + math.log(0.4)) / 2)
    assert found["error"] == pytest.approx((0.1 + 0.6) / 2)  # a bin of each answer
    assert [each.shares for each in commonest(JUDGED[:3])] == [[0, 1]] * 3


def test_the_table_has_each_type_and_the_published_figures() -> None:
    lines = list(table({"m": (JUDGED, {"asked": 100, "computed": 40, "seconds": 3.0})}))
    assert lines[2].startswith("| always the commonest answer | 0.800 | 0.667 | 1.000 | 1.000 |")
    assert [cell.split()[0] for cell in lines[3].split(" | ")[1:5]] == ["0.600", "0.667", "1.000", "0.000"]
    assert "40 of 100" in lines[3]
    assert any("published" in line for line in lines[4:])
    assert {line.count("|") for line in lines} == {10}


def test_a_scale_is_asked_by_words_letters_and_numbers_and_backwards() -> None:
    asked = {each.form: each for each in asked_of(SCORE)}
    first, second = SCORE["criteria"]
    assert asked["words"].text == f"How large?\n- {first}\n- {second}"
    assert asked["letters, backwards"].text == f"How large?\nA. {second}\nB. {first}\nAnswer with its letter."
    assert list(asked["letters, backwards"].answers) == ["B", "A"]
    assert asked["numbers, backwards"].text == f"How large?\n1. {second}\n0. {first}\nAnswer with its number."
    assert list(asked["numbers, backwards"].answers) == ["0", "1"]
    assert list(asked["names"].answers) == ["None", "Some"]


def test_readings_take_out_priors_and_lengths() -> None:
    rows = np.array([[0.6, 0.2], [0.3, 0.3]])
    empty = np.array([0.1, 0.4])
    found: dict[str, Any] = {"form": "words", "bytes": [1, 4], "logprobs": np.log([*rows, empty]).tolist()}
    read = readings(found, None)
    assert np.allclose(read["as it is"], [[0.75, 0.25], [0.5, 0.5]])
    assert np.allclose(read["without the prior of no text"][0], [0.75 / 0.2 / (0.75 / 0.2 + 0.25 / 0.8), 1 / 13])
    assert np.allclose(read["without the rows' prior"][1], [0.5 / 0.625 / (0.5 / 0.625 + 0.5 / 0.375), 0.625])
    assert np.allclose(read["per byte"][0], np.array([0.6, 0.2**0.25]) / (0.6 + 0.2**0.25))


def test_a_run_has_a_row_for_each_form_and_for_both_orders() -> None:
    answers = np.log([[0.6, 0.2], [0.3, 0.4], [0.1, 0.4]]).tolist()
    found = [
        {"question": "w.size", "type": "score", "form": form, "bytes": [1, 1], "logprobs": answers, "right": [0, 1]}
        for form in ("numbers", "numbers, backwards")
    ] + [
        {"question": "w.x", "type": "noul", "form": "Yes or No", "bytes": [3, 2], "logprobs": answers, "right": [0, 0]}
    ]
    lines = list(tables({"m": [*found, {**found[-1], "type": "choice", "form": "words"}]}))
    mass = (0.6 + 0.2 + 0.3 + 0.4 + 0.1 + 0.4) / 3
    assert f"| 2 score | numbers, both orders | 1.000 | 1.000 | 0.500 |  | 1.000 | {mass:.2f} |" in lines
    assert any(line.startswith("| 2 noul | always the commonest | 1.000 |") for line in lines)

"""`python -m benchmarks.forms`: typed questions in several forms, on a few rows of made texts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from benchmarks import forms
from benchmarks.forms import FORMS, Form, Task, Texts, figures, labels, promised, wording
from prefillcli.models.files import sample_model

ROWS = [
    {"text": f"The {thing} is {tone}.", "predicate": good, "choice": choice, "score": good}
    for choice, thing in enumerate(("fox", "dog", "sky"))
    for good, tone in enumerate(("red", "blue"))
]
TASKS = (
    Task("predicate", "Is it blue?", ("Yes", "No")),
    Task("choice", "What is it?", ("fox", "dog", "sky")),
    Task("score", "How blue is it?", ("red", "blue")),
)


class Letters:
    """A tokenizer of letters, as far as labels need one."""

    eos_token = "|"

    def __call__(self, texts: list[str], add_special_tokens: bool) -> Any:
        return type("Encoded", (), {"input_ids": [list(map(ord, text)) for text in texts]})

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


@pytest.mark.nightly
def test_all_forms_of_made_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forms, "TEXTS", {"made": lambda folder, rows: Texts(TASKS, ROWS[:rows])})
    forms.main(["sample"], None, 4, 4, ["words"], ["cued", "before"], tmp_path, tmp_path)
    found = json.loads((tmp_path / "sample-made.json").read_text())["forms"]
    asked = [(each["kind"], each["form"], each["rotation"]) for each in found]
    assert ("score", "words, told, with an end", 0) in asked
    assert [each for each in asked if each[:2] == ("choice", "words")] == [
        ("choice", "words", turn) for turn in range(4)
    ]
    assert {len(each["logprobs"]) for each in found} == {4}
    forms.main(["sample"], None, 4, 0, ["words, told, cued"], None, tmp_path, tmp_path)
    both = json.loads((tmp_path / "sample-made.json").read_text())["forms"]
    assert len(both) == len(found) + 2
    told, cued = (
        next(each["logprobs"] for each in both if (each["kind"], each["form"]) == ("choice", f"words, told{end}"))
        for end in ("", ", cued")
    )
    assert np.allclose(told, cued, atol=1e-5)  # without a chat both end in Answer:
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| words, told, cued |") for line in lines) == 2
    assert sum(line.startswith("| sample-made | words | 4 |") for line in lines) == 2  # other orders, after each run
    assert sum(line.startswith("| sample-made | choice | 4 |") for line in lines) == 2  # with a list and without


def test_wordings() -> None:
    options = ("red", "blue")
    assert wording(Form(), "Which?", options) == "Which?"
    assert wording(Form(told=True), "Which?", options) == "Which?\nAnswer red or blue."
    assert wording(Form("-"), "Which?", options) == "Which?\n- red\n- blue"
    assert wording(Form("A", True), "Which?", options) == "Which?\nA. red\nB. blue\nAnswer with its letter."


def test_labels_tell_options_apart() -> None:
    tokenizer = Letters()
    assert labels(Form("A", answers="codes"), ("red", "blue"), tokenizer, False) == ["red= A", "blue= B"]
    assert labels(Form(answers="first"), ("red", "blue"), tokenizer, True) == ["red=r", "blue=b"]
    assert labels(Form(answers="first"), ("red", "rose"), tokenizer, True) is None
    assert labels(Form(), ("red", "red wine"), tokenizer, True) == ["red=red\\|", "red wine=red wine\\|"]
    assert labels(Form(), ("red", "red wine"), tokenizer, False) == ["red= red\n", "red wine= red wine\n"]


@pytest.mark.parametrize("kind", FORMS)
def test_figures(kind: str) -> None:
    logprobs = np.log([[0.4, 0.1], [0.3, 0.2], [0.1, 0.4], [0.2, 0.3]])
    truth = [1, 1, 0, None] if kind == "predicate" else [0, 0, 1, 1]
    found = figures(kind, logprobs, truth, [1.0, 2.0, 4.0, 3.0])
    assert found["accuracy"] == 1
    assert math.isclose(found["mass"], 0.5)
    assert math.isclose(found["ranks"], 1)


def test_the_sample_model_is_asked_without_a_chat(tmp_path: Path) -> None:
    assert forms.model_of("sample", tmp_path) == (sample_model(), False)


def test_floors_that_are_found_for_resampled_rows_are_held_against_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "RESAMPLED", 200)
    draws = np.random.default_rng(3)
    probabilities = draws.uniform(0.5, 1, 400)
    right = draws.uniform(0, 1, 400) < probabilities
    accepted, broken = promised(probabilities, right, 0.9)
    assert 50 < len(accepted) <= 200
    assert 0.02 < np.mean(accepted) < 0.6
    assert broken <= 20
    assert promised(probabilities, np.zeros(400, bool), 0.9) == ([], 0)


def test_pairs_are_compared_row_by_row() -> None:
    found, before = np.array([True, True, True, False]), np.array([True, False, False, True])
    assert forms._compared(found, before) == f"0.75, 2 won, 1 lost (p = {binomtest(2, 3).pvalue:.2g})"

"""What is asked of a row is a typed question, whoever asks it."""

from __future__ import annotations

import pytest

from prefillcli.prompts.labels import parse_labels
from prefillcli.prompts.questions import Choice, Label, Predicate, Question, Score, typed


@pytest.mark.parametrize(
    ("labels", "values", "kind"),
    [
        ("Yes,No", (), Predicate),
        ("A,B,C", (), Choice),
        ("low,high", (1.0, 2.0), Score),
        ("1,2,3", (1.0, 2.0, 3.0), Score),
    ],
)
def test_answers_and_their_values_make_the_type(labels: str, values: tuple[float, ...], kind: type[Question]) -> None:
    found = typed(parse_labels(labels), values, "tone")
    assert type(found) is kind
    assert (found.names, found.values, found.name) == (tuple(labels.split(",")), values, "tone")


def test_in_the_other_prompt_the_first_two_answers_change_places() -> None:
    found = typed([Label("first"), Label("second"), Label("same")], name="better")
    assert found.exchanged.names == ("second", "first", "same")
    assert found.exchanged.exchanged == found

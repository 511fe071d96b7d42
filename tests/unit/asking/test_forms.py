"""The exact text that asks a typed question, and the words of its answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefillcli.asking.decisions import EVERY_FORM
from prefillcli.asking.forms import orders_of, text_of, with_answers
from prefillcli.errors import UsageError
from prefillcli.prompts.questions import Choice, Predicate, Score


def test_a_predicate_asks_for_yes_or_no() -> None:
    assert text_of(Predicate("Is it late?")) == "\n\nIs it late?"
    described = Predicate("Is it late?", true="after noon", false="before noon")
    assert text_of(described) == "\n\nIs it late?\nYes: after noon\nNo: before noon"
    assert with_answers(described).names == ("Yes", "No")


def test_options_are_listed_and_answered_by_their_words() -> None:
    question = Choice("What is it?", {"billing": "money", "other": None})
    assert text_of(question) == "\n\nWhat is it?\n- billing: money\n- other"
    assert text_of(question, (1, 0)) == "\n\nWhat is it?\n- other\n- billing: money"
    assert [(each.name, each.variants, each.said) for each in with_answers(question).answers] == [
        ("billing", None, None),
        ("other", None, None),
    ]
    assert text_of(Score("", ["low", "high"])) == "\n\n- low\n- high"


def test_options_of_which_one_begins_another_are_answered_by_letters() -> None:
    question = Choice("What is it?", ["late", "late again", "other"])
    assert text_of(question) == "\n\nWhat is it?\nA. late\nB. late again\nC. other\nAnswer with its letter."
    assert [each.said for each in with_answers(question).answers] == ["A", "B", "C"]
    assert [each.said for each in with_answers(question, (2, 0, 1)).answers] == ["B", "C", "A"]


def test_levels_that_are_sentences_are_answered_by_their_numbers() -> None:
    levels = ["None: everything reconciles.", "Moderate: a real difference that is worth confirming."]
    question = Score("How large is it?", levels)
    assert text_of(question, (1, 0)) == (
        f"\n\nHow large is it?\n1. {levels[1]}\n0. {levels[0]}\nAnswer with its number."
    )
    assert [each.said for each in with_answers(question, (1, 0)).answers] == ["0", "1"]
    assert [each.said for each in with_answers(Score("?", ["1 of them", "1 of them and others"])).answers] == [
        "A",
        "B",
    ]


@pytest.mark.parametrize(
    ("texts", "codes"),
    [
        (["yes", "not that I know of"], False),  # both are short
        (["yes", "not that I know of, no"], True),
        (["a tweet", "a newspaper editorial"], False),
        (["a" * 30, "b" * 30], False),
        (["a" * 31, "b" * 31], True),
        (["文" * 15, "字" * 15], False),
        (["文" * 16, "字" * 16], True),
    ],
)
def test_words_that_are_weighed_are_short_and_alike(texts: list[str], codes: bool) -> None:
    said = [each.said for each in with_answers(Choice("?", texts)).answers]
    assert said == (["A", "B"] if codes else [None, None])
    said = [each.said for each in with_answers(Score("?", texts)).answers]
    assert said == (["0", "1"] if codes else [None, None])


def test_a_text_and_a_boolean_that_look_alike_are_told_apart() -> None:
    question = with_answers(Choice("What is it?", [True, "true", False]))
    assert len(set(question.names)) == 3
    assert [each.said for each in question.answers] == ["A", "B", "C"]


@given(st.lists(st.text("ab", min_size=1), min_size=2, max_size=255, unique=True), st.integers(1, 6))
def test_no_answer_begins_another_one(options: list[str], count: int) -> None:
    question = Choice("?", options)
    for order in orders_of(question, count):
        said = [each.said or each.name for each in with_answers(question, order).answers]
        assert not any(a != b and b.startswith(a) for a in said for b in said)
        assert len(set(said)) == len(options)
        text = text_of(question, order)
        assert all(each in text for each in options)


def test_one_text_is_no_list_of_options() -> None:
    with pytest.raises(UsageError, match="one text, and a list of them is needed"):
        Choice("What is it?", "ab")


def test_the_identity_of_requests_has_questions_of_every_type_and_form() -> None:
    assert {each.type for each in EVERY_FORM} == {"predicate", "choice", "score"}
    assert {with_answers(each) is each for each in EVERY_FORM} == {True, False}, "by words and by codes"

"""How a typed question becomes a prompt: the text behind the document, and the words of the answers.

docs/decisions.md has the measurement that chose these forms.
"""

from __future__ import annotations

import string
from dataclasses import replace
from itertools import islice, product

from prefillcli.prompts.questions import Choice, Label, Option, Predicate, Question

ANSWER = "\nAnswer:"  # ends a prompt that is no chat


def text_of(question: Question) -> str:
    """Return what a prompt says behind the document to ask this question."""
    lines = ["", "", question.instructions]
    if isinstance(question, Predicate):
        told = [(name, each) for name, each in (("Yes", question.true), ("No", question.false)) if each]
        lines += [f"{name}: {each}" for name, each in told]
        return "\n".join([*lines, "Answer Yes or No."])
    what = "options" if isinstance(question, Choice) else "levels, from the lowest to the highest"
    lines.append(f"Answer with the letter of one of these {what}:")
    lettered = zip(_letters(len(question.options)), question.options, strict=True)
    return "\n".join([*lines, *(f"{letter}. {_described(each)}" for letter, each in lettered)])


def with_answers(question: Question) -> Question:
    """Return the question with the answers that its prompt asks for."""
    if isinstance(question, Predicate):
        return question
    lettered = zip(_letters(len(question.options)), question.options, strict=True)
    return replace(question, answers=tuple(Label(each.text, said=letter) for letter, each in lettered))


def _described(option: Option) -> str:
    return f"{option.text}: {option.description}" if option.description else option.text


def _letters(count: int) -> list[str]:
    # A letter for each option, or two where there are more than letters: none begins another.
    size = 1 if count <= len(string.ascii_uppercase) else 2
    return ["".join(each) for each in islice(product(string.ascii_uppercase, repeat=size), count)]

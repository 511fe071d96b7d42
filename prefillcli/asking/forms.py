"""How a typed question becomes a prompt: the text behind the document, and the words of the answers.

docs/decisions.md has the measurement that chose these forms.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise, product

from prefillcli.prompts.questions import Choice, Option, Predicate, Question

QUESTION_END = "\nAnswer:"  # ends a prompt that is no chat
Order = Sequence[int]  # numbers of a question's options, in the order in which a prompt lists them


def orders_of(question: Question, count: int) -> Sequence[Order]:
    """Return `count` orders of a question's options, or as many as there are: rotations of a choice, and a scale from
    its lowest and from its highest level. The first is the question's own."""
    numbers = range(len(question.options))
    if isinstance(question, Predicate):
        return [numbers]
    if not isinstance(question, Choice):
        return [numbers, numbers[::-1]][:count]
    count = min(count, len(numbers))
    starts = [turn * len(numbers) // count for turn in range(count)]
    return [[*numbers[start:], *numbers[:start]] for start in starts]


def text_of(question: Question, order: Order | None = None) -> str:
    """Return what a prompt says behind the document to ask this question, with its options in this order."""
    lines = ["", "", question.instructions] if question.instructions else ["", ""]
    if isinstance(question, Predicate):
        told = [(name, each) for name, each in (("Yes", question.true), ("No", question.false)) if each]
        return "\n".join([*lines, *(f"{name}: {each}" for name, each in told)])
    options = [question.options[number] for number in order or range(len(question.options))]
    if _are_words(question):
        return "\n".join([*lines, *(f"- {_described(each)}" for each in options)])
    lettered = zip(_letters(len(options)), options, strict=True)
    said = (f"{letter}. {_described(each)}" for letter, each in lettered)
    return "\n".join([*lines, *said, "Answer with its letter."])


def with_answers(question: Question, order: Order | None = None) -> Question:
    """Return the question with the answers that its prompt asks for, which lists the options in this order."""
    if isinstance(question, Predicate) or _are_words(question):
        return question
    said = dict(zip(order or range(len(question.options)), _letters(len(question.options)), strict=True))
    answers = (each._replace(said=said[number]) for number, each in enumerate(question.answers))
    return replace(question, answers=tuple(answers))


def _are_words(question: Question) -> bool:
    # Whether the model answers with the words of an option, which must not begin another one's; else with its letter.
    texts = sorted(each.text.strip() for each in question.options)
    return not any(other.startswith(one) for one, other in pairwise(texts))


def _described(option: Option) -> str:
    return f"{option.text}: {option.description}" if option.description else option.text


def _letters(count: int) -> list[str]:
    # A letter for each option, or two where there are more than letters: none begins another.
    size = 1 if count <= len(string.ascii_uppercase) else 2
    return ["".join(each) for each in islice(product(string.ascii_uppercase, repeat=size), count)]

"""How a typed question becomes a prompt: the text behind the document, and the words of the answers.

docs/decisions.md has the measurement that chose these forms.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise, product

from rich.cells import cell_len

from prefillcli.prompts.questions import Choice, Option, Predicate, Question, Score

QUESTION_END = "\nAnswer:"  # ends a prompt that is no chat
# Longer options are answered with codes. So are those of which one is so many times as long as another, unless all are
# short. Wide letters, like Chinese ones, count twice.
LONG, UNEVEN, SHORT = 30, 4, 20
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
    codes, listed = _codes(question, order), order or range(len(question.options))
    if codes is None:
        return "\n".join([*lines, *(f"- {_described(question.options[number])}" for number in listed)])
    said = (f"{codes[number]}. {_described(question.options[number])}" for number in listed)
    return "\n".join([*lines, *said, f"Answer with its {'number' if codes[0].isdigit() else 'letter'}."])


def with_answers(question: Question, order: Order | None = None) -> Question:
    """Return the question with the answers that its prompt asks for, which lists the options in this order."""
    if isinstance(question, Predicate) or (codes := _codes(question, order)) is None:
        return question
    answers = (each._replace(said=code) for each, code in zip(question.answers, codes, strict=True))
    return replace(question, answers=tuple(answers))


def _codes(question: Question, order: Order | None) -> Sequence[str] | None:
    # What the model answers for each option, by its number: the place of a level in its scale, or the letter of an
    # option in its list. None where it answers with their words.
    if not _need_codes([each.text.strip() for each in question.options]):
        return None
    count = len(question.options)
    numbered = any(each.text.strip()[0] in string.digits for each in question.options)
    if isinstance(question, Score) and count <= len(string.digits) and not numbered:
        return string.digits[:count]
    listed = dict(zip(order or range(count), _letters(count), strict=True))
    return [listed[number] for number in range(count)]


def _need_codes(texts: Sequence[str]) -> bool:
    # Whether one begins another, or they are too long or too uneven for their likelihoods to be compared.
    lengths = [cell_len(each) for each in texts]
    if max(lengths) > LONG or max(lengths) > max(SHORT, UNEVEN * min(lengths)):
        return True
    return any(other.startswith(one) for one, other in pairwise(sorted(texts)))


def _described(option: Option) -> str:
    return f"{option.text}: {option.description}" if option.description else option.text


def _letters(count: int) -> list[str]:
    # A letter for each option, or two where there are more than letters: none begins another.
    size = 1 if count <= len(string.ascii_uppercase) else 2
    return ["".join(each) for each in islice(product(string.ascii_uppercase, repeat=size), count)]

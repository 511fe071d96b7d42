"""Typed questions: what is asked of a row, whoever asks it, and the answers that it has.

Labels of the options, choices of each row, the questions of a file, targets and the bodies of requests all become
these. `prompts/labels.py` finds the tokens of each answer after a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class Label(NamedTuple):
    """An answer. `variants` are its literal spellings; None: its name, after a space where one fits."""

    name: str
    variants: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """A question with these answers, in their order. `name` tells it from others about the same row."""

    answers: tuple[Label, ...]
    name: str = ""
    values: tuple[float, ...] = ()
    """The number that each answer stands for; none unless they are levels of a scale."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its answers."""
        return tuple(answer.name for answer in self.answers)

    @property
    def exchanged(self) -> Question:
        """The same question about a prompt in which two values are exchanged: its first two answers stand for the
        places of these values."""
        first, second, *others = self.answers
        return replace(self, answers=(second, first, *others))


class Predicate(Question):
    """Whether something holds: the first of two answers says that it does."""

    __slots__ = ()


class Choice(Question):
    """Which of several answers that exclude one another; without answers, each row brings its own."""

    __slots__ = ()


class Score(Question):
    """Which level of a scale: each answer stands for a number."""

    __slots__ = ()


class Likelihood(Question):
    """How likely a text is, which each row brings."""

    __slots__ = ()


def typed(answers: Sequence[Label], values: Sequence[float] = (), name: str = "") -> Question:
    """Return the question with these answers: a score if they have values, a predicate if there are two, else a
    choice."""
    kind = Score if values else Predicate if len(answers) == 2 else Choice
    return kind(tuple(answers), name, tuple(values))

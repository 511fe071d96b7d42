"""Layouts: how a model that was trained for typed decisions is asked a question, and how its answers are read.

The model's own template makes the whole prompt of a question about a state. Each option has a code in it, the logits
of whose tokens are divided by a temperature at the prompt's end.
"""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from prefillcli.errors import UsageError
from prefillcli.plan.behind import LabelSet, Rule
from prefillcli.prompts.encoding import NotLiteral, change_texts
from prefillcli.prompts.labels import LabelError
from prefillcli.prompts.questions import Choice, Label, Option, Predicate, Question, Readout, Score
from prefillcli.stats.arrays import Int32Array

_TYPES = {"predicate": "noul", "choice": "choice", "score": "score"}
# The most options of the questions that share a temperature, and its name.
_BUCKETS = ((2, "2"), (5, "3_5"), (10, "6_10"), (math.inf, "11"))
_MOST_WHOLE = 1e15  # of numbers that are written with all their digits
_LONG_LIST = 8  # items of a list that get their places
_BLANKS = " \t\n\r"
_BAR = "\u00a6"
_SPECIAL = re.compile(r"<\|([A-Za-z0-9_]+)\|>")
# How decider asks whether a level fits, and what it asks where there are no instructions.
_FITS = "{}\nProposed answer: {}\nDoes the proposed answer fit?"
_UNASKED = "Which answer fits the context?"
_NUMBERED = re.compile(r"^\s*-?\d+\s*:\s*")  # a level with its number before it


class LayoutForm(NamedTuple):
    """What is known of a layout before its model is opened: the `type` of the model, and how some questions are asked
    in several prompts. With `levels_apart` each level of a score has a prompt of its own, which asks whether it fits.
    With `mirrored` a choice is asked in two orders, the second one backwards, and nothing else is. With `stateless` a
    request may be about nothing. A `readout` is a head of the model's own, with a row for each code."""

    type: str
    levels_apart: bool = False
    mirrored: bool = False
    stateless: bool = False
    readout: bool = False

    def asks_apart(self, question: Question) -> bool:
        """Return whether each of its options has a prompt of its own."""
        return self.levels_apart and isinstance(question, Score)

    def orders(self, question: Question) -> Sequence[Sequence[int]] | None:
        """Return the options of each of its prompts, in their order; None: as the user wants it."""
        numbers = range(len(question.options))
        if self.asks_apart(question):
            return [(number,) for number in numbers]
        if self.mirrored:
            return [numbers, numbers[::-1]] if isinstance(question, Choice) else [numbers]
        return None


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout of this `form`, whose `template` makes the whole prompt.

    The `codes`, with their tokens, stand for the options in the order in which a prompt has them. `temperatures` are
    by the type of a question, or by that and the number of its options (`choice.3_5`).

    With a `marker` the model compares the hidden state at the prompt's end with those at the tokens of this id. Each
    option has one, and the `codes` are their numbers. The template takes text alone (`as_text`).
    """

    form: LayoutForm
    template: str
    codes: Mapping[str, tuple[int, ...]]
    temperatures: Mapping[str, float]
    true_first: bool = False  # whether a predicate lists `true` before `false`
    lists_all: bool = False  # a prompt has all questions of its row
    cut: str = ""  # the text at which a prompt is cut, and each part tokenised by itself
    numbers_lists: bool = False  # long lists in a state have the places of their items
    curve: tuple[float, float, float] | None = None  # of temperatures: a + b log n, and at least the third number
    marker: int | None = None
    # The codes of predicates and scores. With them options that are letters have these as codes, and the likeliest of
    # a code's tokens counts.
    own_codes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ratings: int = 0  # how many of the codes are a scale that answers predicates, from certainly no
    codes_alone: bool = False  # no other token is an answer
    buckets: Sequence[tuple[float, str]] = _BUCKETS
    sorts_keys: bool = False  # of objects in all values
    whole_numbers: bool = False  # are written without a point, as llama.cpp does

    def to_json(self) -> list[Any]:
        """Return everything that changes a prompt or its answers."""
        heats = [*sorted(self.temperatures.items()), self.curve]
        return [*self.form, self.template, [*self.codes.items(), *self.own_codes.items()], heats]

    def asks_like(self, other: Layout) -> bool:
        """Return whether prompts and codes of another layout are the same, whatever tokens and temperatures it has."""
        one, two = (
            replace(
                each,
                codes=dict.fromkeys(each.codes, ()),
                own_codes=dict.fromkeys(each.own_codes, ()),
                temperatures={},
                curve=None,
            )
            for each in (self, other)
        )
        return one == two

    def values(
        self, question: Question, order: Sequence[int] | None = None, given: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return what the template is told of a question, its options in this order. `given` is the question as a
        request has it, whose values may be any JSON. Raises UsageError for more options than codes."""
        if self.form.asks_apart(question):
            question, order, given = self._fits(question, order or (0,), given), None, None
        own = {"instructions": question.instructions} if given is None else given
        instructions, listed = own.get("instructions") or "", list(self._listed(question, given))
        if self.marker is not None:
            instructions = as_text(instructions)
            listed = [(as_text(key), None if told is None else as_text(told)) for key, told in listed]
        described = [{"key": key, "description": told} for key, told in listed]
        options = [described[at] | {"label": code} for at, code in self._coded(question, order).items()]
        asked = {"id": question.name, "type": _TYPES[question.type], "instructions": instructions}
        asked |= {"options": options, "images": []}
        return {name: self._told(each) for name, each in asked.items()}

    def answered(self, question: Question, order: Sequence[int] | None = None) -> Question:
        """Return the question with the codes that answer it, its options in this order. Raises UsageError for one with
        more options than codes."""
        if self.form.asks_apart(question):
            return self._apart(question, order or (0,))
        heat = self._temperature(question)
        if self.ratings and isinstance(question, Predicate):
            scale = [*islice(self.codes, self.ratings)]
            said = [
                (code, tuple(token for each in codes for token in self.codes[each]))
                for code, codes in ((scale[-1], scale[::-1]), (scale[0], scale))
            ]
            rule: Rule = "rating"
        else:
            codes = self._coded(question, order)
            said = [(codes[at], self._tokens(codes[at])) for at in range(len(question.answers))]
            rule = "alone" if self.codes_alone else "best" if self.own_codes else "sum"
        answers = (
            Label(each.name, (code,), heat=heat, tokens=tokens, rule=rule)
            for each, (code, tokens) in zip(question.answers, said, strict=True)
        )
        return replace(question, answers=tuple(answers))

    def _apart(self, question: Question, order: Sequence[int]) -> Question:
        # The question where its prompt asks whether one option fits: its probability is that of yes.
        fits = self.answered(self._fits(question, order, None))
        heat = _temperature(question, self.temperatures, self.buckets) if self.curve is None else fits.answers[0].heat
        weights = tuple(float(number == order[0]) for number in range(len(question.options)))
        labels = tuple(label._replace(heat=heat) for label in fits.answers)
        return replace(question, readout=Readout(labels, (weights, (0.0,) * len(weights))))

    def _fits(self, question: Question, order: Sequence[int], given: Mapping[str, Any] | None) -> Predicate:
        # The question whether its option of this number fits, without a number before it.
        told = [text for _, text in self._listed(question, given)][order[0]]
        asked = question.instructions if given is None else given.get("instructions") or ""
        level = _NUMBERED.sub("", _as_text(told))
        return Predicate(_FITS.format(_as_text(asked or _UNASKED), level), name=question.name)

    def _coded(self, question: Question, order: Sequence[int] | None) -> dict[int, str]:
        # The code of each option by its number, in the order of the prompt. Raises UsageError.
        numbers, count = self._order(question, order), len(question.options)
        codes = self._own_codes(question, numbers) if self.own_codes else [*islice(self.codes, count)]
        if len(codes) < count:
            raise UsageError(
                f"the question {question.name!r} has {count} options, and the model's layout {len(codes)} codes"
            )
        return dict(zip(numbers, codes, strict=True))

    def _own_codes(self, question: Question, numbers: Sequence[int]) -> list[str]:
        # The codes of the options with these numbers, as far as there are some: their own, or else the next.
        if not isinstance(question, Choice):
            named = ("true", "false") if isinstance(question, Predicate) else map(str, range(len(numbers)))
            own = [each for each in named if each in self.own_codes]
            return [own[number] for number in numbers] if len(own) == len(numbers) else own
        keys = [question.options[number].text for number in numbers]
        if not all(len(key) == 1 and key in string.ascii_letters for key in keys):
            few = len(keys) <= len(string.ascii_uppercase)
            keys = [string.ascii_uppercase[at] if few else f"{at:02}" for at in range(len(keys))]
        left, found = dict.fromkeys(self.codes), dict[str, None]()
        for key in keys:
            able = (key in left or key in self.own_codes) and key not in found
            if (code := key if able else next(iter(left), None)) is None:
                break
            found[code] = None
            left.pop(code, None)
        return [*found]

    def _tokens(self, code: str) -> tuple[int, ...]:
        return self.codes.get(code) or self.own_codes[code]

    def state(self, value: Any) -> Any:
        """Return what the template is told of a state, which may be any JSON."""
        if self.marker is not None:
            return as_text(value)
        return _numbered(value) if self.numbers_lists else self._told(value)

    def _told(self, value: Any) -> Any:
        # A JSON value as the template is told it.
        if isinstance(value, dict):
            return {key: self._told(value[key]) for key in (sorted(value) if self.sorts_keys else value)}
        if isinstance(value, list):
            return [*map(self._told, value)]
        whole = self.whole_numbers and isinstance(value, float) and value.is_integer() and abs(value) < _MOST_WHOLE
        return int(value) if whole else value

    def escaped(self, value: Any) -> Any:
        """Return values of a row as the layout's form of text has them."""
        return value if self.marker is None else change_texts(value, escaped)

    def require_uncut(self, values: Any) -> None:
        """Raise NotLiteral if the values have the text at which prompts are cut."""
        if self.cut and self.cut in json.dumps(values, ensure_ascii=False, default=str):
            raise NotLiteral(f"the model's layout is cut at the character U+{ord(self.cut):04X}, which it has")

    def read_at_markers(self, tokens: Int32Array, labels: LabelSet) -> tuple[Int32Array, LabelSet]:
        """Return the tokens of a prompt up to its first marker, and the labels with the others, among which they are
        read; without a marker both as they are. Raises LabelError where options have not one marker each."""
        if self.marker is None:
            return tokens, labels
        places = np.flatnonzero(tokens == self.marker)
        if len(places) != len(labels) or places[-1] == len(tokens) - 1:
            raise LabelError(f"the prompt has {len(places)} places at which options are read, not {len(labels)}")
        pointers = tuple((places - places[0]).tolist())
        return tokens[: places[0] + 1], _pointed(labels, tokens[places[0] + 1 :].tobytes(), pointers)

    def _order(self, question: Question, order: Sequence[int] | None) -> Sequence[int]:
        # The numbers of the options in the order in which the prompt has them. A predicate has true, and then false.
        if isinstance(question, Predicate):
            return (0, 1) if self.true_first else (1, 0)
        return order or range(len(question.options))

    def _listed(self, question: Question, given: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
        # The key and the description of each option.
        criteria = None if given is None else given.get("criteria")
        if isinstance(question, Predicate):
            said = criteria or {"true": question.true, "false": question.false}
            return [(key, said.get(key)) for key in ("true", "false")]
        if isinstance(question, Choice):
            return list(criteria.items()) if criteria else [(each.text, each.description) for each in question.options]
        return [(str(at), told) for at, told in enumerate(criteria or map(_described, question.options))]

    def _temperature(self, question: Question) -> float:
        if self.curve is not None:
            level, slope, least = self.curve
            return max(least, level + slope * math.log(len(question.options)))
        return _temperature(question, self.temperatures, self.buckets)


def at_temperature(question: Question, temperatures: Mapping[str, float]) -> Question:
    """Return the question with answers whose log-probabilities are divided by the temperature of its type."""
    heat = _temperature(question, temperatures, _BUCKETS)
    return replace(question, answers=tuple(each._replace(heat=heat) for each in question.answers))


def _temperature(question: Question, temperatures: Mapping[str, float], buckets: Sequence[tuple[float, str]]) -> float:
    kind, count = _TYPES[question.type], len(question.options)
    bucket = next(name for most, name in buckets if count <= most)
    return temperatures.get(f"{kind}.{bucket}", temperatures.get(kind, 1.0))


@lru_cache(maxsize=4096)  # most prompts of a file end alike, and equal sets are to be one
def _pointed(labels: LabelSet, tokens: bytes, places: tuple[int, ...]) -> LabelSet:
    # The labels, whose spellings are the numbers of their markers, read at these places among the tokens.
    return labels.pointed(np.frombuffer(tokens, np.int32), [places[number] for (number,) in labels.single or ()])


def as_text(value: Any) -> str:
    """Return a JSON value as the text of kev's form, `escaped`."""
    return escaped(_lines(value, 0))


def escaped(text: str) -> str:
    """Return a text in which special tokens have other letters, by kev's form."""
    return _SPECIAL.sub(rf"<{_BAR}\1{_BAR}>", text)


def _lines(value: Any, depth: int) -> str:
    # A line for each value; objects and lists are further to the right than what holds them.
    pad = "  " * depth
    if isinstance(value, dict):
        holds = {key: isinstance(each, dict | list) for key, each in value.items()}
        return "\n".join(
            f"{pad}{key}:\n{_lines(each, depth + 1)}" if holds[key] else f"{pad}{key}: {_lines(each, 0)}"
            for key, each in value.items()
        )
    if isinstance(value, list):
        return "\n".join(f"{pad}- {_lines(each, depth + 1).lstrip(_BLANKS)}" for each in value)
    return "" if value is None else str(value)


def _numbered(value: Any) -> Any:
    # With the place of each item in lists that are long.
    if isinstance(value, dict):
        return {key: _numbered(each) for key, each in value.items()}
    if not isinstance(value, list) or len(value) < _LONG_LIST:
        return [_numbered(each) for each in value] if isinstance(value, list) else value
    items = map(_numbered, value)
    return [{"_index": at, **(each if isinstance(each, dict) else {"value": each})} for at, each in enumerate(items)]


class LaidOut(NamedTuple):
    """A question in a layout: the `values` that the template is told of it, beside the state."""

    layout: Layout
    values: Mapping[str, Any]


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _described(option: Option) -> str:
    return f"{option.text}: {option.description}" if option.description else option.text

"""Typed questions: what is asked of a row, whoever asks it, and the answers that it has.

Labels of the options, choices of each row, the questions of a file, targets and the bodies of requests all become
these. `prompts/labels.py` finds the tokens of each answer after a prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

from prefillcli.errors import UsageError

if TYPE_CHECKING:
    from prefillcli.plan.behind import Rule

Value = str | bool
MOST_OPTIONS = 255  # of a choice, as in the APIs that ask these questions


class Label(NamedTuple):
    """An answer. `variants` are its literal spellings; None: what is `said`, or else its name, after a space where one
    fits. In a model's own layout it is one of these `tokens`, whatever the prompt ends in: the `rule` makes one number
    of them, and the log-probability is divided by `heat`."""

    name: str
    variants: tuple[str, ...] | None = None
    said: str | None = None
    heat: float = 1.0
    tokens: tuple[int, ...] = ()
    rule: Rule = "sum"


class Readout(NamedTuple):
    """The labels that a prompt asks for, where a question's answers only follow from these: each label's probability
    goes to the answers by its `weights` [labels][answers]. Without any, the labels are the answers."""

    labels: tuple[Label, ...]
    weights: tuple[tuple[float, ...], ...] = ()


class Option(NamedTuple):
    """One of the things that an answer may say: its value, and a description for the model."""

    value: Value
    description: str | None = None

    @property
    def text(self) -> str:
        """The value as text."""
        return self.value if isinstance(self.value, str) else str(self.value).lower()


#: Options as users write them: values, with or without descriptions.
Options = Sequence[Value] | Sequence[Option] | Mapping[str, str | None] | Mapping[bool, str | None]


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a row. `instructions` say what is asked; without any, the prompt asks by itself.

    `name` tells it from others about the same row. `answers` are what the model may say, in the order of `options`;
    without any they follow from the options. With a `readout` the model says something else.
    """

    type: ClassVar[str] = ""
    instructions: str = ""
    name: str = field(default="", kw_only=True)
    answers: tuple[Label, ...] = field(default=(), kw_only=True)
    readout: Readout | None = field(default=None, kw_only=True)

    @property
    def read(self) -> Readout:
        """The labels that its prompt asks for."""
        return self.readout or Readout(self.answers)

    @property
    def options(self) -> tuple[Option, ...]:
        """What each answer stands for."""
        return tuple(Option(answer.name) for answer in self.answers)

    @property
    def values(self) -> tuple[float, ...]:
        """The number that each answer stands for; none unless they are levels of a scale."""
        return ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its answers."""
        return tuple(answer.name for answer in self.answers)

    def to_json(self) -> dict[str, Any]:
        """Return the question as a question file has it."""
        name = {"name": self.name} if self.name else {}
        return {"type": self.type, **name, "instructions": self.instructions}

    @property
    def exchanged(self) -> Question:
        """The same question about a prompt in which two values are exchanged: its first two answers stand for the
        places of these values."""
        first, second, *others = self.answers
        return replace(self, answers=(second, first, *others))


@dataclass(frozen=True, slots=True)
class Predicate(Question):
    """Asks whether something holds: yes or no. `true` and `false` describe when it does and does not.

    Raises UsageError for answers that are not two.
    """

    type: ClassVar[str] = "predicate"
    true: str | None = field(default=None, kw_only=True)
    false: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not self.answers:
            object.__setattr__(self, "answers", (Label("Yes"), Label("No")))
        elif len(self.answers) != 2:
            raise UsageError(f"a predicate has two answers, not {len(self.answers)}")

    @property
    def options(self) -> tuple[Option, ...]:
        return (Option(True, self.true), Option(False, self.false))

    def to_json(self) -> dict[str, Any]:
        told = {name: each for name, each in (("true", self.true), ("false", self.false)) if each is not None}
        return Question.to_json(self) | ({"criteria": told} if told else {})


@dataclass(frozen=True, slots=True)
class Choice(Question):
    """Asks which of several options holds; they exclude one another. They are texts or booleans, in a mapping with
    their descriptions.

    Without options each row brings its own. Raises UsageError for fewer than 2, more than 255, and two that are equal.
    """

    type: ClassVar[str] = "choice"
    choices: Options = ()

    def __post_init__(self) -> None:
        chosen = _options(self.choices) or tuple(Option(answer.name) for answer in self.answers)
        if chosen and len(chosen) < 2 and self.instructions:
            raise UsageError("a choice with one option decides nothing: give 2 or more")
        if len(chosen) > MOST_OPTIONS and self.instructions:
            raise UsageError(f"a choice has at most {MOST_OPTIONS} options, not {len(chosen)}")
        _require_distinct(chosen, "option")
        object.__setattr__(self, "choices", chosen)
        if not self.answers:
            object.__setattr__(self, "answers", _labels(chosen))

    @property
    def options(self) -> tuple[Option, ...]:
        return cast("tuple[Option, ...]", self.choices)

    def to_json(self) -> dict[str, Any]:
        return Question.to_json(self) | {"choices": [each._asdict() for each in self.options]}


@dataclass(frozen=True, slots=True)
class Score(Question):
    """Asks for a level of a scale, whose `levels` are named from the lowest to the highest, in a mapping with their
    descriptions. They stand for `numbers`. Without these a job counts them from 0, unless all of them are numbers,
    which stand for themselves: "1", "2", "3".

    Raises UsageError for fewer than 2 levels, and two that are equal.
    """

    type: ClassVar[str] = "score"
    levels: Options = ()
    numbers: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        levels = _options(self.levels) or tuple(Option(answer.name) for answer in self.answers)
        if len(levels) < 2:
            raise UsageError("a scale has 2 levels or more")
        _require_distinct(levels, "level")
        object.__setattr__(self, "levels", levels)
        object.__setattr__(self, "numbers", tuple(self.numbers) or _places(levels))
        if not self.answers:
            object.__setattr__(self, "answers", _labels(levels))

    @property
    def options(self) -> tuple[Option, ...]:
        return cast("tuple[Option, ...]", self.levels)

    @property
    def values(self) -> tuple[float, ...]:
        return self.numbers

    def to_json(self) -> dict[str, Any]:
        levels = [{"label": each.text, "description": each.description} for each in self.options]
        values = {} if self.numbers == _places(levels) else {"values": list(self.numbers)}
        return Question.to_json(self) | {"levels": levels} | values


@dataclass(frozen=True, slots=True)
class Likelihood(Question):
    """Asks how likely a text is, which each row brings."""

    type: ClassVar[str] = "likelihood"


def typed(answers: Sequence[Label], values: Sequence[float] = (), name: str = "") -> Question:
    """Return the question with these answers: a score if they have values, a predicate if there are two, else a
    choice."""
    own = tuple(answers)
    if values:
        return Score(numbers=tuple(values), name=name, answers=own)
    return Predicate(name=name, answers=own) if len(own) == 2 else Choice(name=name, answers=own)


def _places(levels: Sequence[Any]) -> tuple[float, ...]:
    # What levels stand for unless their numbers are given.
    return tuple(map(float, range(len(levels))))


def _options(given: Any) -> tuple[Option, ...]:
    # Options as users write them: values, pairs with descriptions, or a mapping.
    if isinstance(given, str):
        raise UsageError(f"options {given!r}: one text, and a list of them is needed")
    pairs: Iterable[Any] = given.items() if isinstance(given, Mapping) else given
    return tuple(Option(each) if isinstance(each, Value) else Option(*each) for each in pairs)


def _labels(options: Sequence[Option]) -> tuple[Label, ...]:
    # An answer for each option. A text has quotes beside the boolean that looks like it.
    booleans = {each.text for each in options if isinstance(each.value, bool)}
    quoted = (isinstance(each.value, str) and each.text in booleans for each in options)
    return tuple(Label(f'"{each.text}"' if alike else each.text) for each, alike in zip(options, quoted, strict=True))


def _require_distinct(options: Sequence[Option], what: str) -> None:
    seen: set[tuple[type, Value]] = set()
    for each in options:
        if not each.text.strip():
            raise UsageError(f"{what} {each.value!r}: it has no text")
        if (key := (type(each.value), each.value)) in seen:
            raise UsageError(f"the {what} {each.value!r} is given twice")
        seen.add(key)

"""The end of a chat's prompt: where the model's answer begins, and not the thoughts before it.

Many chat templates end where the model begins to think: they open a thought, leave it to the model to open one, or
begin a message without the channel that says what it holds. There the model says `<think>`, and the probability of
Yes means nothing. How a template gets to its answer is found by rendering probes with it, in the process that renders
rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Thinking = Literal["auto", "off", "on"]
DATE = "date"  # the chat option that sets the day of `strftime_now`


@dataclass(frozen=True, kw_only=True)
class ChatChoices:
    """The rendering of a chat template, and what stands after it."""

    thinking: Thinking = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)  # variables of the template, and `DATE`
    answer_prefix: str = ""  # text that opens the assistant's turn
    # Tokens that open and close a thought, for a template that says nothing of thoughts.
    thought_tokens: tuple[str, str] | None = None


AS_USUAL = ChatChoices()


@dataclass(frozen=True, kw_only=True)
class Way:
    """The changes that bring a chat template's prompts to the answer."""

    variables: Mapping[str, Any] = field(default_factory=dict)  # given to the template
    closings: Mapping[str, str] = field(default_factory=dict)  # what follows a rendered text, by what it ends in
    # Whether a prompt ends at the answer, or, where thinking is on, at thoughts, as far as the template tells.
    arrives: bool = True
    day: str | None = None  # the day that the template prints, if it prints one

    @property
    def said(self) -> str:
        """Return what was done, in one sentence; empty where the template is rendered as it is."""
        given = ", ".join(f"{name}={_shown(value)}" for name, value in self.variables.items())
        parts = [f"is given {given}"] if given else []
        parts += [f"is followed by {json.dumps(text, ensure_ascii=False)}" for text in self.closings.values()]
        return f"the model's chat template {' and '.join(parts)}" if parts else ""


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# What templates call thoughts. A tag of them closes one if it says so.
_THOUGHT = r"think|thought|reason|working_out|\bcot(?:\b|_)"
_CLOSING = re.compile(r"^[/|]*/|end|stop", re.IGNORECASE)
_TAG = re.compile(rf"(?:<([^<>\n]*(?:{_THOUGHT})[^<>\n]*)>|\[(/?THINK)\])\s*$", re.IGNORECASE)
# Ends of other forms, and what closes the first.
_OPENED = {"<|channel>thought\n": "<channel|>", "Here are my reasoning steps:\n": "\n[BEGIN FINAL RESPONSE]\n"}
_CLOSED = re.compile(r"<\|channel>thought\s*<channel\|>\s*$")
_HEADER = re.compile(r"(?:<\|[^<>|\s]+\|>\w*)*<\|[^<>|\s]+\|>")  # a message's channel or kind, as in harmony
_TAGS = re.compile(r"(?:<[^<>\s]+>\s*)+")
_CLOSED_THOUGHT = re.compile(
    rf"<[^<>\n]*(?:{_THOUGHT})[^<>\n]*>\s*(<[^<>\n]*(?:{_THOUGHT})[^<>\n]*>\s*)$", re.IGNORECASE
)


def opened_thought(text: str) -> str:
    """The end of a text that opens a thought; empty if it opens none."""
    for end in _OPENED:
        if text.endswith(end):
            return end
    found = _TAG.search(text)
    return found[0] if found and not _CLOSING.search(found[1] or found[2]) else ""


def _closes_thought(text: str) -> bool:
    found = _TAG.search(text)
    return bool(found and _CLOSING.search(found[1] or found[2])) or _CLOSED.search(text) is not None


def closing_of(opened: str) -> str:
    """Return what closes a thought of which nothing more is known than how it begins."""
    if opened in _OPENED:
        return _OPENED[opened]
    tag = opened.rstrip()
    space = opened[len(tag) :]
    if re.search("start|begin|open", tag, re.IGNORECASE):
        word = {"start": "end", "begin": "end", "open": "close"}
        tag = re.sub("start|begin|open", lambda m: _cased(word[m[0].lower()], m[0]), tag, count=1, flags=re.IGNORECASE)
    else:
        tag = f"{tag[0]}/{tag[1:]}"
    return f"{space if space == chr(10) else ''}{tag}\n\n"


def _cased(word: str, like: str) -> str:
    return word.upper() if like.isupper() else word


# Renders messages, with what begins the model's turn if it answers, and with these variables.
Render = Callable[[Any, bool, Mapping[str, Any]], str]

_ASKED, _ANSWERED, _THOUGHTS = "Zq1 asked", "Zq2 answered", "Zq3 thought"
_QUESTION = {"role": "user", "content": _ASKED}
_ANSWER = {"role": "assistant", "content": _ANSWERED}
_THOUGHTFUL = _ANSWER | dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _THOUGHTS)

_SWITCH = re.compile("think|thought|reason|effort|cot_", re.IGNORECASE)
_FIRST = ("enable_thinking", "thinking")
_NEGATIVE = re.compile(r"^(?:no|skip|disable|without|hide)_")
_OFF = ("none", "off", "no", "no_think", "nothink", "disabled", "disable", "false", "chat")
_ON = ("on", "enabled", "enable", "think", "thinking", "true")


class _Probes:
    """A template, asked how its prompts end."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self.listed = False  # whether contents must be lists

    def text(self, variables: Mapping[str, Any], *further: Mapping[str, Any], answers: bool = False) -> str | None:
        """A question and further messages, and if the model `answers` what begins its turn; None if the template
        refuses them."""
        messages: list[Mapping[str, Any]] = [_QUESTION, *further]
        if self.listed:
            messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        try:
            return self._render(messages, answers, variables)
        except MemoryError:
            raise
        except Exception:  # whatever an expression raises
            return None

    def prompt(self, variables: Mapping[str, Any]) -> str | None:
        """The prompt of a question."""
        return self.text(variables, answers=True)

    def end(self, variables: Mapping[str, Any]) -> str:
        """Return what stands after the question in its prompt."""
        return _behind(self.prompt(variables), _ASKED)

    def added(self, variables: Mapping[str, Any], end: str) -> str:
        """The part of a prompt's `end` that begins the model's turn."""
        without = _behind(self.text(variables), _ASKED)
        return end[len(without) :] if end != without and end.startswith(without) else end

    def answers_after(self, variables: Mapping[str, Any], end: str) -> str:
        """Return what the template writes between a prompt's `end` and the answer of an earlier turn."""
        text = self.text(variables, _ANSWER) or ""
        before = _behind(text.rpartition(_ANSWERED)[0], _ASKED)
        return before[len(end) :] if before.startswith(end) else ""

    def closes_with(self, variables: Mapping[str, Any], opened: str) -> str:
        """Return what the template writes between the thoughts of an earlier turn, which begin with `opened`, and its
        answer."""
        text = self.text(variables, _THOUGHTFUL) or ""
        before, found, rest = text.partition(_THOUGHTS)
        close, answered, _ = rest.partition(_ANSWERED)
        return close if found and answered and before.endswith(opened) else ""


def _behind(text: str | None, mark: str) -> str:
    return text.rpartition(mark)[2] if text is not None and mark in text else ""


def find_way(render: Render, read: Mapping[str, list[Any]], choices: ChatChoices) -> Way:
    """The way of a template to its answer, as `choices.thinking` asks.

    `read` are its variables, each with the constants that it is compared with; `render` raises what the template
    raises. A template that refuses a question gets no way.
    """
    probes = _Probes(render)
    if probes.prompt({}) is None:
        probes.listed = True
    plain = probes.prompt({})
    if plain is None:
        return Way()
    switches = {name: read[name] for name in read if _SWITCH.search(name) and name not in choices.options}
    switches = dict(sorted(switches.items(), key=lambda item: (item[0] not in _FIRST, item[0] != _FIRST[0])))
    if choices.thinking == "on":
        return Way(variables=_switched_on(probes, switches, plain))
    variables = _switched_off(probes, switches)
    way = _to_answer(probes, variables)
    if choices.thinking == "auto" or way != Way() or _closes_thought(plain) or _switched_on(probes, switches, plain):
        return way
    end = probes.end({})
    if choices.thought_tokens is None or not end:
        return Way(arrives=False)
    return Way(closings={probes.added({}, end): "\n\n".join([*choices.thought_tokens, ""])})


def _to_answer(probes: _Probes, variables: Mapping[str, Any]) -> Way:
    # The way with these variables: by what a template writes before the answer of an earlier turn, if it does.
    end = probes.end(variables)
    if not end:  # nothing begins the model's turn
        return Way(variables=variables)
    more = probes.answers_after(variables, end)
    opened = opened_thought(end)
    closings: dict[str, str] = {}
    if opened:
        known = _closes_thought(opened + more)
        closings = {opened: more if known else probes.closes_with(variables, opened) or closing_of(opened)}
    elif _closes_thought(end):
        closings = _behind_thought(probes, variables, end, more)
    elif _HEADER.fullmatch(more) or (not variables and _closes_thought(more)):
        closings = {probes.added(variables, end): more}
    return Way(variables=variables, closings=closings)


def _behind_thought(probes: _Probes, variables: Mapping[str, Any], end: str, more: str) -> dict[str, str]:
    # The tags between a closed thought and the answer, by what closes the thought; `more` stands after it in an
    # earlier turn. Such turns may have no thought.
    closed = _CLOSED_THOUGHT.search(end)
    if closed is None:
        return {}
    tags = more or probes.answers_after(variables, end[: closed.start()])
    return {closed[1]: tags} if _TAGS.fullmatch(tags) and not re.search(_THOUGHT, tags, re.IGNORECASE) else {}


def _switched_off(probes: _Probes, switches: Mapping[str, list[Any]]) -> dict[str, Any]:
    # The variable that ends thinking, if there is one: it changes the end of the prompt, and no thought is open there.
    plain = probes.end({})
    found: dict[str, Any] = {}
    for name, constants in switches.items():
        for value in _values(name, constants, on=False):
            end = probes.end({name: value})
            if end and end != plain and not opened_thought(end):
                if _closes_thought(end):
                    return {name: value}
                found = found or {name: value}
    return found


def _switched_on(probes: _Probes, switches: Mapping[str, list[Any]], plain: str) -> dict[str, Any]:
    # The variable that begins thinking where the `plain` prompt does not; where it may, the prompt changes.
    found: dict[str, Any] = {}
    if opened_thought(plain):
        return found
    for name, constants in switches.items():
        for value in _values(name, constants, on=True):
            text = probes.prompt({name: value})
            if text is not None and text != plain:
                if opened_thought(text):
                    return {name: value}
                found = found or {name: value}
    return found


def _values(name: str, constants: list[Any], *, on: bool) -> list[Any]:
    # The values that may turn thinking on or off.
    words = _ON if on else _OFF
    named: list[Any] = [value for value in constants if isinstance(value, str) and value.lower() in words]
    if "budget" in name or "effort" in name:
        return named if on else [*named, 0 if "budget" in name else "none"]
    return [*dict.fromkeys(named), on is not bool(_NEGATIVE.search(name))]

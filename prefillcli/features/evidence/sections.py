"""The sections of a row's prompt, and the prompt without each of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from prefillcli.data.prompts.builder import PromptBuilder
from prefillcli.data.prompts.labels import Labels
from prefillcli.data.rows import Prompt, RowBatch

MOST_SECTIONS = 32
"""Sections of a prompt. Of more, neighbours are joined."""

_PARAGRAPHS = re.compile(r"\n(?:[^\S\n]*\n)+")
_LINES = re.compile(r"\n")

Values = Mapping[str, Any]
T = TypeVar("T")


class Section(NamedTuple):
    """A section by its name, and the row's values without it."""

    name: str
    rest: dict[str, Any]


class _Passage(NamedTuple):
    """Characters of a text from `start` to before `stop`, by name."""

    name: str
    start: int
    stop: int


def variable_sections(values: Values) -> list[Section]:
    """The variables of a template that the row fills.

    Left out, a variable is an empty text, or an empty list if it is a list. Where only one is filled, the paragraphs
    of its text are sections too.
    """
    filled = [name for name, value in values.items() if not _is_empty(value)]
    found = []
    if len(filled) == 1 and isinstance(text := values[filled[0]], str):
        name = filled[0]
        found = [_without(values, name, text, each, f"{name}, ") for each in _passages(text, MOST_SECTIONS - 1, True)]
    for group in _groups(filled, MOST_SECTIONS - len(found)):
        empty = {name: [] if isinstance(values[name], list | tuple | np.ndarray) else "" for name in group}
        found.append(Section(", ".join(group), {**values, **empty}))
    return found


def prompt_sections(values: Values, column: str, *, open_end: bool) -> list[Section]:
    """The sections of the prompt in a column: turns of a chat, paragraphs of a text; token ids have none.

    With an `open_end` the answer does not begin behind the text itself, so that its last line may be left out too.
    """
    value = values[column]
    if isinstance(value, str):
        return [_without(values, column, value, each) for each in _passages(value, MOST_SECTIONS, open_end)]
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        return _turns(values, column, value)
    return []


def _turns(values: Values, column: str, messages: Sequence[dict[str, Any]]) -> list[Section]:
    """Each message of a chat, and each paragraph of the last one, which is what the model answers."""
    found = []
    last, said = messages[-1], len(messages) - 1
    if isinstance(text := last.get("content"), str):
        for each in _passages(text, MOST_SECTIONS // 2, True):
            rest = [*messages[:said], {**last, "content": _left_out(text, each)}]
            found.append(Section(f"{_turn([said], messages)}, {each.name}", {**values, column: rest}))
    for group in _groups(range(len(messages)), MOST_SECTIONS - len(found)):
        rest = [each for at, each in enumerate(messages) if at not in group]
        found.append(Section(_turn(group, messages), {**values, column: rest}))
    return found


def _turn(group: Sequence[int], messages: Sequence[dict[str, Any]]) -> str:
    name = _numbered("turn", group)
    return name if len(group) > 1 else f"{name} ({messages[group[0]].get('role')})"


def _passages(text: str, most: int, open_end: bool) -> list[_Passage]:
    """Paragraphs of a text, at most so many; where only one can be left out, its lines. Nothing is the whole text.

    Without an `open_end` the last line stays.
    """
    stop = len(text.rstrip())
    if not open_end:
        stop = text.rfind("\n", 0, stop) + 1
    paragraphs = list(_spans(text, _PARAGRAPHS, stop))
    lines = list(_spans(text, _LINES, stop)) if len(paragraphs) < 2 else []
    kind, spans = ("line", lines) if len(lines) > len(paragraphs) else ("paragraph", paragraphs)
    if open_end and len(spans) < 2:
        return []  # nothing would be left
    return [
        _Passage(_numbered(kind, group), spans[group[0]][0], spans[group[-1]][1])
        for group in _groups(range(len(spans)), most)
    ]


def _spans(text: str, breaks: re.Pattern[str], stop: int) -> Iterator[tuple[int, int]]:
    """Where the parts of a text start that are not white space alone, and where the next one does, up to `stop`."""
    ends = [match.end() for match in breaks.finditer(text)]
    starts = [start for start, end in zip([0, *ends], [*ends, len(text)], strict=True) if text[start:end].strip()]
    for start, end in pairwise([*starts, len(text)]):
        if text[start : min(end, stop)].strip():
            yield start, min(end, stop)


def _left_out(text: str, passage: _Passage) -> str:
    """A text without a passage. Without its end it has no white space before that either."""
    before, after = text[: passage.start], text[passage.stop :]
    return before.rstrip() + after if not after.strip() else before + after


def _without(values: Values, name: str, text: str, passage: _Passage, prefix: str = "") -> Section:
    return Section(prefix + passage.name, {**values, name: _left_out(text, passage)})


def _groups(parts: Sequence[T], most: int) -> list[Sequence[T]]:
    """The parts in their order, neighbours joined so that there are at most so many groups of about the same size."""
    count = min(len(parts), max(most, 1))
    return [parts[at * len(parts) // count : (at + 1) * len(parts) // count] for at in range(count)]


def _numbered(kind: str, group: Sequence[int]) -> str:
    first, last = group[0] + 1, group[-1] + 1
    return f"{kind} {first}" if first == last else f"{kind}s {first}-{last}"


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | tuple | dict | np.ndarray) and len(value) == 0)


class AblatedPrompt(NamedTuple):
    """A prompt without the section of this name."""

    section: str
    prompt: Prompt


class Ablation:
    """Leaves sections out of prompts that were made by `builder`, whose settings have `sections`.

    It makes them by a builder of its own, so that another thread may go on with that one.
    """

    def __init__(self, builder: PromptBuilder, labels: Labels) -> None:
        self._original = builder
        self._labels = labels
        self._builder: PromptBuilder | None = None

    def of(self, prompt: Prompt) -> list[AblatedPrompt]:
        """A row's prompts, each without one section, in the order of the sections.

        The end that the answer begins behind stays: what is left must end in the same token and have the same label
        tokens, unless a classification head reads it. Sections without which there is no prompt, or one that is an
        error, are left out of the list. Raises RendererClosed after `close`.
        """
        sections = self._sections(prompt)
        if not sections:
            return []
        if self._builder is None:
            self._builder = self._original.another()
        prompts, _ = self._builder.build(_batch([section.rest for section in sections]), self._labels)
        found = [AblatedPrompt(sections[each.row].name, each) for each in prompts if self._ends_alike(each, prompt)]
        for each in prompts:
            each.row = prompt.row
        return found

    def close(self) -> None:
        """Let go of the process that renders templates."""
        if self._builder is not None:
            self._builder.close()

    def _sections(self, prompt: Prompt) -> list[Section]:
        if prompt.made_of is None:
            return []
        builder = self._original
        needed = {name: prompt.made_of[name] for name in builder.columns}
        if builder.template is not None:
            found = variable_sections(needed)
        else:
            open_end = builder.chat or builder.settings.classifies
            found = prompt_sections(needed, builder.column, open_end=open_end)
        return [section._replace(rest={**prompt.made_of, **section.rest}) for section in found]

    def _ends_alike(self, ablated: Prompt, prompt: Prompt) -> bool:
        if self._original.settings.classifies:
            return True
        return bool(ablated.tokens[-1] == prompt.tokens[-1]) and ablated.labels == prompt.labels


def _batch(rows: Sequence[dict[str, Any]]) -> RowBatch:
    """Rows with these values, numbered from 0."""
    return RowBatch(
        first_row=0,
        rows=np.arange(len(rows), dtype=np.int64),
        columns={name: [row[name] for row in rows] for name in rows[0]},
        carried=pa.table({"": pa.nulls(len(rows))}).select([]),
        errors={},
        nbytes=0,
    )

"""The sections of a row's prompt: the row's score without each of them, and the part of a run's report on that."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from prefillcli.core.further import Further, WantedRow
from prefillcli.core.request import Request
from prefillcli.core.roles import FollowUp
from prefillcli.plan.pack import Limits
from prefillcli.prompts.builder import PromptBuilder
from prefillcli.report.section import Bar, Part, Section, Strip, counted, row_name, visible
from prefillcli.rows.output.columns import added
from prefillcli.rows.records import Prompt, RowBatch, ScoredRow, SectionEffect, Window
from prefillcli.stats.arrays import Float64Array
from prefillcli.stats.labels import Measure, label_scores

if TYPE_CHECKING:
    from prefillcli.core.further import RowSelection
    from prefillcli.core.inputs import Inputs
    from prefillcli.engines.base import Answer
    from prefillcli.followup.rationale import RationaleUse
    from prefillcli.prompts.labels import Labels

# The sections of a prompt, and the prompt without each of them.


MOST_SECTIONS = 32  # the most sections of a prompt; if there are more, neighbours are joined
_PARAGRAPHS = re.compile(r"\n(?:[^\S\n]*\n)+")
_LINES = re.compile(r"\n")
Values = Mapping[str, Any]
T = TypeVar("T")


class Omission(NamedTuple):
    """A section by name, and the row's values without it."""

    name: str
    rest: dict[str, Any]


class _Passage(NamedTuple):
    """Characters of a text from `start` to before `stop`, by name."""

    name: str
    start: int
    stop: int


def variable_sections(values: Values) -> list[Omission]:
    """Return the variables of a template that the row fills.

    A variable that is left out becomes an empty text, or an empty list if it is a list. If only one is filled, the
    paragraphs of its text are sections too.
    """
    filled = [name for name, value in values.items() if not _is_empty(value)]
    found = []
    if len(filled) == 1 and isinstance(text := values[filled[0]], str):
        name = filled[0]
        found = [_without(values, name, text, each, f"{name}, ") for each in _passages(text, MOST_SECTIONS - 1, True)]
    for group in _groups(filled, MOST_SECTIONS - len(found)):
        empty = {name: [] if isinstance(values[name], list | tuple | np.ndarray) else "" for name in group}
        found.append(Omission(", ".join(group), {**values, **empty}))
    return found


def prompt_sections(values: Values, column: str, *, open_end: bool) -> list[Omission]:
    """Return the sections of the prompt in a column: turns of a chat, paragraphs of a text; token ids have none.

    With an `open_end` the answer does not begin directly after the text, so its last line may be left out too.
    """
    value = values[column]
    if isinstance(value, str):
        return [_without(values, column, value, each) for each in _passages(value, MOST_SECTIONS, open_end)]
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        return _turns(values, column, value)
    return []


def _turns(values: Values, column: str, messages: Sequence[dict[str, Any]]) -> list[Omission]:
    # Each message of a chat, and each paragraph of the last message, which the model answers.
    found = []
    last, said = messages[-1], len(messages) - 1
    if isinstance(text := last.get("content"), str):
        for each in _passages(text, MOST_SECTIONS // 2, True):
            rest = [*messages[:said], {**last, "content": _left_out(text, each)}]
            found.append(Omission(f"{_turn([said], messages)}, {each.name}", {**values, column: rest}))
    for group in _groups(range(len(messages)), MOST_SECTIONS - len(found)):
        rest = [each for at, each in enumerate(messages) if at not in group]
        found.append(Omission(_turn(group, messages), {**values, column: rest}))
    return found


def _turn(group: Sequence[int], messages: Sequence[dict[str, Any]]) -> str:
    name = _numbered("turn", group)
    return name if len(group) > 1 else f"{name} ({messages[group[0]].get('role')})"


def _passages(text: str, most: int, open_end: bool) -> list[_Passage]:
    # The paragraphs of a text, at most `most`; if only one can be left out, its lines. No section is the whole text.
    # Without an `open_end` the last line stays.
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
    # The start of each part of a text that is not white space alone, and the start of the next one, up to `stop`.
    ends = [match.end() for match in breaks.finditer(text)]
    starts = [start for start, end in zip([0, *ends], [*ends, len(text)], strict=True) if text[start:end].strip()]
    for start, end in pairwise([*starts, len(text)]):
        if text[start : min(end, stop)].strip():
            yield start, min(end, stop)


def _left_out(text: str, passage: _Passage) -> str:
    # A text without a passage. If that was its end, the white space before it goes as well.
    before, after = text[: passage.start], text[passage.stop :]
    return before.rstrip() + after if not after.strip() else before + after


def _without(values: Values, name: str, text: str, passage: _Passage, prefix: str = "") -> Omission:
    return Omission(prefix + passage.name, {**values, name: _left_out(text, passage)})


def _groups(parts: Sequence[T], most: int) -> list[Sequence[T]]:
    # The parts in their order, with neighbours joined into at most `most` groups of about the same size.
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

    It has its own builder for that, so another thread may go on using the given one.
    """

    def __init__(self, builder: PromptBuilder, labels: Labels) -> None:
        self._original = builder
        self._labels = labels
        self._builders: dict[int, PromptBuilder] = {}

    def of(self, prompt: Prompt) -> list[AblatedPrompt]:
        """Return a row's prompts, each without one section, in the order of the sections.

        The end before the answer stays: the remaining prompt must end in the same token and have the same label
        tokens, unless a classification head reads it. Sections without which there is no prompt, or one that is an
        error, are left out of the list. Raises RendererClosed after `close`.
        """
        builder, labels = self._original.of_part(prompt.part, self._labels)
        sections = self._sections(prompt, builder)
        if not sections:
            return []
        if prompt.part not in self._builders:
            self._builders[prompt.part] = builder.another()
            self._builders[prompt.part].told = builder.told
        prompts, _ = self._builders[prompt.part].build(_batch([section.rest for section in sections]), labels)
        found = [AblatedPrompt(sections[each.row].name, each) for each in prompts if self._ends_alike(each, prompt)]
        for each in prompts:
            each.row = prompt.row
        return found

    def close(self) -> None:
        """End the process that renders templates."""
        for each in self._builders.values():
            each.close()

    def _sections(self, prompt: Prompt, builder: PromptBuilder) -> list[Omission]:
        if prompt.made_of is None:
            return []
        needed = {name: prompt.made_of[name] for name in builder.columns}
        if builder.template is not None:
            found = variable_sections(needed)
        else:
            found = prompt_sections(needed, builder.column, open_end=builder.chat or builder.settings.classifies)
        return [section._replace(rest={**prompt.made_of, **section.rest}) for section in found]

    def _ends_alike(self, ablated: Prompt, prompt: Prompt) -> bool:
        if self._original.settings.classifies:
            return True
        return bool(ablated.tokens[-1] == prompt.tokens[-1]) and ablated.labels == prompt.labels


def _batch(rows: Sequence[dict[str, Any]]) -> RowBatch:
    # Rows with these values, numbered from 0.
    return RowBatch(
        first_row=0,
        rows=np.arange(len(rows), dtype=np.int64),
        columns={name: [row[name] for row in rows] for name in rows[0]},
        carried=pa.table({"": pa.nulls(len(rows))}).select([]),
        errors={},
        nbytes=0,
    )


# Rows are scored again without each section of their prompts.


@dataclass(frozen=True)
class Weighing(Further):
    """Weighs the sections that `ablation` leaves out of prompts, by scores of this `temperature` and `measure`: those
    of the first label, or of the row's own choice that was predicted."""

    ablation: Ablation
    temperature: float = 1.0
    measure: Measure = Measure.SHARES
    most = MOST_SECTIONS

    def requests(self, window: Window, row: WantedRow, limits: Limits) -> Sequence[Request]:
        return [request for each in row.parts or (row,) for request in self._of(each, limits)]

    def _of(self, row: WantedRow, limits: Limits) -> Sequence[Request]:
        # The questions about one prompt.
        weighed = self.weigh(row.request, row.scored, row.label if self.measure is Measure.CHOICES else 0)
        fitting = [
            (place, request) for place, request in enumerate(weighed.requests) if request.size <= limits.max_tokens
        ]
        waiting = {place for place, _ in fitting}

        def take(place: int, answer: Answer | None) -> None:
            waiting.discard(place)
            if answer is not None:
                weighed.take(place, answer)
            if not waiting:
                row.scored.evidence = weighed.effects()

        if not fitting:
            row.scored.evidence = ()
        return [replace(request, take=partial(take, place)) for place, request in fitting]

    def weigh(self, request: Request, scored: ScoredRow, label: int = 0) -> WeighedRow:
        """Return the prompts to read for the evidence of a row that this request scored, on this label."""
        return WeighedRow(self, request.prompt, scored, label)

    def score(self, numbers: Float64Array, label: int) -> float:
        """Return the score of a label."""
        return float(label_scores(numbers, self.temperature, self.measure)[label])

    def close(self) -> None:
        self.ablation.close()


class Evidence(FollowUp):
    """The evidence of a job. Its report is that of rationales."""

    groups = added({"evidence": True})

    def further(self, inputs: Inputs, choice: RowSelection) -> Weighing:
        labels = inputs.labels
        return Weighing(Ablation(inputs.builder, labels), inputs.settings.answers.temperature, labels.measure)

    def shown(self, row: WantedRow, labels: Sequence[str]) -> Section | None:
        return None if row.scored.evidence is None else inspected(row.scored.evidence)


class WeighedRow:
    """A row, scored without each of its sections.

    Each section has one of the `requests`: the prompt without it. If the row's own answer does not come from the
    whole prompt and all layers, the last request is the whole prompt, so that like is compared with like. All are
    read in full and to the last layer. There are none if the prompt has no sections.
    """

    def __init__(self, evidence: Weighing, prompt: Prompt, scored: ScoredRow, label: int) -> None:
        self._evidence = evidence
        self._label = label
        whole = scored.audit
        if whole is None and scored.exit_layer is None and scored.kept_tokens == len(prompt.whole):
            whole = scored.logprobs
        ablated = evidence.ablation.of(prompt)
        self._sections = [each.section for each in ablated]
        self._numbers: dict[int, Float64Array] = {} if whole is None else {len(ablated): whole}
        prompts = [each.prompt for each in ablated] + ([prompt] if ablated and whole is None else [])
        self.requests = tuple(map(Request, prompts))

    def take(self, place: int, answer: Answer) -> None:
        """Take the answer to the request at this place among the `requests`."""
        self._numbers[place] = answer.logprobs

    def effects(self) -> tuple[SectionEffect, ...]:
        """Return the amount by which each section raises the score of the label, the largest change first, ties in
        their order.

        Sections without an answer, or with one that is not a finite number, are left out; if the whole prompt has
        none, all are.
        """
        scores = {place: self._evidence.score(numbers, self._label) for place, numbers in self._numbers.items()}
        whole = scores.get(len(self._sections), float("nan"))
        changes = [whole - scores.get(place, float("nan")) for place in range(len(self._sections))]
        found = [
            SectionEffect(name, change)
            for name, change in zip(self._sections, changes, strict=True)
            if np.isfinite(change)
        ]
        return tuple(sorted(found, key=lambda effect: -abs(effect.change)))


# The report of evidence.


WHAT_EVIDENCE_IS = (
    "Change: how far the score of the first label, or of the predicted choice, falls when the section is left out. "
    "Sections act together, so changes do not add up."
)


def section(use: RationaleUse) -> Section:
    """Return the section on a run's evidence."""
    found = Section(title="Evidence", summary={"rationales": {"evidence_rows": use.evidence_rows}})
    found.metric("evidence_rows", "Rows of the output whose sections were weighed.", use.evidence_rows)
    if use.evidence_rows:
        found.lines.append(("evidence", f"{counted(use.evidence_rows, 'row')} without each of their sections"))
        found.parts.append(Part(note=WHAT_EVIDENCE_IS))
    for row in use.shown:
        if row.evidence:
            title = f"{row_name(row.row, row.id)}: {row.prediction or ''}, score {row.score:.4f}"
            changes = [(each["section"], each["change"]) for each in row.evidence]
            found.parts.append(Part(title=title, bars=evidence_bars(changes)))
    return found


def inspected(effects: Sequence[SectionEffect]) -> Section:
    """Return a row's evidence in `prefill inspect`."""
    return Section(title="Evidence", parts=[Part(bars=evidence_bars(effects), note=WHAT_EVIDENCE_IS)])


def evidence_bars(effects: Sequence[tuple[str, float]]) -> list[Bar]:
    """Return a bar for each section from the middle of its track, in the order of the column: the largest change
    first."""
    longest = max((abs(change) for _, change in effects), default=0.0)
    found = []
    for name, change in effects:
        half = 50 * abs(change) / longest if longest else 0.0
        kind, start = ("alarm", 50 - half) if change < 0 else ("s0", 50.0)
        middle = Strip("middle", 50.0, 0.2)
        found.append(Bar(visible(name, line=True), half, f"{change:+.4f}", kind, start, more=(middle,)))
    return found

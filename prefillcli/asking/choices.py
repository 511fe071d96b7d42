"""Asking with answers that each row brings, a list of texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from prefillcli.core.asking import Asking
from prefillcli.errors import UsageError
from prefillcli.options.settings import JobSettings
from prefillcli.prompts.builder import PromptBuilder, prompt_builder
from prefillcli.prompts.encoding import NotLiteral
from prefillcli.prompts.labels import Following, LabelError, Labels, literal_end, prompt_ends
from prefillcli.prompts.questions import Choice, Label, Readout
from prefillcli.prompts.settings import PromptSettings, prompt_column
from prefillcli.prompts.templates import RowTemplate
from prefillcli.rows.input.selection import require_columns
from prefillcli.rows.values import brief_json
from prefillcli.stats.labels import Measure

if TYPE_CHECKING:
    from prefillcli.models.open import Opened


class ChoiceAsking(Asking):
    """The choices in a column of each row, after its prompt."""

    def __init__(self, settings: JobSettings, column: str) -> None:
        super().__init__(settings)
        self.column = column

    def columns(self, available: Sequence[str], template: RowTemplate | None) -> Sequence[str]:
        require_columns([self.column], available, "the input")
        return template.columns if template else (prompt_column(self.settings.prompts.prompt_column, available),)

    def labels(self, opened: Opened) -> Labels:
        if opened.files.head is not None:
            raise UsageError(
                "--choices-column: the model's classification head is read, which has its own classes\n"
                "read the next token with --head vocabulary"
            )
        return RowChoices(opened.tokenizer, self.settings, self.column)

    def builder(
        self,
        opened: Opened,
        labels: Labels,
        settings: PromptSettings,
        available: Sequence[str],
        template: RowTemplate | None,
    ) -> PromptBuilder:
        return prompt_builder(opened.tokenizer, settings, available, template=template)


class RowChoices(Labels):
    """The labels of each prompt: the texts in a `column` of its row. With `literal` in the settings, no part of them
    becomes a control token. Their sets are not stored: hardly two rows have the same."""

    measure = Measure.CHOICES

    def __init__(self, tokenizer: Any, settings: JobSettings, column: str) -> None:
        super().__init__(tokenizer, Choice(), norm=settings.answers.label_norm, end=settings.answers.label_end)
        self.columns = (column,)
        self._literal = settings.prompts.literal
        self._typed = not settings.prompts.literal

    def is_positive(self, answer: Any) -> None:
        """Return None: a row has no positive choice."""

    def resolve_all(
        self, tails: Sequence[str], *, literal: bool = False, values: Sequence[Sequence[Any]] = ()
    ) -> list[Following | LabelError]:
        """Return, for every tail, the tokens of its row's choices, or why there are none."""
        found: list[Following | LabelError] = [LabelError("")] * len(tails)
        asked: list[tuple[int, list[Label]]] = []
        for at, (value,) in enumerate(values):
            try:
                asked.append((at, _labels_of(value)))
            except LabelError as error:
                found[at] = error
        after = self._after([(tails[at], literal, Readout(tuple(labels))) for at, labels in asked])
        for (at, labels), own in zip(asked, after, strict=True):
            if isinstance(own, Following):
                own = own._replace(labels=own.labels.with_texts([each.name for each in labels]))
            found[at] = own
        return found

    def _after(self, asked: Sequence[tuple[str, bool, Readout]]) -> list[Following | LabelError]:
        # The tokens of labels after each tail, which may be literal.
        found: list[Following | LabelError] = [LabelError("")] * len(asked)
        able: list[tuple[int, tuple[str, bool]]] = []
        for at, (tail, literal, read) in enumerate(asked):
            texts = [each.name for each in read.labels] if self._literal else []
            try:
                able.append((at, literal_end(self._encoder.controls, tail, texts, literal=literal)))
            except NotLiteral as error:
                found[at] = LabelError(f"a choice has the text of a control token: {error}")
        ends = prompt_ends(self._encoder, [end for _, end in able])
        behind = self._behind([(end, asked[at][2]) for end, (at, _) in zip(ends, able, strict=True)])
        for (at, _), own in zip(able, behind, strict=True):
            found[at] = own
        return found


def _labels_of(value: Any) -> list[Label]:
    if isinstance(value, str):  # CSV has no lists
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, list | tuple) or not value:
        what = {type(None): "null", list: "an empty list"}.get(type(value), f"{type(value).__name__}, no list")
        if isinstance(value, str):  # perhaps as pandas writes a list to CSV
            what = f'a text that is not a list in JSON like ["a", "b"]: {brief_json(value)}'
        raise LabelError(f"the row's choices are {what}")
    places: dict[str, int] = {}
    for number, each in enumerate(value):
        if not isinstance(each, str) or not each.strip():
            what = "empty" if isinstance(each, str) else f"{type(each).__name__}, not text"
            raise LabelError(f"choice {number} is {what}")
        if places.setdefault(each, number) != number:
            raise LabelError(f"choices {places[each]} and {number} are the same: {each!r}")
    return [Label(each) for each in value]

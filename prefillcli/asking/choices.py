"""The labels that rows bring: what each choice is behind its row's prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefillcli.data.prompts.encoding import NotLiteral
from prefillcli.data.prompts.labels import Following, Label, LabelError, Labels, literal_end, prompt_ends
from prefillcli.stats.evaluation import Measure


class RowChoices(Labels):
    """The labels of each prompt: the texts in its row's `columns`. With `literal` in the settings, no part of them
    becomes a control token. Their sets are not stored: hardly two rows have the same."""

    measure = Measure.CHOICES

    def __init__(self, tokenizer: Any, settings: Any) -> None:
        super().__init__(tokenizer, (), norm=settings.label_norm, end=settings.label_end)
        self.columns = (settings.choices_column,)
        self._literal = settings.literal
        self._typed = not settings.literal

    def is_positive(self, answer: Any) -> None:
        """A row has no positive choice."""

    def resolve_all(
        self, tails: Sequence[str], *, literal: bool = False, values: Sequence[Sequence[Any]] = ()
    ) -> list[Following | LabelError]:
        """For every tail the tokens of its row's choices, or why they are none."""
        found: list[Following | LabelError] = [LabelError("")] * len(tails)
        asked: list[tuple[int, tuple[str, bool], list[Label]]] = []
        for at, (tail, (value,)) in enumerate(zip(tails, values, strict=True)):
            try:
                labels = _labels_of(value)
                texts = [each.name for each in labels] if self._literal else []
                asked.append((at, literal_end(self._encoder.controls, tail, texts, literal=literal), labels))
            except LabelError as error:
                found[at] = error
            except NotLiteral as error:
                found[at] = LabelError(f"a choice has the text of a control token: {error}")
        ends = prompt_ends(self._encoder, [end for _, end, _ in asked])
        behind = self._behind([(end, labels) for end, (_, _, labels) in zip(ends, asked, strict=True)])
        for (at, _, labels), own in zip(asked, behind, strict=True):
            if isinstance(own, Following):
                own = own._replace(labels=own.labels.with_texts([each.name for each in labels]))
            found[at] = own
        return found


def _labels_of(value: Any) -> list[Label]:
    if not isinstance(value, list | tuple) or not value:
        what = {type(None): "null", list: "an empty list"}.get(type(value), f"{type(value).__name__}, no list")
        raise LabelError(f"the row's choices are {what}")
    places: dict[str, int] = {}
    for number, each in enumerate(value):
        if not isinstance(each, str) or not each.strip():
            what = "empty" if isinstance(each, str) else f"{type(each).__name__}, not text"
            raise LabelError(f"choice {number} is {what}")
        if places.setdefault(each, number) != number:
            raise LabelError(f"choices {places[each]} and {number} are the same: {each!r}")
    return [Label(each) for each in value]

"""Prompts without one of their sections, made as the prompt of such a row would be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from prefillcli.data.prompts.builder import PromptBuilder
from prefillcli.data.prompts.labels import Labels
from prefillcli.data.prompts.sections import Section, prompt_sections, variable_sections
from prefillcli.data.rows import Prompt, RowBatch


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

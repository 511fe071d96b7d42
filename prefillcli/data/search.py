"""One row of an input, with the window it is scored in."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from prefillcli.data.output.scored_truth import id_texts
from prefillcli.data.prompts.builder import PromptBuilder
from prefillcli.data.prompts.labels import Labels
from prefillcli.data.reading.source import Source
from prefillcli.data.rows import Int64Array, Prompt, RowBatch, Window
from prefillcli.data.values import text_of, to_python
from prefillcli.data.windows import windows
from prefillcli.errors import UsageError


@dataclass(frozen=True, slots=True)
class FoundRow:
    """A row by its number, its id as text (None without an id column), and its window."""

    row: int
    id: str | None
    window: Window


def find_row(source: Source, builder: PromptBuilder, labels: Labels, *, row: str, id_column: str | None) -> FoundRow:
    """The row whose number, or with `id_column` whose id as text, is `row`; the first one if an id occurs twice.

    Only its own window is tokenised. Raises UsageError if there is no such row, PrefillError if a file is damaged.
    """
    search = _Search(source, row, id_column)
    # Of a source, windows ask for its kind and the batches only.
    found = next(windows(cast(Source, search), builder, labels, id_column=id_column, skip=search.goes_on), None)
    if found is None or search.row is None:
        where = f"the {search.rows:,} rows read" + ("" if search.last is None else f", 0 to {search.last:,}")
        if id_column is not None:
            where = f"column {id_column!r} of the {search.rows:,} rows read"
        raise UsageError(f"--row {row}: no such row in {where}")
    return FoundRow(search.row, search.id, found)


def find_prompts(
    source: Source,
    builder: PromptBuilder,
    labels: Labels,
    *,
    named: Collection[int | str | None],
    id_column: str | None,
) -> dict[int | str | None, Prompt]:
    """The prompts of the rows with these numbers, or with `id_column` with these ids as text.

    Reads the input up to the last of them, and tokenises no other row. Rows without a prompt are left out; of an id
    that occurs twice it is the first row's.
    """
    wanted, found = set(named), {}
    for batch in source.batches():
        if not wanted:
            break
        names: list[Any] = batch.rows.tolist()
        if id_column is not None:
            names = id_texts(batch.carried[id_column], json_text=source.kind == "jsonl")
        positions = [at for at, name in enumerate(names) if name in wanted]
        wanted -= {names[at] for at in positions}
        prompts, _ = builder.build(batch.only(np.array(positions, np.int64)), labels)
        by_row = {row: names[at] for at in reversed(positions) for row in [int(batch.rows[at])]}
        for prompt in reversed(prompts):
            found[by_row[prompt.row]] = prompt
    return found


class _Search:
    """The batches of a source, watched for the wanted row."""

    def __init__(self, source: Source, wanted: str, id_column: str | None) -> None:
        self.row: int | None = None
        self.id: str | None = None
        self.rows = 0
        self.last: int | None = None
        self._source = source
        self._wanted = wanted
        self._id_column = id_column
        self.kind = source.kind

    def goes_on(self, window: int, rows: Int64Array) -> bool:
        """Whether the row is in none of the batches so far, and so not in this window, which has just been read."""
        return self.row is None

    def batches(self, most_rows: int) -> Iterator[RowBatch]:
        for batch in self._source.batches(most_rows):
            if self.row is None:
                self._look(batch)
            yield batch

    def _look(self, batch: RowBatch) -> None:
        numbers = batch.rows.tolist()
        self.rows += len(numbers)
        self.last = numbers[-1] if numbers else self.last
        ids = None if self._id_column is None else [self._text(v) for v in to_python(batch.carried[self._id_column])]
        names = [str(number) for number in numbers] if ids is None else ids
        if self._wanted in names:
            at = names.index(self._wanted)
            self.row, self.id = numbers[at], None if ids is None else ids[at]

    def _text(self, value: object) -> str | None:
        """An id as a user writes it. Columns carried from JSON Lines hold JSON text."""
        if value is None:
            return None
        return text_of(str(value)) if self.kind == "jsonl" else str(value)

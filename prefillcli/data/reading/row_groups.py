"""What reading a Parquet row group takes, and which of its pages are too large to open."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from prefillcli.data.reading.footer import is_part_of
from prefillcli.data.reading.pages import Pages, read_pages
from prefillcli.data.reading.selection import BATCH_ROWS
from prefillcli.data.reading.standins import Replaced, can_stand_in
from prefillcli.data.rows import ErrorCode, RowError

MAX_BYTES = 8 << 20
_MAX_PIECE_BYTES = 256 << 20  # of what is read at a time, where values are long or stored once and repeated
_DICTIONARY_BYTES = 16 << 20  # a column chunk of more than this and its indices holds texts that differ
_INDEX_BYTES = 6


class UnopenedRows(NamedTuple):
    """Rows that are not read: from `start` up to, not including, `stop`."""

    start: int
    stop: int
    error: RowError


class _Leaf(NamedTuple):
    """A column chunk: of a column, or of a part of a nested one."""

    name: str
    column: Any
    pages: Pages
    values: int


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The needed columns of a row group, as the headers of their pages describe them."""

    rows: int
    leaves: tuple[_Leaf, ...]
    max_page: int
    """Larger pages, in bytes, are not opened."""

    @classmethod
    def survey(
        cls, file: BinaryIO, metadata: pq.FileMetaData, number: int, names: Sequence[str], max_page: int
    ) -> RowGroup:
        """Read the headers of all pages of the columns `names`, which `Footer.require` has let pass.

        Raises OSError where the pages of a column have more or fewer values than the footer says. Without `names` the
        pages of one column are looked at all the same: they say how many rows there are.
        """
        leaves = []
        schema, group = metadata.schema, metadata.row_group(number)
        columns = [schema.column(at) for at in range(group.num_columns)]
        if not names and columns:
            read_pages(file, group.column(int(np.argmin([column.max_repetition_level for column in columns]))))
        for at, column in enumerate(columns):
            for name in names:
                if is_part_of(column.path, name):
                    chunk = group.column(at)
                    leaves.append(_Leaf(name, column, read_pages(file, chunk), chunk.num_values))
        return cls(group.num_rows, tuple(leaves), max_page)

    def repeats(self, name: str) -> bool:
        """Whether a text column is stored as few texts that repeat, and so can be read as a dictionary.

        Arrow collects the dictionary over the whole row group, which for texts that differ would fill the memory.
        """
        return all(
            leaf.pages.dictionary is not None and leaf.pages.size <= _DICTIONARY_BYTES + _INDEX_BYTES * leaf.values
            for leaf in self.leaves
            if leaf.name == name
        )

    def rows_at_once(self, as_dictionary: Collection[str]) -> int:
        """How many rows to read at a time, where the columns `as_dictionary` are read as dictionaries."""
        stored = sum(leaf.pages.size for leaf in self.leaves)
        rows = min(BATCH_ROWS, MAX_BYTES * self.rows // max(stored, 1))
        for leaf in self.leaves:
            if leaf.name not in as_dictionary:
                size = max(leaf.pages.densest, leaf.pages.longest_repeated) * -(-leaf.values // max(self.rows, 1))
                rows = min(rows, int(_MAX_PIECE_BYTES // max(size, 1)))
        return max(rows, 1)

    def replaced(self) -> list[Replaced]:
        """The column chunks with pages that are not opened."""
        found = []
        for leaf in self.leaves:
            places = leaf.pages.not_opened(self.max_page)
            if places:
                found.append(Replaced(leaf.pages, places, leaf.column.max_definition_level > 0))
        return found

    def can_be_opened(self) -> bool:
        """Whether pages that are not opened can be replaced, so that the other rows can be read."""
        return not any(self._blocks(leaf) for leaf in self.leaves)

    def _blocks(self, leaf: _Leaf) -> bool:
        if leaf.column.max_repetition_level > 0:
            # Numbers that repeat take next to no space in a page: their count says what becomes of it.
            largest = max((4 * page.values for page in leaf.pages.pages), default=0)
            mean = max(leaf.pages.size, 4 * leaf.values) // max(self.rows, 1)
            if max(largest, mean) > self.max_page:
                return True
        unopened = leaf.pages.not_opened(self.max_page)
        fits = all(leaf.pages.pages[place].values <= self.rows for place in unopened)
        return bool(unopened) and not (fits and can_stand_in(leaf.column))

    def unopened(self, first_row: int) -> list[UnopenedRows]:
        """The rows of pages that are not opened; the group's first row has the number `first_row`."""
        return [
            UnopenedRows(first_row + start, first_row + stop, self._error(leaf.name, size))
            for leaf in self.leaves
            for start, stop, size in leaf.pages.rows_in(leaf.pages.not_opened(self.max_page))
        ]

    def all_unopened(self, first_row: int) -> list[UnopenedRows]:
        """All rows of the group, which cannot be opened."""
        leaf = next(leaf for leaf in self.leaves if self._blocks(leaf) or leaf.pages.not_opened(self.max_page))
        size = max((page.size for page in leaf.pages.pages), default=0)
        return [UnopenedRows(first_row, first_row + self.rows, self._error(leaf.name, size))]

    def _error(self, name: str, size: int) -> RowError:
        what = f"column {name}: the row lies in a Parquet page of {size:,} bytes"
        return RowError(ErrorCode.ROW_TOO_LARGE, f"{what}; pages of more than {self.max_page:,} are not opened")

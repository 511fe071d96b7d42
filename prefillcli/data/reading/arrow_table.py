"""Rows out of an Arrow table in memory, as the same table in a Parquet file would give them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from prefillcli.data.reading.record_batches import row_batches
from prefillcli.data.reading.selection import BATCH_ROWS, Selection, require_columns
from prefillcli.data.rows import MAX_ROW_BYTES, ErrorCode, RowBatch, RowError


class TableRows:
    """The rows of a table, numbered from 0. Nothing is carried: who has the table has its columns.

    Those in `bad` are error rows, as they have a text that is no Unicode: where it is says the value.
    """

    kind = "parquet"

    def __init__(self, table: pa.Table, bad: Mapping[int, str] = MappingProxyType({})) -> None:
        self._bad = bad
        self.available: tuple[str, ...] = tuple(table.column_names)
        self._table = table
        self._columns: tuple[str, ...] = ()
        self._max_row_bytes = MAX_ROW_BYTES

    def select(
        self,
        *,
        columns: Sequence[str],
        carried: Sequence[str] = (),
        optional: Sequence[str] = (),
        max_row_bytes: int = MAX_ROW_BYTES,
    ) -> TableRows:
        """Set the columns to read, as `Source.select`. Raises UsageError naming the first one that is missing."""
        require_columns([*columns, *carried], self.available, "the table", optional)
        found = [name for name in optional if name in self.available]
        self._columns, self._max_row_bytes = tuple(dict.fromkeys([*columns, *found])), max_row_bytes
        return self

    def batches(self, most_rows: int = BATCH_ROWS) -> Iterator[RowBatch]:
        """Row batches of at most `most_rows` rows and about 8 MiB."""
        start, none = 0, pa.schema([])
        for piece in self._pieces():
            found = row_batches(
                piece, start, self._columns, none, Selection(), None, self._max_row_bytes, min(most_rows, BATCH_ROWS)
            )
            for batch in found:
                for name, values in batch.columns.items():
                    batch.columns[name] = [_plain(value) for value in values]
                for row in self._bad.keys() & set(batch.rows.tolist() if self._bad else ()):
                    batch.errors[row] = RowError(ErrorCode.INVALID_UTF8, self._bad[row])
                yield batch
            start += piece.num_rows

    def _pieces(self) -> list[pa.RecordBatch]:
        if not self._columns:  # a template without columns: only the number of rows matters
            return [pa.record_batch({"": pa.nulls(self._table.num_rows)})]
        pieces: list[pa.RecordBatch] = self._table.select(self._columns).combine_chunks().to_batches()
        return pieces


def _plain(value: Any) -> Any:
    """Tensors, as Ray Data has them, that are not a row of integers come as lists, to be told from token ids."""
    if isinstance(value, np.ndarray) and (value.ndim != 1 or value.dtype.kind not in "iu"):
        return value.tolist()
    return value

"""Rows out of a Parquet file, a bounded number of bytes at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prefillcli.data.contents import require_same
from prefillcli.data.discovery import Found
from prefillcli.data.filesystems import reading
from prefillcli.data.rows import Int64Array, RowBatch, RowError
from prefillcli.data.selection import Selection
from prefillcli.data.values import plain_column, python_values, row_bytes

MAX_ROWS = 2048
MAX_BYTES = 8 << 20
_DICTIONARY_BYTES = 16 << 20  # a column chunk of more than this and its indices holds texts that differ
_INDEX_BYTES = 6
_BUFFER = 1 << 20  # bytes read ahead per column, so that a large row group is not loaded whole


class ParquetInput:
    """One Parquet file: its footer now, its rows when asked for."""

    def __init__(self, found: Found) -> None:
        self._found = found
        with reading(found.path), self._open() as file:
            self.schema: pa.Schema = file.schema_arrow
            self.rows: int = file.metadata.num_rows

    def batches(
        self, first_row: int, columns: Sequence[str], carried: pa.Schema, selection: Selection
    ) -> Iterator[RowBatch]:
        """The selected rows, where the file's first row has the number `first_row`.

        Raises PrefillError naming the file if it is damaged; batches before the damage have been yielded.
        """
        names = list(dict.fromkeys([*columns, *carried.names]))
        texts = [name for name in columns if _is_text_column(self.schema.field(name).type)]
        readers: dict[tuple[str, ...], pq.ParquetFile] = {}
        with reading(self._found.path), self._open() as file:
            metadata = file.metadata
        start = first_row
        for group in range(metadata.num_row_groups):
            chunks = _chunks(metadata.row_group(group), names)
            size = metadata.row_group(group).num_rows
            if len(selection.within(start, start + size)):
                repeated = tuple(name for name in texts if _is_small_dictionary(chunks[name]))
                if repeated not in readers:
                    with reading(self._found.path):
                        readers[repeated] = self._open(metadata=metadata, read_dictionary=list(repeated))
                stored = sum(chunk.total_uncompressed_size for name in names for chunk in chunks[name])
                rows = min(MAX_ROWS, max(1, MAX_BYTES * size // max(stored, 1)))
                pieces = self._pieces(readers[repeated], group, size, names, rows)
                for piece in pieces:
                    yield from _row_batches(piece, start, columns, carried, selection)
                    start += piece.num_rows
                    if selection.end is not None and start >= selection.end:
                        return
            else:
                start += size

    def _open(self, **options: Any) -> pq.ParquetFile:
        found = self._found
        source = found.inner if found.local else found.filesystem.open(found.inner, "rb")
        file = pq.ParquetFile(source, buffer_size=_BUFFER, pre_buffer=False, **options)
        require_same(found)  # what is open now is what was found
        return file

    def _pieces(
        self, file: pq.ParquetFile, group: int, size: int, names: list[str], rows: int
    ) -> Iterator[pa.RecordBatch]:
        """A row group, `rows` rows at a time."""
        if not names:  # a template without columns: only the number of rows matters
            for at in range(0, size, rows):
                yield pa.record_batch({"": pa.nulls(min(rows, size - at))})
            return
        pieces = file.iter_batches(batch_size=rows, row_groups=[group], columns=names)
        while True:
            with reading(self._found.path):
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece


def _chunks(group: pq.RowGroupMetaData, names: Sequence[str]) -> dict[str, list[Any]]:
    """The column chunks of a row group that hold each of the columns."""
    chunks = [group.column(number) for number in range(group.num_columns)]
    return {name: [chunk for chunk in chunks if f"{chunk.path_in_schema}.".startswith(f"{name}.")] for name in names}


def _is_small_dictionary(chunks: list[Any]) -> bool:
    """Whether a text column is stored as few texts that repeat, and so can be read as a dictionary.

    Arrow collects the dictionary over the whole row group, which for texts that differ would fill the memory.
    """
    return all(
        chunk.has_dictionary_page
        and chunk.total_uncompressed_size <= _DICTIONARY_BYTES + _INDEX_BYTES * chunk.num_values
        for chunk in chunks
    )


def _row_batches(
    piece: pa.RecordBatch, start: int, columns: Sequence[str], carried: pa.Schema, selection: Selection
) -> Iterator[RowBatch]:
    rows = selection.within(start, start + piece.num_rows)
    if len(rows) == 0:
        return
    if len(rows) < piece.num_rows:
        piece = piece.take(pa.array(rows - start))
    sizes = np.zeros(len(rows), np.int64)
    for column in piece.columns:
        sizes += row_bytes(column)
    ends = np.cumsum(sizes)
    at = 0
    while at < len(rows):
        before = int(ends[at - 1]) if at else 0
        stop = max(at + 1, int(np.searchsorted(ends, before + MAX_BYTES, "right")))
        stop = min(stop, at + MAX_ROWS, len(rows))
        yield _row_batch(piece.slice(at, stop - at), rows[at:stop], columns, carried, int(ends[stop - 1]) - before)
        at = stop


def _row_batch(
    piece: pa.RecordBatch, rows: Int64Array, columns: Sequence[str], carried: pa.Schema, nbytes: int
) -> RowBatch:
    errors: dict[int, RowError] = {}

    def note(name: str, bad: dict[int, str]) -> None:
        for position, what in bad.items():
            errors.setdefault(int(rows[position]), RowError("invalid_utf8", f"column {name}, {what}"))

    values: dict[str, list[Any]] = {}
    for name in columns:
        values[name], bad = python_values(piece.column(name))
        note(name, bad)
    kept = []
    for field in carried:
        column, bad = plain_column(piece.column(field.name), field.type)
        note(field.name, bad)
        kept.append(column)
    table = pa.Table.from_arrays(kept, schema=carried) if kept else _no_columns(len(rows))
    return RowBatch(int(rows[0]), rows, values, table, errors, nbytes)


def _no_columns(rows: int) -> pa.Table:
    return pa.table({"": pa.nulls(rows)}).select([])


def _is_text_column(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind in (pa.string_view(), pa.binary()))

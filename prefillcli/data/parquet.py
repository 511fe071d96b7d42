"""Rows out of a Parquet file, a bounded number of bytes at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prefillcli.data.discovery import Found
from prefillcli.data.filesystems import reading
from prefillcli.data.rows import Int64Array, RowBatch, RowError
from prefillcli.data.selection import Selection
from prefillcli.data.values import plain_column, python_values, row_bytes

MAX_ROWS = 2048
MAX_BYTES = 8 << 20
_BUFFER = 1 << 20  # bytes read ahead per column, so that a large row group is not loaded whole


class ParquetInput:
    """One Parquet file: its footer now, its rows when asked for."""

    def __init__(self, found: Found) -> None:
        self._found = found
        with reading(found.path), self._open() as file:
            self.schema: pa.Schema = file.schema_arrow
            self.rows: int = file.metadata.num_rows

    def checksum(self) -> str:
        """Digest of the footer, which holds sizes, offsets and statistics of every column chunk."""
        with reading(self._found.path), self._found.filesystem.open(self._found.inner, "rb") as file:
            file.seek(-8, 2)
            length = int.from_bytes(file.read(4), "little")
            file.seek(-8 - length, 2)
            return hashlib.blake2b(file.read(length), digest_size=32).hexdigest()

    def batches(
        self, first_row: int, columns: Sequence[str], carried: pa.Schema, selection: Selection
    ) -> Iterator[RowBatch]:
        """The selected rows, where the file's first row has the number `first_row`.

        Raises PrefillError naming the file if it is damaged; batches before the damage have been yielded.
        """
        names = list(dict.fromkeys([*columns, *carried.names]))
        texts = [name for name in columns if _is_text_column(self.schema.field(name).type)]
        with reading(self._found.path):
            file = self._open(read_dictionary=texts)
        with file:
            start = first_row
            for group in range(file.num_row_groups):
                size = file.metadata.row_group(group).num_rows
                if len(selection.within(start, start + size)):
                    for at, piece in self._pieces(file, group, names, selection, start):
                        yield from _row_batches(piece, at, columns, carried, selection)
                start += size

    def _open(self, **options: Any) -> pq.ParquetFile:
        found = self._found
        source = found.inner if found.local else found.filesystem.open(found.inner, "rb")
        return pq.ParquetFile(source, buffer_size=_BUFFER, **options)

    def _pieces(
        self, file: pq.ParquetFile, group: int, names: list[str], selection: Selection, start: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        metadata = file.metadata.row_group(group)
        if not names:
            yield start, pa.RecordBatch.from_struct_array(pa.array([{}] * metadata.num_rows, pa.struct([])))
            return
        stored = sum(
            chunk.total_uncompressed_size
            for chunk in map(metadata.column, range(metadata.num_columns))
            if any(
                chunk.path_in_schema == name or chunk.path_in_schema.startswith(f"{name}.") for name in names
            )
        )
        rows = min(MAX_ROWS, max(1, MAX_BYTES * metadata.num_rows // max(stored, 1)))
        pieces = file.iter_batches(batch_size=rows, row_groups=[group], columns=names)
        while selection.end is None or start < selection.end:
            with reading(self._found.path):
                piece = next(pieces, None)
            if piece is None:
                return
            yield start, piece
            start += piece.num_rows


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
        yield _row_batch(
            piece.slice(at, stop - at), rows[at:stop], columns, carried, int(ends[stop - 1]) - before
        )
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
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind in (pa.string_view(), pa.binary())
    )

"""The rows and columns of the input that a job reads, in batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from prefillcli.data.rows import (
    MAX_ROW_BYTES,
    ErrorCode,
    Int64Array,
    RowBatch,
    RowError,
    plain_column,
    python_values,
    row_bytes,
    row_too_large,
)
from prefillcli.errors import UsageError

BATCH_ROWS = 2048  # rows of a batch, at most
BATCH_BYTES = 8 << 20  # bytes of a batch, about


@dataclass(frozen=True, slots=True)
class Selection:
    """Row numbers below `limit`, and of those only `chosen`, if given."""

    limit: int | None = None
    chosen: Int64Array | None = None  # ascending row numbers

    @classmethod
    def draw(cls, sample: int, total: int, seed: int) -> Selection:
        """`sample` of `total` rows, the same ones for the same seed; all of them if there are fewer."""
        if sample >= total:
            return cls()
        chosen = np.random.default_rng(seed).choice(total, sample, replace=False)
        return cls(chosen=np.sort(chosen).astype(np.int64))

    @property
    def end(self) -> int | None:
        """Row number from which on nothing is read; None if all rows are."""
        if self.chosen is not None:
            return int(self.chosen[-1]) + 1 if len(self.chosen) else 0
        return self.limit

    def within(self, start: int, stop: int) -> Int64Array:
        """Selected row numbers in [start, stop), ascending."""
        if self.chosen is None:
            return np.arange(start, stop if self.limit is None else min(stop, self.limit), dtype=np.int64)
        low, high = np.searchsorted(self.chosen, (start, stop))
        return self.chosen[low:high]

    def before(self, row: int) -> int:
        """How many rows before `row` are selected."""
        if self.chosen is not None:
            return int(np.searchsorted(self.chosen, row))
        return row if self.limit is None else min(row, self.limit)

    def count(self, total: int) -> int:
        """How many of `total` rows are selected."""
        if self.chosen is not None:
            return len(self.chosen)
        return total if self.limit is None else min(total, self.limit)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Which rows the user asked for: all, the first `limit`, or of these `sample` drawn at random."""

    limit: int | None = None
    sample: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ColumnChoice:
    """The columns that are read."""

    columns: tuple[str, ...]  # those that the prompt needs
    optional: tuple[str, ...]  # those that are read where they are there: on some lines, in some files
    carried: pa.Schema  # id and kept columns; from JSON Lines every one is a string that holds JSON

    @property
    def columns_and_optional(self) -> tuple[str, ...]:
        return (*self.columns, *self.optional)


def require_columns(names: Sequence[str], available: Sequence[str], where: str, optional: Sequence[str] = ()) -> None:
    """Raise UsageError naming the first column that is missing, or of which there are two; some may be missing."""
    for name in names:
        if name not in available:
            listed = ", ".join(map(_listed, available[:20])) + (", ..." if len(available) > 20 else "")
            raise UsageError(f"no column {name!r} in {where}\navailable: {listed}")
    for name in (*names, *optional):
        if available.count(name) > 1:
            raise UsageError(f"two columns of {where} are named {name!r}\nrename or drop one of them")


def _listed(name: str) -> str:
    # A name among others: names in the data may have line breaks, and be as long as a row.
    return name if name.isprintable() and 0 < len(name) <= 60 else repr(name[:60])


_MAX_LEFT_BYTES = 1 << 16  # of an id or kept value, in a row that is too large


def row_batches(
    piece: pa.RecordBatch,
    start: int,
    columns: Sequence[str],
    carried: pa.Schema,
    selection: Selection,
    unopened: RowError | None,
    max_row_bytes: int,
    most_rows: int,
) -> Iterator[RowBatch]:
    """The selected rows of `piece`, whose first row has the number `start`, in batches of about `BATCH_BYTES`.

    `columns` become Python values, those of the schema `carried` stay in Arrow. With `unopened`
    nothing of the piece was read, and its rows have this error; so have rows of more than `max_row_bytes` theirs.
    """
    rows = selection.within(start, start + piece.num_rows)
    if len(rows) == 0:
        return
    if len(rows) < piece.num_rows:
        piece = piece.take(pa.array(rows - start))
    piece, sizes, large = _without_large(piece, max_row_bytes)
    errors = {int(rows[at]): row_too_large("the row", size, max_row_bytes) for at, size in large.items()}
    if unopened is not None:
        errors = dict.fromkeys(rows.tolist(), unopened)
    ends = np.cumsum(sizes)
    at = 0
    while at < len(rows):
        before = int(ends[at - 1]) if at else 0
        stop = max(at + 1, int(np.searchsorted(ends, before + BATCH_BYTES, "right")))
        stop = min(stop, at + most_rows, len(rows))
        batch = _row_batch(piece.slice(at, stop - at), rows[at:stop], columns, carried, int(ends[stop - 1]) - before)
        batch.errors |= {row: error for row, error in errors.items() if rows[at] <= row <= rows[stop - 1]}
        yield batch
        at = stop


def _without_large(piece: pa.RecordBatch, max_row_bytes: int) -> tuple[pa.RecordBatch, Int64Array, dict[int, int]]:
    # The rows, without the long values of rows that are too large; the sizes of all rows; those of the large ones.
    by_column = [row_bytes(column) for column in piece.columns]
    sizes = sum(by_column, np.zeros(piece.num_rows, np.int64))
    large = np.flatnonzero(sizes > max_row_bytes)
    if len(large) == 0:
        return piece, sizes, {}
    found = dict(zip(large.tolist(), sizes[large].tolist(), strict=True))
    arrays = []
    for column, lengths in zip(piece.columns, by_column, strict=True):
        left_out = np.zeros(piece.num_rows, bool)
        left_out[large] = lengths[large] > _MAX_LEFT_BYTES
        arrays.append(_with_nulls(column, left_out))
        sizes -= np.where(left_out, lengths, 0)
    return pa.record_batch(arrays, piece.schema.names), sizes, found


def _with_nulls(column: pa.Array, left_out: npt.NDArray[np.bool_]) -> pa.Array:
    try:
        return column.take(pa.array(np.arange(len(column)), mask=left_out))
    except pa.ArrowNotImplementedError:  # texts of a view type inside lists and maps
        null = pa.nulls(1, column.type)
        return pa.concat_arrays([null if out else column.slice(at, 1) for at, out in enumerate(left_out)])


def _row_batch(
    piece: pa.RecordBatch, rows: Int64Array, columns: Sequence[str], carried: pa.Schema, nbytes: int
) -> RowBatch:
    errors: dict[int, RowError] = {}

    def note(name: str, bad: dict[int, str]) -> None:
        for position, what in bad.items():
            errors.setdefault(int(rows[position]), RowError(ErrorCode.INVALID_UTF8, f"column {name}, {what}"))

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


class TableRows:
    """The rows of a table, numbered from 0. Nothing is carried: who has the table has its columns.

    Those in `bad` are error rows, as they have a text that is no Unicode: where it is says the value.
    """

    kind = "parquet"
    carried_schema = pa.schema([])
    partition_keys: tuple[str, ...] = ()

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
    # Tensors, as Ray Data has them, that are not a row of integers come as lists, to be told from token ids.
    if isinstance(value, np.ndarray) and (value.ndim != 1 or value.dtype.kind not in "iu"):
        return value.tolist()
    return value

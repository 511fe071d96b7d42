"""The rows and columns of the input that a job reads, in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from prefillcli.errors import UsageError
from prefillcli.rows.records import ErrorCode, RowBatch, RowError, row_too_large
from prefillcli.rows.values import plain_column, python_values, raw_values, row_bytes, with_nulls, without_nulls
from prefillcli.stats.arrays import Int64Array

BATCH_ROWS = 2048  # rows of a batch, at most
BATCH_BYTES = 8 << 20  # bytes of a batch, about


@dataclass(frozen=True, slots=True)
class Selection:
    """Row numbers below `limit`, and of those only `chosen`, if given."""

    limit: int | None = None
    chosen: Int64Array | None = None  # ascending row numbers

    @classmethod
    def draw(cls, sample: int, total: int, seed: int) -> Selection:
        """Draw `sample` of `total` rows, the same ones for the same seed; all of them if there are fewer."""
        if sample >= total:
            return cls()
        chosen = np.random.default_rng(seed).choice(total, sample, replace=False)
        return cls(chosen=np.sort(chosen).astype(np.int64))

    @property
    def end(self) -> int | None:
        """Row number from which nothing more is read; None if all rows are read."""
        if self.chosen is not None:
            return int(self.chosen[-1]) + 1 if len(self.chosen) else 0
        return self.limit

    def within(self, start: int, stop: int) -> Int64Array:
        """Return the selected row numbers in [start, stop), ascending."""
        if self.chosen is None:
            return np.arange(start, stop if self.limit is None else min(stop, self.limit), dtype=np.int64)
        low, high = np.searchsorted(self.chosen, (start, stop))
        return self.chosen[low:high]

    def before(self, row: int) -> int:
        """Return how many rows before `row` are selected."""
        if self.chosen is not None:
            return int(np.searchsorted(self.chosen, row))
        return row if self.limit is None else min(row, self.limit)

    def count(self, total: int) -> int:
        """Return how many of `total` rows are selected."""
        if self.chosen is not None:
            return len(self.chosen)
        return total if self.limit is None else min(total, self.limit)


@dataclass(frozen=True, slots=True)
class Sampling:
    """The rows that the user asked for: all, the first `limit`, or `sample` of these drawn at random."""

    limit: int | None = None
    sample: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ColumnChoice:
    """The columns that are read."""

    columns: tuple[str, ...]  # those that the prompt needs
    optional: tuple[str, ...]  # those that are read where they exist: on some lines, in some files
    carried: pa.Schema  # id and kept columns; from JSON Lines every one is a string that holds JSON
    # Those of JSON Lines in which a number that is not finite makes the row an invalid request; elsewhere it is null.
    requests: tuple[str, ...] = ()
    # Those of the columns that may hold files, whose bytes are no text.
    files: frozenset[str] = frozenset()

    @property
    def columns_and_optional(self) -> tuple[str, ...]:
        return (*self.columns, *self.optional)


DEFAULT_COLUMN = "prompt"  # with the texts of rows


def require_columns(names: Sequence[str], available: Sequence[str], where: str, optional: Sequence[str] = ()) -> None:
    """Raise UsageError naming the first column that is missing, or of which there are two; some may be missing."""
    for name in names:
        if name not in available:
            listed = ", ".join(map(_listed, available[:20])) + (", ..." if len(available) > 20 else "")
            advice = "\nname the text's column with --prompt-column, or write a --template" * (name == DEFAULT_COLUMN)
            raise UsageError(f"no column {name!r} in {where}\navailable: {listed}{advice}")
    for name in (*names, *optional):
        if available.count(name) > 1:
            raise UsageError(f"two columns of {where} are named {name!r}\nrename or drop one of them")


def _listed(name: str) -> str:
    # A name among others: names in the data may have line breaks, or spaces around them, and be as long as a row.
    return name if name.isprintable() and name.strip() == name and 0 < len(name) <= 60 else repr(name[:60])


MAX_LEFT_BYTES = 1 << 16  # of an id or kept value, in a row that is too large


def row_batches(
    piece: pa.RecordBatch,
    start: int,
    columns: Sequence[str],
    carried: pa.Schema,
    selection: Selection,
    max_row_bytes: int,
    most_rows: int,
    files: frozenset[str] = frozenset(),
) -> Iterator[RowBatch]:
    """Yield the selected rows of `piece`, whose first row has the number `start`, in batches of about `BATCH_BYTES`.

    `columns` become Python values, those that may hold `files` with bytes as they are; those of the schema `carried`
    stay in Arrow. Rows of more than `max_row_bytes` are error rows.
    """
    rows = selection.within(start, start + piece.num_rows)
    if len(rows) == 0:
        return
    if len(rows) < piece.num_rows:
        piece = piece.take(pa.array(rows - start))
    piece, sizes, large = _without_large(piece, max_row_bytes)
    errors = {int(rows[at]): row_too_large("the row", size, max_row_bytes) for at, size in large.items()}
    ends = np.cumsum(sizes)
    at = 0
    while at < len(rows):
        before = int(ends[at - 1]) if at else 0
        stop = max(at + 1, int(np.searchsorted(ends, before + BATCH_BYTES, "right")))
        stop = min(stop, at + most_rows, len(rows))
        nbytes = int(ends[stop - 1]) - before
        batch = _row_batch(piece.slice(at, stop - at), rows[at:stop], columns, carried, nbytes, files)
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
        left_out[large] = lengths[large] > MAX_LEFT_BYTES
        arrays.append(with_nulls(column, left_out))
        sizes -= np.where(left_out, lengths, 0)
    return pa.record_batch(arrays, piece.schema.names), sizes, found


def _row_batch(
    piece: pa.RecordBatch,
    rows: Int64Array,
    columns: Sequence[str],
    carried: pa.Schema,
    nbytes: int,
    files: frozenset[str],
) -> RowBatch:
    errors: dict[int, RowError] = {}

    def note(name: str, bad: dict[int, str]) -> None:
        for position, what in bad.items():
            errors.setdefault(int(rows[position]), RowError(ErrorCode.INVALID_UTF8, f"column {name}, {what}"))

    values: dict[str, list[Any]] = {}
    for name in columns:
        found, bad = (raw_values if name in files else python_values)(piece.column(name))
        values[name] = list(map(without_nulls, found))
        note(name, bad)
    kept = []
    for field in carried:
        column, bad = plain_column(piece.column(field.name), field.type)
        note(field.name, bad)
        kept.append(column)
    # A table without columns has no number of rows: it takes that from a column that is left out.
    table = pa.Table.from_arrays(kept, schema=carried) if kept else pa.table({"": pa.nulls(len(rows))}).select([])
    return RowBatch(int(rows[0]), rows, values, table, errors, nbytes)

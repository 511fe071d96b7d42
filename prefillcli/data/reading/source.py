"""The input of a job as a stream of row batches, whatever files it lies in."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from prefillcli.data.proof import FileContents
from prefillcli.data.reading.discovery import Partitions, discover
from prefillcli.data.reading.jsonl import JsonlFiles
from prefillcli.data.reading.parquet import ParquetFiles
from prefillcli.data.rows import (
    BATCH_ROWS,
    MAX_ROW_BYTES,
    ColumnChoice,
    ErrorCode,
    Int64Array,
    RowBatch,
    RowError,
    Sampling,
    Selection,
    require_columns,
    row_batches,
)
from prefillcli.errors import ContentChangedError, PrefillError, UsageError


class Source:
    """Rows of Parquet or JSON Lines files, in the order given.

    Open it, ask for `available` columns, then `select` the needed ones; or name them at once.
    """

    def __init__(self, inputs: Sequence[str], sampling: Sampling) -> None:
        found, left_out = discover(inputs)
        self.kind = found[0].kind
        # Files in the given directories that were not read for their ending; worth a warning.
        self.left_out = tuple(left_out)
        self._choice = ColumnChoice((), (), pa.schema([]))
        self.seconds = 0.0  # time spent reading so far
        self._found = tuple(found)
        self._sampling = sampling
        self._inputs = tuple(inputs)
        self._contents = FileContents(found, "input", lambda: [file.path for file in discover(inputs)[0]])
        self.partitions = Partitions.of(file.below for file in found)  # what the names of folders hold
        self._files: ParquetFiles | JsonlFiles
        if self.kind == "parquet":
            self._files = files = ParquetFiles(found, self.partitions)
            files.refuse_outputs(self._inputs)
        else:
            self._files = JsonlFiles(found, self.partitions)
        # Column names: of the first Parquet file, or on the first lines of JSON Lines, and of the folders.
        self.available: tuple[str, ...] = tuple(dict.fromkeys([*self._files.available, *self.partition_keys]))

    @classmethod
    def open(
        cls,
        inputs: Sequence[str],
        *,
        columns: Sequence[str] = (),
        carried: Sequence[str] = (),
        limit: int | None = None,
        sample: int | None = None,
        seed: int = 0,
    ) -> Source:
        """Find the files of `inputs` and look at their columns.

        `columns` are needed by the prompt, `carried` go to the output. `limit`: the first rows only;
        `sample`: that many rows drawn at random. Raises UsageError if nothing is found or a column is
        missing, PrefillError if a file is damaged.
        """
        source = cls(inputs, Sampling(limit, sample, seed))
        return source.select(columns=columns, carried=carried)

    def select(
        self,
        *,
        columns: Sequence[str],
        carried: Sequence[str],
        optional: Sequence[str] = (),
        max_row_bytes: int = MAX_ROW_BYTES,
    ) -> Source:
        """Set the columns to read. Raises UsageError naming the first one that is missing.

        `optional` ones are read where they are there: on some lines, in some files. A row of more than
        `max_row_bytes` becomes an error row.
        """
        columns, carried = tuple(dict.fromkeys(columns)), tuple(dict.fromkeys(carried))
        self._refuse_named_twice([name for name in (*columns, *carried, *optional) if name in self.partition_keys])
        schema = self._files.carried_schema(columns, carried, optional, max_row_bytes)
        self._choice = ColumnChoice(columns, tuple(name for name in optional if name not in columns), schema)
        return self

    @property
    def carried_schema(self) -> pa.Schema:
        """Id and kept columns; from JSON Lines every one is a string that holds JSON."""
        return self._choice.carried

    @property
    def partition_keys(self) -> tuple[str, ...]:
        """The columns that the names of folders hold, outermost first."""
        return tuple(self.partitions.schema.names)

    @property
    def selected_rows(self) -> int | None:
        """Rows that `batches` will yield; for JSON Lines None until `count` was called."""
        total, bounds = self._files.total_rows, (self._sampling.limit, self._sampling.sample)
        return None if total is None else min([total, *(bound for bound in bounds if bound is not None)])

    def count(self) -> int:
        """Rows of the whole input; reads JSON Lines to the end once."""
        return self._files.count()

    @property
    def paths(self) -> tuple[str, ...]:
        """The files in reading order."""
        return tuple(file.path for file in self._found)

    def begin_hashing(self) -> None:
        """Start to hash the files in the background; `fingerprint` waits for the end."""
        self._contents.begin()

    def fingerprint(self) -> str:
        """Digest of the content and of which rows are taken; where the files lie does not count,
        except for the columns that their folders name.

        Reads every file whole, once, unless its digest is known from before. Raises as `FileContents.digests`.
        """
        sampling = self._sampling
        seed = sampling.seed if sampling.sample is not None else None
        content = [(file.stamp.size, each) for file, each in zip(self._found, self._contents.digests(), strict=True)]
        keys = list(self.partitions.values) if self.partition_keys else []
        text = json.dumps([self.kind, content, sampling.limit, sampling.sample, seed, *keys])
        return hashlib.sha256(text.encode()).hexdigest()

    def require_unchanged(self, rows: Int64Array | None = None) -> None:
        """Raise ContentChangedError unless the files are what the fingerprint says.

        With `rows`, ascending row numbers that `batches` has given, only the files that they came from are checked;
        without, all files are, and that none came or went.
        """
        if rows is None:
            self._contents.require_unchanged()
        elif len(rows):
            starts = np.array(self._files.starts)
            first, last = np.searchsorted(starts, (rows[0], rows[-1]), "right") - 1
            first = int(np.searchsorted(starts, starts[first], "left"))  # files without rows share a start
            self._contents.require_unchanged(range(first, int(last) + 1))

    def batches(self, most_rows: int = BATCH_ROWS) -> Iterator[RowBatch]:
        """Row batches of at most `most_rows` rows and about 8 MiB, the same ones for the same input every time.

        Raises PrefillError naming the file when one turns out damaged, after the rows before the damage.
        """
        batches = self._batches(most_rows)
        while True:
            started = time.perf_counter()
            try:
                batch = next(batches, None)
            except ContentChangedError:
                raise
            except PrefillError:
                self.require_unchanged()  # a file may look damaged because it is being replaced
                raise
            self.seconds += time.perf_counter() - started
            if batch is None:
                return
            yield batch

    def rows(self, numbers: Int64Array) -> Iterator[RowBatch]:
        """The rows with these numbers, ascending; little else is read. Raises PrefillError for a damaged file."""
        yield from self._files.batches(self._choice, Selection(chosen=numbers), BATCH_ROWS)

    def _batches(self, most_rows: int) -> Iterator[RowBatch]:
        yield from self._files.batches(self._choice, self.selection(), most_rows)

    def selection(self) -> Selection:
        """Which rows are read; for a sample of JSON Lines they are counted first."""
        sampling = self._sampling
        if sampling.sample is not None:
            population = self.count() if sampling.limit is None else min(self.count(), sampling.limit)
            drawn = Selection.draw(sampling.sample, population, sampling.seed)
            if drawn.chosen is not None:
                return drawn
        return Selection(sampling.limit)

    def _refuse_named_twice(self, keys: Sequence[str]) -> None:
        for name in keys:
            for path, names in self._files.columns_by_file():
                if name in names:
                    raise UsageError(f"{path} has a column {name!r}, and its folders name one too\nrename one of them")


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

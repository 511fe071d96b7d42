"""The input of a job as a stream of row batches, whatever files it lies in."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from prefillcli.data.proof import FileContents
from prefillcli.data.reading.discovery import Partitions, discover
from prefillcli.data.reading.jsonl import JsonlFiles
from prefillcli.data.reading.parquet import ParquetFiles
from prefillcli.data.reading.record_batches import BATCH_ROWS, ColumnChoice, Sampling, Selection
from prefillcli.data.rows import MAX_ROW_BYTES, Int64Array, RowBatch
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

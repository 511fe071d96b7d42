"""The input of a job as a stream of row batches, whatever files it lies in."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow as pa

from prefillcli.data.proof.contents import FileContents
from prefillcli.data.proof.seals import JOB_KEY
from prefillcli.data.reading.discovery import discover, would_find
from prefillcli.data.reading.jsonl import BatchMaker, JsonlInput, parse
from prefillcli.data.reading.parquet import ParquetInput
from prefillcli.data.reading.partitions import Partitions
from prefillcli.data.reading.selection import Selection
from prefillcli.data.rows import MAX_ROW_BYTES, Int64Array, RowBatch, RowError
from prefillcli.data.values import plain_type
from prefillcli.errors import ContentChangedError, PrefillError, UsageError

_PEEK_ROWS = 100
_PEEK_BYTES = 16 << 20


class Source:
    """Rows of Parquet or JSON Lines files, in the order given.

    Open it, ask for `available` columns, then `select` the needed ones; or name them at once.
    """

    def __init__(self, inputs: Sequence[str], selection: _Wish) -> None:
        found, left_out = discover(inputs)
        self.kind = found[0].kind
        self.left_out = tuple(left_out)
        """Files in the given directories that were not read for their ending; worth a warning."""
        self.columns: tuple[str, ...] = ()
        self.optional: tuple[str, ...] = ()
        self.carried_schema: pa.Schema = pa.schema([])
        """Id and kept columns; from JSON Lines every one is a string that holds JSON."""
        self.seconds = 0.0
        """Time spent reading so far."""
        self._found = tuple(found)
        self._wish = selection
        self._inputs = tuple(inputs)
        self._contents = FileContents(found, "input", lambda: [file.path for file in discover(inputs)[0]])
        self._starts: list[int] = []  # of every file that was begun, the number of its first row
        self._counted: int | None = None
        self.partitions = Partitions.of(file.below for file in found)
        """What the names of folders hold."""
        if self.kind == "parquet":
            self._parquet = [ParquetInput(file) for file in found]
            self._refuse_outputs()
            self._counted = sum(file.rows for file in self._parquet)
            self.available: tuple[str, ...] = tuple(self._parquet[0].schema.names)
            """Column names: of the first Parquet file, or on the first lines of JSON Lines."""
            self._peeked = 1
        else:
            self._jsonl = [JsonlInput(file) for file in found]
            self.available, self._peeked = self._peek()
        self._in_files = self.available
        self.available = tuple(dict.fromkeys([*self.available, *self.partition_keys]))

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
        source = cls(inputs, _Wish(limit, sample, seed))
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
        for reader in self._parquet if self.kind == "parquet" else self._jsonl:
            reader.max_row_bytes = max_row_bytes
        columns, carried = tuple(dict.fromkeys(columns)), tuple(dict.fromkeys(carried))
        keys = self.partitions.schema
        self._refuse_doubles([name for name in (*columns, *carried, *optional) if name in keys.names])
        wanted = [name for name in (*columns, *carried) if name not in keys.names]
        if self.kind == "parquet":
            for file, read in zip(self._found, self._parquet, strict=True):
                _require(wanted, (*read.schema.names, *keys.names), file.path)
            self.carried_schema = pa.schema(
                [keys.field(name) if name in keys.names else self._common_field(name) for name in carried]
            )
        else:
            if self._peeked:
                _require(wanted, self.available, f"the first {self._peeked} lines")
            self.carried_schema = pa.schema([(name, pa.string()) for name in carried])
        self.columns = columns
        self.optional = tuple(name for name in optional if name not in columns)
        return self

    @property
    def partition_keys(self) -> tuple[str, ...]:
        """The columns that the names of folders hold, outermost first."""
        return tuple(self.partitions.schema.names)

    @property
    def total_rows(self) -> int | None:
        """Rows of the whole input; for JSON Lines None until `count` was called."""
        return self._counted

    @property
    def selected_rows(self) -> int | None:
        """Rows that `batches` will yield, where `total_rows` is known."""
        if self._counted is None:
            return None
        return min(self._counted, *(n for n in (self._wish.limit, self._wish.sample) if n is not None), self._counted)

    def count(self) -> int:
        """Rows of the whole input; reads JSON Lines to the end once."""
        if self._counted is None:
            self._counted = sum(file.count() for file in self._jsonl)
        return self._counted

    @property
    def paths(self) -> tuple[str, ...]:
        """The files in reading order."""
        return tuple(file.path for file in self._found)

    def would_read(self, path: str) -> str | None:
        """The input, as it was typed, that a file or folder of outputs at `path` would be read with the next time."""
        return next((given for given in self._inputs if would_find(given, path)), None)

    def begin_hashing(self) -> None:
        """Start to hash the files in the background; `fingerprint` waits for the end."""
        self._contents.begin()

    def fingerprint(self) -> str:
        """Digest of the content and of which rows are taken; where the files lie does not count,
        but for the columns that their folders name.

        Reads every file whole, once, unless its digest is known from before. Raises as `FileContents.digests`.
        """
        wish = self._wish
        seed = wish.seed if wish.sample is not None else None
        content = [(file.size, each) for file, each in zip(self._found, self._contents.digests(), strict=True)]
        keys = list(self.partitions.values) if self.partition_keys else []
        text = json.dumps([self.kind, content, wish.limit, wish.sample, seed, *keys])
        return hashlib.sha256(text.encode()).hexdigest()

    def require_unchanged(self, rows: Int64Array | None = None) -> None:
        """Raise ContentChangedError unless the files are what the fingerprint says.

        With `rows`, ascending row numbers that `batches` has given, only the files that they came from are looked at;
        without them all, and that there are no more and no fewer.
        """
        if rows is None:
            self._contents.require_unchanged()
        elif len(rows):
            starts = np.array(self._starts)
            first, last = np.searchsorted(starts, (rows[0], rows[-1]), "right") - 1
            first = int(np.searchsorted(starts, starts[first], "left"))  # files without rows share a start
            self._contents.require_unchanged(range(first, int(last) + 1))

    def batches(self) -> Iterator[RowBatch]:
        """Row batches of at most 2,048 rows and about 8 MiB, the same ones for the same input every time.

        Raises PrefillError naming the file when one turns out damaged, after the rows before the damage.
        """
        batches = self._batches()
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

    def selection(self) -> Selection:
        """Which rows are read; for a sample of JSON Lines they are counted first."""
        wish = self._wish
        if wish.sample is not None:
            population = self.count() if wish.limit is None else min(self.count(), wish.limit)
            drawn = Selection.draw(wish.sample, population, wish.seed)
            if drawn.chosen is not None:
                return drawn
        return Selection(wish.limit)

    def _batches(self) -> Iterator[RowBatch]:
        selection = self.selection()
        self._starts = []
        end = selection.end
        if self.kind == "parquet":
            start = 0
            for number, file in enumerate(self._parquet):
                if end is not None and start >= end:
                    return
                self._starts.append(start)
                names = [name for name in (*self.columns, *self.optional) if name in file.schema.names]
                own = pa.schema([field for field in self.carried_schema if field.name not in self.partition_keys])
                for batch in file.batches(start, names, own, selection):
                    yield self._with_keys(batch, number)
                start += file.rows
            return
        maker = BatchMaker(self.columns, self.carried_schema.names, selection, self.optional)
        for number, lines in enumerate(self._jsonl):
            if end is not None and maker.row >= end:
                break
            self._starts.append(maker.row)
            maker.constants = self.partitions.values[number]
            yield from maker.add(lines.lines())
        yield from maker.rest()

    def _with_keys(self, batch: RowBatch, number: int) -> RowBatch:
        """The batch of a Parquet file with the columns that the file's folders name."""
        if self.partition_keys:
            rows = len(batch.rows)
            for name, value in self.partitions.values[number].items():
                if name in (*self.columns, *self.optional):
                    batch.columns[name] = [value] * rows
                if name in self.carried_schema.names:
                    column = pa.array([value] * rows, self.carried_schema.field(name).type)
                    batch.carried = batch.carried.append_column(name, column)
            batch.carried = batch.carried.select(self.carried_schema.names)
        return batch

    def _refuse_doubles(self, keys: Sequence[str]) -> None:
        for name in keys:
            inside = [file.schema.names for file in self._parquet] if self.kind == "parquet" else [self._in_files]
            for file, names in zip(self._found, inside, strict=False):
                if name in names:
                    raise UsageError(
                        f"{file.path} has a column {name!r}, and its folders name one too\nrename one of them"
                    )

    def _refuse_outputs(self) -> None:
        """Scores that lie among other files are hardly meant to be scored."""
        ours = [JOB_KEY in (file.schema.metadata or {}) for file in self._parquet]
        for file, written in zip(self._found, ours, strict=True):
            if written and not all(ours) and file.path not in self._inputs:
                raise UsageError(
                    f"{file.path} was written by prefill score and lies among other input files\n"
                    "move it out of there, or name the input files one by one"
                )

    def _common_field(self, name: str) -> pa.Field:
        """The type of a carried column that holds its values in every file."""
        kinds = [plain_type(file.schema.field(name).type) for file in self._parquet]
        if all(kind == kinds[0] for kind in kinds):
            return pa.field(name, kinds[0])
        try:
            schemas = [pa.schema([(name, kind)]) for kind in kinds]
            return pa.unify_schemas(schemas, promote_options="permissive").field(0)
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            other = next(at for at, kind in enumerate(kinds) if kind != kinds[0])
            raise UsageError(
                f"column {name!r} is {kinds[0]} in {self._found[0].path} but {kinds[other]} in "
                f"{self._found[other].path}\nscore the files in separate jobs or leave the column out"
            ) from None

    def _peek(self) -> tuple[tuple[str, ...], int]:
        """Columns on the first lines, and the number of lines looked at."""
        names: dict[str, None] = {}
        seen = size = 0
        wrong: RowError | None = None
        for line in islice((line for file in self._jsonl for line in file.lines()), _PEEK_ROWS):
            seen += 1
            size += len(line) if isinstance(line, bytes) else 0
            row = parse(line)
            if isinstance(row, dict):
                names |= dict.fromkeys(row)
            elif wrong is None:
                wrong = row
            if size > _PEEK_BYTES:
                break
        if wrong is not None and not names:
            raise UsageError(
                f"{self._found[0].path}: none of the first {seen} lines is a JSON object ({wrong.detail})\n"
                "JSON Lines has one JSON object on every line, in UTF-8"
            )
        return tuple(names), seen


@dataclass(frozen=True, slots=True)
class _Wish:
    """Which rows the user asked for."""

    limit: int | None
    sample: int | None
    seed: int


def _require(names: Sequence[str], available: Sequence[str], where: str) -> None:
    for name in names:
        if name not in available:
            listed = ", ".join(available[:20]) + (", ..." if len(available) > 20 else "")
            raise UsageError(f"no column {name!r} in {where}\navailable: {listed}")

"""The input of a job as a stream of row batches: files of any kind, JSON Lines, CSV, and tables.

Parquet has its own module, and so have the records of CSV.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from types import MappingProxyType
from typing import Any, assert_never

import numpy as np
import pyarrow as pa

from prefillcli.errors import ContentChangedError, PrefillError, UsageError, counted, without_secrets
from prefillcli.rows.filesystems import reading
from prefillcli.rows.input.content import refuse_other_content
from prefillcli.rows.input.csv_head import BOM, HEAD_BYTES, CsvRules, head_of, not_utf8
from prefillcli.rows.input.delimited import line_numbers
from prefillcli.rows.input.discovery import InputFile, Partitions, discover
from prefillcli.rows.input.parquet import ParquetFiles
from prefillcli.rows.input.selection import (
    BATCH_BYTES,
    BATCH_ROWS,
    MAX_LEFT_BYTES,
    ColumnChoice,
    Sampling,
    Selection,
    require_columns,
    row_batches,
)
from prefillcli.rows.proof import FileContents, require_same
from prefillcli.rows.records import MAX_ROW_BYTES, BadLine, ErrorCode, RowBatch, RowError, row_too_large
from prefillcli.rows.values import without_nulls
from prefillcli.runtime.clock import Expected
from prefillcli.stats.arrays import Int64Array


class Source:
    """Rows of Parquet, JSON Lines or CSV files, in the order given.

    Open it, ask for `available` columns, then `select` the needed ones; or name them at once.
    """

    def __init__(self, inputs: Sequence[str], sampling: Sampling, rules: CsvRules) -> None:
        found, left_out = discover(inputs)
        self.kind = found[0].kind
        # Files in the given directories that were skipped because of their ending; worth a warning.
        self.left_out = tuple(left_out)
        self._choice = ColumnChoice((), (), pa.schema([]))
        self.seconds = 0.0  # time spent reading so far
        self._found = tuple(found)
        self._sampling = sampling
        self._inputs = tuple(inputs)
        self._contents = FileContents(found, "input", lambda: [file.path for file in discover(inputs)[0]])
        self.partitions = Partitions.of(file.below for file in found)  # keys and values in the names of folders
        if self.kind not in ("csv", "tsv") and rules != CsvRules():
            name, value = ("separator", rules.separator) if rules.separator != "auto" else ("quoting", rules.quoting)
            raise UsageError(f"--csv-{name} {value}: {found[0].path} is not a CSV file\nleave it out")
        self._files: ParquetFiles | LineFiles
        match self.kind:
            case "parquet":
                self._files = files = ParquetFiles(found, self.partitions)
                files.refuse_outputs(self._inputs)
            case "jsonl":
                self._files = JsonlFiles(found, self.partitions)
            case "csv" | "tsv":
                self._files = CsvFiles(found, self.partitions, rules)
            case unknown:  # a kind of `KINDS` without files here, which mypy refuses too
                assert_never(unknown)
        self._rules = rules
        # Column names: of the first Parquet or CSV file, or of the first lines of JSON Lines, and of the folders.
        self.available: tuple[str, ...] = tuple(dict.fromkeys([*self._files.available, *self.partition_keys]))
        # The first row of JSON Lines that can be read; Parquet's rows are read when they are needed.
        self.first: Mapping[str, Any] = self._files.first if isinstance(self._files, JsonlFiles) else {}

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
        csv_separator: str = "auto",
        csv_quoting: str = "auto",
    ) -> Source:
        """Find the files of `inputs` and look at their columns.

        The prompt needs `columns`; `carried` go to the output. `limit`: the first rows only;
        `sample`: that many rows drawn at random. The `csv_` options are those of the command. Raises UsageError if
        nothing is found or a column is missing, PrefillError if a file is damaged.
        """
        source = cls(inputs, Sampling(limit, sample, seed), CsvRules(csv_separator, csv_quoting))
        return source.select(columns=columns, carried=carried)

    def select(
        self,
        *,
        columns: Sequence[str],
        carried: Sequence[str],
        optional: Sequence[str] = (),
        requests: Sequence[str] = (),
        files: Sequence[str] = (),
        max_row_bytes: int = MAX_ROW_BYTES,
    ) -> Source:
        """Set the columns to read. Raises UsageError naming the first one that is missing.

        `optional` ones are read where they exist: on some lines, in some files. `requests` are those that hold
        requests, whose numbers must be finite; `files` are those whose bytes are files and no texts. A row of more
        than `max_row_bytes` becomes an error row.
        """
        columns, carried = tuple(dict.fromkeys(columns)), tuple(dict.fromkeys(carried))
        self._refuse_named_twice([name for name in (*columns, *carried, *optional) if name in self.partition_keys])
        schema = self._files.carried_schema(columns, carried, optional, max_row_bytes)
        others = tuple(name for name in optional if name not in columns)
        self._choice = ColumnChoice(columns, others, schema, tuple(requests), frozenset(files))
        return self

    @property
    def carried_schema(self) -> pa.Schema:
        """Id and kept columns; from JSON Lines every one is a string that holds JSON, from CSV a text."""
        return self._choice.carried

    @property
    def partition_keys(self) -> tuple[str, ...]:
        """The columns that the names of folders hold, outermost first."""
        return tuple(self.partitions.schema.names)

    @property
    def selected_rows(self) -> int | None:
        """Rows that `batches` will yield; for lines of JSON or CSV None until `count` was called."""
        expected = self.expected_rows()
        return expected.rows if expected is not None and expected.exact else None

    def expected_rows(self) -> Expected | None:
        """Return the same, or an estimate by the share of bytes that was read; None before the first row.

        Any thread may ask while another one reads.
        """
        expected = self._files.expected_rows()
        if expected is None:
            return None
        rows = min(filter(None, (expected.rows, self._sampling.limit, self._sampling.sample)), default=0)
        return Expected(rows if expected.rows else 0, expected.exact)

    def count(self) -> int:
        """Return the number of rows of the whole input; reads lines of JSON or CSV to the end once."""
        return self._files.count()

    @property
    def paths(self) -> tuple[str, ...]:
        """The files in reading order."""
        return tuple(file.path for file in self._found)

    def begin_hashing(self) -> None:
        """Start to hash the files in the background; `fingerprint` waits for the end."""
        self._contents.begin()

    def fingerprint(self) -> str:
        """Return the digest of the content and of the selection of rows. The place of the files does not count, except
        for the columns that their folders name.

        Reads every file whole, once, unless its digest is known from before. Raises as `FileContents.digests`.
        """
        sampling = self._sampling
        seed = sampling.seed if sampling.sample is not None else None
        content = [(file.stamp.size, each) for file, each in zip(self._found, self._contents.digests(), strict=True)]
        keys = list(self.partitions.values) if self.partition_keys else []
        rules = [] if self._rules == CsvRules() else [self._rules.separator, self._rules.quoting]
        text = json.dumps([self.kind, content, sampling.limit, sampling.sample, seed, *keys, *rules])
        return hashlib.sha256(text.encode()).hexdigest()

    def require_unchanged(self, rows: Int64Array | None = None) -> None:
        """Raise ContentChangedError if the files no longer match the fingerprint.

        With `rows`, ascending row numbers that `batches` has given, only the files of these rows are checked; without,
        all files are, and none may have come or gone.
        """
        if rows is None:
            self._contents.require_unchanged()
        elif len(rows):
            starts = np.array(self._files.starts)
            first, last = np.searchsorted(starts, (rows[0], rows[-1]), "right") - 1
            first = int(np.searchsorted(starts, starts[first], "left"))  # files without rows share a start
            self._contents.require_unchanged(range(first, int(last) + 1))

    def batches(self, most_rows: int = BATCH_ROWS) -> Iterator[RowBatch]:
        """Yield row batches of at most `most_rows` rows and about 8 MiB, the same ones for the same input every time.

        For a damaged file raises PrefillError that names it, after the rows before the damage.
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
        """Yield the rows with these ascending numbers; little else is read. Raises PrefillError for a damaged file."""
        yield from self._files.batches(self._choice, Selection(chosen=numbers), BATCH_ROWS)

    def _batches(self, most_rows: int) -> Iterator[RowBatch]:
        yield from self._files.batches(self._choice, self.selection(), most_rows)

    def selection(self) -> Selection:
        """Return the selection of rows to read; for a sample of lines they are counted first."""
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
    """The rows of a table, numbered from 0. Nothing is carried: the owner of the table has its columns.

    Rows in `bad` are error rows, because they hold a text that is not Unicode; the value names its column.
    """

    kind = "parquet"
    carried_schema = pa.schema([])
    partition_keys: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()

    def __init__(self, table: pa.Table, bad: Mapping[int, str] = MappingProxyType({})) -> None:
        self._bad = bad
        self.available: tuple[str, ...] = tuple(table.column_names)
        self._table = table
        self._columns: tuple[str, ...] = ()
        self._holding_files: frozenset[str] = frozenset()
        self._max_row_bytes = MAX_ROW_BYTES

    def select(
        self,
        *,
        columns: Sequence[str],
        carried: Sequence[str] = (),
        optional: Sequence[str] = (),
        files: Sequence[str] = (),
        max_row_bytes: int = MAX_ROW_BYTES,
    ) -> TableRows:
        """Set the columns to read, as `Source.select`. Raises UsageError naming the first one that is missing."""
        require_columns([*columns, *carried], self.available, "the table", optional)
        found = [name for name in optional if name in self.available]
        self._columns, self._max_row_bytes = tuple(dict.fromkeys([*columns, *found])), max_row_bytes
        self._holding_files = frozenset(files)
        return self

    def batches(self, most_rows: int = BATCH_ROWS) -> Iterator[RowBatch]:
        """Yield row batches of at most `most_rows` rows and about 8 MiB."""
        start, none = 0, pa.schema([])
        for piece in self._pieces():
            found = row_batches(
                piece,
                start,
                self._columns,
                none,
                Selection(),
                self._max_row_bytes,
                min(most_rows, BATCH_ROWS),
                self._holding_files,
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
        return list(self._table.select(self._columns).combine_chunks().to_batches())


def _plain(value: Any) -> Any:
    # Tensors, as Ray Data has them, come as lists unless they are a row of integers, to distinguish them from token
    # ids.
    if isinstance(value, np.ndarray) and (value.ndim != 1 or value.dtype.kind not in "iu"):
        return value.tolist()
    return value


# Files of lines, JSON Lines and CSV: one bad line is one error row.


_BLOCK = 1 << 18
_PIECE = 1 << 12  # of a compressed file
_REMOTE_BLOCK = 8 << 20  # bytes read ahead from an object store
_FEW_BLANK_LINES = 16  # one after each row is read as a line: looking ahead copies the buffer
_MAX_BLANK_BYTES = 1 << 30  # of blank lines in a row: a few kilobytes of a compressed file may hold any number of them


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


# NaN and Infinity are not JSON: they become null, and so do numbers larger than any float
_decode = json.JSONDecoder(parse_float=_finite, parse_constant=lambda _name: None).decode
_encode = json.JSONEncoder(separators=(",", ":")).encode


class LineInput:
    """One file of JSON Lines or CSV, plain, gzip or zstd."""

    blanks: bytes | None = None  # the characters of blank lines; None: all white space

    def __init__(self, found: InputFile) -> None:
        self.max_row_bytes = MAX_ROW_BYTES  # longer lines are not read into memory
        self.kept: frozenset[str] = frozenset()  # names of the values that are wanted even of these
        self._found = found
        self._stream: _Stream | None = None  # while lines are read
        self._buffer: io.BufferedReader | None = None
        self._blank = 0  # lines before this one
        self._returns = False  # whether lines end with carriage returns, which are given as line feeds

    @property
    def size(self) -> int:
        """Bytes of the file, as it is stored."""
        return self._found.stamp.size

    def start(self) -> bytes:
        """Return the first bytes of the content, at most `HEAD_BYTES`. Raises PrefillError as `lines`."""
        with reading(self._found.path), self._open() as file:
            return file.read(HEAD_BYTES)

    def bytes_read(self) -> float:
        """Return how many of them the lines so far take; to be called between two lines, by the thread that reads."""
        if self._stream is None or self._buffer is None:
            return 0.0
        if self._buffer.closed:  # the last line was read
            return self.size
        ahead = len(self._buffer.peek())
        return self._stream.stored * (1 - ahead / max(self._stream.taken, 1))

    def lines(self) -> Iterator[bytes | BadLine]:
        """Yield the lines of rows that are not blank; of those that are longer than `max_row_bytes`, what is `kept`.

        Raises PrefillError if the file cannot be read to its end.
        """
        with reading(self._found.path), self._open() as file:
            require_same(self._found)  # the open file is the one that was found
            self._blank = 0
            yield from self._rows(file)

    def parse(self, line: bytes | BadLine) -> dict[str, Any] | BadLine:
        """Return the values of a row by name, or why there are none."""
        raise NotImplementedError

    def _rows(self, file: io.BufferedReader) -> Iterator[bytes | BadLine]:
        raise NotImplementedError

    def _skip_blanks(self, file: io.BufferedReader) -> int:
        # After a blank line, read on to the next one that is not, where there are many. Returns how many.
        self._blank += 1
        return _skip_blank_lines(file, self.blanks) if self._blank > _FEW_BLANK_LINES else 0

    def _open(self) -> io.BufferedReader:
        found = self._found
        if found.local:
            raw: Any = io.FileIO(found.inner)
        else:
            raw = found.filesystem.open(found.inner, "rb", block_size=_REMOTE_BLOCK)
        self._stream = _Stream(raw, found.codec, self._returns)
        self._buffer = io.BufferedReader(self._stream, _BLOCK)
        return self._buffer


class JsonlInput(LineInput):
    """One JSON Lines file: each line is an object."""

    def parse(self, line: bytes | BadLine) -> dict[str, Any] | BadLine:
        return parse(line, self.kept)

    def _rows(self, file: io.BufferedReader) -> Iterator[bytes | BadLine]:
        first, most = True, self.max_row_bytes
        while line := file.readline(most + 2):  # with its line break
            if first:
                first, line = False, line.removeprefix(BOM)
            if len(line) > most and (len(line.rstrip(b"\r\n")) > most or not line.endswith(b"\n")):
                bad = _skip_long_line(file, line, most, self.kept)
                if bad is not None:
                    yield bad
            elif line.isspace():
                self._skip_blanks(file)
            elif line:
                self._blank = 0
                yield line


class CsvInput(LineInput):
    """One CSV or TSV file: a header, and records with a field for each of its names."""

    blanks = b"\r\n"

    def __init__(self, found: InputFile, rules: CsvRules, *, among_others: bool) -> None:
        super().__init__(found)
        self._where = f"{without_secrets(found.path)}, " if among_others else ""
        start = self.start()
        whole = len(start) < HEAD_BYTES
        refuse_other_content(found.path, found.kind, start)
        self._head = head_of(found.path, found.kind, start, whole=whole, rules=rules)
        self.names, self._returns = self._head.names, self._head.returns
        self._last = self._head.fields[-1] if self.names else None

    def parse(self, line: bytes | BadLine) -> dict[str, Any] | BadLine:
        if isinstance(line, BadLine):
            return line._replace(error=self._placed(line.error.code, line.error.detail))
        try:
            values = self._head.form.fields(line.removeprefix(BOM).decode())  # where files with one were joined
        except UnicodeDecodeError as error:
            return BadLine(self._placed(ErrorCode.INVALID_UTF8, f"byte {error.start} of the row: {error.reason}"))
        except ValueError as error:
            return BadLine(self._placed(ErrorCode.INVALID_CSV, str(error)))
        named = len(self.names)
        if len(values) == named or (named < len(values) <= self._head.width and not any(values[named:])):
            if values[-1] == self._last and named > 1 and values == self._head.fields:
                return BadLine(self._placed(ErrorCode.INVALID_CSV, "the header again, as where files were joined"))
            return dict(zip(self.names, values, strict=False))
        found = f"{counted(len(values), 'field')}, and {named} in the header"
        return BadLine(self._placed(ErrorCode.INVALID_CSV, found))

    def _placed(self, code: ErrorCode, detail: str) -> RowError:
        # The error of the record that was read last, with its place in the file.
        form = self._head.form
        return RowError(code, f"{self._where}{line_numbers(form.first_line, form.last_line)}: {detail}")

    def _rows(self, file: io.BufferedReader) -> Iterator[bytes | BadLine]:
        head, form = self._head, self._head.form
        file.read(head.skipped)
        header = next(form.records(file, MAX_ROW_BYTES, {}, self._skip_blanks_of(file), head.skipped_lines), None)
        if header is None:
            return
        kept = {place: name for place, name in enumerate(self.names) if name in self.kept}
        for record in form.records(file, self.max_row_bytes, kept, self._skip_blanks_of(file), form.last_line):
            self._blank = 0
            yield record

    def _skip_blanks_of(self, file: io.BufferedReader) -> Callable[[], int]:
        return lambda: self._skip_blanks(file)


class _Stream(io.RawIOBase):
    """The content of a file, and how much of the file it takes."""

    def __init__(self, file: Any, codec: str | None, returns: bool) -> None:
        self.taken = 0
        """Bytes of the content so far."""
        self._returns = returns
        self._file = file
        self._content = file if codec is None else pa.CompressedInputStream(_Pieces(file), codec)

    @property
    def stored(self) -> int:
        """Bytes of the file so far."""
        return int(self._file.tell())

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._content.read(len(buffer))
        if self._returns:
            content = bytes(content).replace(b"\r", b"\n")
        buffer[: len(content)] = content
        self.taken += len(content)
        return len(content)

    def close(self) -> None:
        if not self.closed:
            self._content.close()
            self._file.close()
        super().close()


class _Pieces(io.RawIOBase):
    """A compressed file in small pieces, which show how far its content has come."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        found: bytes = self._file.read(_PIECE if size < 0 else min(size, _PIECE))
        return found


def _skip_blank_lines(file: io.BufferedReader, blanks: bytes | None) -> int:
    # Read on to the first line that is not blank, or to one that does not end in the buffer. A buffer at a time: one
    # line at a time, the lines of a small compressed file could take hours. Returns their number. Raises OSError where
    # they do not end.
    skipped = lines = 0
    while ahead := file.peek():
        blank = ahead.rfind(b"\n", 0, len(ahead) - len(ahead.lstrip(blanks))) + 1
        if not blank:
            break
        lines += file.read(blank).count(b"\n")
        skipped += blank
        if skipped > _MAX_BLANK_BYTES:
            raise OSError(f"more than {_MAX_BLANK_BYTES:,} bytes of blank lines in a row")
    return lines


def _skip_long_line(file: io.BufferedReader, start: bytes, most: int, kept: Collection[str]) -> BadLine | None:
    # Read a line that begins with `start` to its end without keeping more than its short values of these names; None
    # if it is blank after all.
    blank, size, piece, values = start.isspace(), len(start), start, _ShortValues(kept)
    values.read(start)
    while not piece.endswith(b"\n") and (piece := file.readline(_BLOCK)):
        blank, size = blank and piece.isspace(), size + len(piece)
        values.read(piece)
    return None if blank else BadLine(row_too_large("the line", size, most), values.found)


_MARK = re.compile(rb'["{}\[\],]')
_NESTED_MARK = re.compile(rb'["{}\[\]]')  # a list may have very many commas
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)


class _ShortValues:
    """The short values of these names in an object that is read in pieces, and never as a whole.

    For a line that is not an object, or breaks off, it has the values before that point.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.found: dict[str, Any] = {}
        self._names = names
        self._depth = 0
        self._in_string = self._escaped = False
        self._member = bytearray()  # a name and its value, as far as they are read
        self._long = False  # more of them than are kept

    def read(self, piece: bytes) -> None:
        """Take the next bytes."""
        if not self._names:
            return
        at = start = 0  # of what is read of the piece, and of the member in it
        while at < len(piece):
            if self._escaped:
                at, self._escaped = at + 1, False
            elif self._in_string:
                at = self._end_of_text(piece, at)
            elif (mark := (_MARK if self._depth < 2 else _NESTED_MARK).search(piece, at)) is None:
                break
            else:
                at, kind = mark.end(), mark[0]
                self._in_string = kind == b'"'
                if self._depth == 1 and kind in b",}":
                    self._keep(piece, start, at - 1)
                    self._end_member()
                    start = at
                self._depth += (kind in b"{[") - (kind in b"}]")
                if self._depth == 1 and kind == b"{":
                    start = at
        self._keep(piece, start, len(piece))

    def _end_of_text(self, piece: bytes, at: int) -> int:
        end = _IN_STRING.match(piece, at).end()  # type: ignore[union-attr]  # it matches even nothing
        if end < len(piece):
            self._in_string, self._escaped = piece[end] != ord('"'), piece[end] != ord('"')
            end += 1
        return end

    def _keep(self, piece: bytes, start: int, end: int) -> None:
        if self._depth:
            self._long = self._long or len(self._member) + end - start > MAX_LEFT_BYTES
            self._member += b"" if self._long else piece[start:end]

    def _end_member(self) -> None:
        if not self._long:
            with suppress(ValueError, RecursionError):  # among them bytes that are not UTF-8
                self.found |= {
                    name: value
                    for name, value in _decode("{" + self._member.decode() + "}").items()
                    if name in self._names
                }
        self._member, self._long = bytearray(), False


def parse(line: bytes | BadLine, kept: Collection[str] = ()) -> dict[str, Any] | BadLine:
    """Parse the object on a line, or return why there is none, with its values of these names if it is not valid
    UTF-8."""
    if isinstance(line, BadLine):
        return line
    try:
        value = _decode(line.decode())
    except UnicodeDecodeError as error:
        values = _ShortValues(kept)
        values.read(line)
        return BadLine(
            RowError(ErrorCode.INVALID_UTF8, f"byte {error.start} of the line: {error.reason}"), values.found
        )
    except (ValueError, RecursionError) as error:
        if line.startswith(BOM):  # where files were joined
            return parse(line.removeprefix(BOM), kept)
        return BadLine(RowError(ErrorCode.INVALID_JSON, str(error).splitlines()[0]))
    if type(value) is dict:
        return value
    return BadLine(RowError(ErrorCode.WRONG_TYPE, f"the line holds {_NAMES[type(value)]}, not an object"))


_NAMES: dict[type, str] = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


class BatchMaker:
    """Collects lines into row batches. Values are those of JSON, or with `plain` texts and null."""

    def __init__(self, choice: ColumnChoice, selection: Selection, *, plain: bool, most_rows: int) -> None:
        self._most_rows = most_rows
        self._columns = choice.columns_and_optional
        self._optional = frozenset(choice.optional)
        self._carried = choice.carried
        self._requests = choice.requests
        self._selection = selection
        self._plain = plain
        self.parse: Callable[[bytes | BadLine], dict[str, Any] | BadLine] = parse
        self.row = 0  # number of the next line
        # Columns with the same value on all of the next lines, whatever the lines hold.
        self.constants: dict[str, Any] = {}
        self._clear()

    def _clear(self) -> None:
        self._rows: list[int] = []
        self._values: dict[str, list[Any]] = {name: [] for name in self._columns}
        self._texts: dict[str, list[Any]] = {name: [] for name in self._carried.names}
        self._errors: dict[int, RowError] = {}
        self._nbytes = 0

    def add(self, lines: Iterator[bytes | BadLine]) -> Iterator[RowBatch]:
        """Yield full batches from the selected `lines`; the remainder waits for `rest`."""
        end = self._selection.end
        chosen = self._selection.chosen
        at = 0 if chosen is None else int(np.searchsorted(chosen, self.row))
        for line in lines:
            if end is not None and self.row >= end:
                return
            if chosen is None or chosen[at] == self.row:
                at += 1
                self._append(line)
                if len(self._rows) >= self._most_rows or self._nbytes >= BATCH_BYTES:
                    yield self._take()
            self.row += 1

    def rest(self) -> Iterator[RowBatch]:
        """Yield the last, partly filled batch, if any."""
        if self._rows:
            yield self._take()

    def _append(self, line: bytes | BadLine) -> None:
        row = self.row
        self._rows.append(row)
        self._nbytes += len(line) if isinstance(line, bytes) else 0
        read = self.parse(line)
        if isinstance(read, BadLine):
            self._errors[row] = read.error
        elif self._requests and (place := _not_finite(line, self._requests)):
            detail = f"{place}: its number is not finite: NaN, Infinity, or beyond 1.8e308"
            self._errors[row] = RowError(ErrorCode.INVALID_REQUEST, detail)
        parsed = {**(read.kept if isinstance(read, BadLine) else read), **self.constants}
        for name, values in self._values.items():
            values.append(self._needed(name, parsed.get(name)))
            if name not in parsed and name not in self._optional:
                self._errors.setdefault(row, RowError(ErrorCode.MISSING_COLUMN, f"the line has no {name!r}"))
        for name, texts in self._texts.items():
            value = parsed.get(name)
            if self._plain:
                texts.append(value)
                continue
            text = None if value is None else _encode(value)
            if text is not None and "\\ud" in text and not _is_unicode(text):
                self._errors.setdefault(row, RowError(ErrorCode.INVALID_UTF8, f"column {name}: half a surrogate pair"))
                text = None
            texts.append(text)

    def _needed(self, name: str, value: Any) -> Any:
        # An empty field of CSV is an empty text, but no setting of the row; these are written as in JSON.
        if not self._plain:
            return without_nulls(value)
        if name not in self._optional or not isinstance(value, str):
            return "" if value is None and name not in self._optional else value
        with suppress(ValueError, RecursionError):
            return found if isinstance(found := _decode(value), int | float) else value
        return value

    def _take(self) -> RowBatch:
        if self._texts:
            carried = pa.table([pa.array(self._texts[own.name], own.type) for own in self._carried], self._carried)
        else:
            carried = pa.table({"": pa.nulls(len(self._rows))}).select([])
        rows = np.array(self._rows, np.int64)
        batch = RowBatch(self._rows[0], rows, self._values, carried, self._errors, self._nbytes)
        self._clear()
        return batch


def _is_unicode(text: str) -> bool:
    try:
        json.dumps(json.loads(text), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


_MAY_BE_INFINITE = re.compile(rb"NaN|Infinity|[eE]\+?\d{3}|\d{200}")


def _not_finite(line: bytes | BadLine, names: Sequence[str]) -> str:
    # The place of a number that is not finite in one of these columns of a line of JSON; empty where there is none.
    if isinstance(line, BadLine) or not _MAY_BE_INFINITE.search(line):
        return ""
    with suppress(RecursionError):  # whoever reads it will report that
        values = json.loads(line)
        return next((place for name in names if (place := _place_in(values.get(name), name))), "")
    return ""


def _place_in(value: Any, place: str) -> str:
    if isinstance(value, float):
        return "" if math.isfinite(value) else place
    inner: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        inner = ((f".{key}" if key.isidentifier() else f"[{json.dumps(key)}]", each) for key, each in value.items())
    elif isinstance(value, list):
        inner = ((f"[{number}]", each) for number, each in enumerate(value))
    return next((found for step, each in inner if (found := _place_in(each, place + step))), "")


_PEEK_ROWS = 100
_PEEK_BYTES = 16 << 20


class LineFiles:
    """The files of an input, read as one, with the methods of `ParquetFiles`."""

    _plain: bool  # whether values are texts, not JSON

    def __init__(self, files: Sequence[InputFile], readers: Sequence[LineInput], partitions: Partitions) -> None:
        self._files = tuple(files)
        self._readers = tuple(readers)
        self._partitions = partitions
        self.available, self._peeked = self._peek()
        self.total_rows: int | None = None
        self.starts: list[int] = []
        self._read: Expected | None = None  # by the rows so far

    def expected_rows(self) -> Expected | None:
        """Return the number of rows of all files, or an estimate by the share of bytes read so far. At the end of a
        selection of the first rows, their number."""
        return self._read if self.total_rows is None else Expected(self.total_rows)

    def count(self) -> int:
        if self.total_rows is None:
            self.total_rows = sum(1 for file in self._readers for _ in file.lines())
        return self.total_rows

    def columns_by_file(self) -> list[tuple[str, Sequence[str]]]:
        return [(self._files[0].path, self.available)]

    def carried_schema(
        self, columns: Sequence[str], carried: Sequence[str], optional: Sequence[str], max_row_bytes: int
    ) -> pa.Schema:
        for reader in self._readers:
            reader.max_row_bytes, reader.kept = max_row_bytes, frozenset(carried)
        keys = self._partitions.schema.names
        self._require([name for name in (*columns, *carried) if name not in keys], keys)
        return pa.schema([(name, pa.string()) for name in carried])

    def _require(self, wanted: Sequence[str], keys: Sequence[str]) -> None:
        if self._peeked:
            known = tuple(dict.fromkeys([*self.available, *keys]))
            require_columns(wanted, known, f"the first {self._peeked} lines")

    def batches(self, choice: ColumnChoice, selection: Selection, most_rows: int) -> Iterator[RowBatch]:
        self.starts = []
        maker = BatchMaker(choice, selection, plain=self._plain, most_rows=most_rows)
        for number, file in enumerate(self._readers):
            if selection.end is not None and maker.row >= selection.end:
                break
            self.starts.append(maker.row)
            maker.constants, maker.parse = self._partitions.values[number], file.parse
            for batch in maker.add(file.lines()):
                if selection.chosen is None:
                    self._estimate(maker.row + 1, number)
                yield batch
        if selection.chosen is None:
            self._read = Expected(maker.row)
        yield from maker.rest()

    def _estimate(self, rows: int, number: int) -> None:
        # The estimated number of rows, where all files before this one, and a part of it, have `rows` rows.
        read = sum(each.size for each in self._readers[:number]) + self._readers[number].bytes_read()
        if read > 0:
            total = rows * sum(each.size for each in self._readers) / read
            self._read = Expected(max(round(round(total), 2 - math.floor(math.log10(total))), rows), exact=False)

    def _peek(self) -> tuple[tuple[str, ...], int]:
        # The names of columns, and how many rows were looked at.
        raise NotImplementedError

    def _first_rows(self) -> Iterator[tuple[InputFile, bytes | BadLine, dict[str, Any] | BadLine]]:
        # The first rows as they are and as they are read, each with its file.
        size = 0
        pairs = zip(self._files, self._readers, strict=True)
        lines = ((file, reader, line) for file, reader in pairs for line in reader.lines())
        for file, reader, line in islice(lines, _PEEK_ROWS):
            yield file, line, reader.parse(line)
            size += len(line) if isinstance(line, bytes) else 0
            if size > _PEEK_BYTES:
                break


class JsonlFiles(LineFiles):
    """The files of an input in JSON Lines."""

    _plain = False

    def __init__(self, files: Sequence[InputFile], partitions: Partitions) -> None:
        super().__init__(files, [JsonlInput(file) for file in files], partitions)

    def _peek(self) -> tuple[tuple[str, ...], int]:
        names: dict[str, None] = {}
        self.first: dict[str, Any] = {}
        seen = 0
        wrong: BadLine | None = None
        for _, _, row in self._first_rows():
            seen += 1
            if isinstance(row, dict):
                names |= dict.fromkeys(row)
                self.first = self.first or row
            elif wrong is None:
                wrong = row
        if wrong is not None and not names:
            path = self._files[0].path
            start = self._readers[0].start()
            refuse_other_content(path, "jsonl", start)
            whole = start.removeprefix(BOM).lstrip().startswith(b"{")  # objects, if not one on each line
            raise UsageError(
                f"{path}: none of the first {counted(seen, 'line')} is a JSON object ({wrong.error.detail})\n"
                "JSON Lines has one JSON object on every line, in UTF-8"
                + whole
                * f"\nwrite each object on a line: jq -c . {path} > new.jsonl"
            )
        return tuple(names), seen


class CsvFiles(LineFiles):
    """The files of an input in CSV or TSV: each has its own header."""

    _plain = True
    _readers: tuple[CsvInput, ...]

    def __init__(self, files: Sequence[InputFile], partitions: Partitions, rules: CsvRules) -> None:
        super().__init__(files, [CsvInput(file, rules, among_others=len(files) > 1) for file in files], partitions)

    def columns_by_file(self) -> list[tuple[str, Sequence[str]]]:
        return [(file.path, each.names) for file, each in zip(self._files, self._readers, strict=True) if each.names]

    def carried_schema(
        self, columns: Sequence[str], carried: Sequence[str], optional: Sequence[str], max_row_bytes: int
    ) -> pa.Schema:
        keys = self._partitions.schema
        texts = super().carried_schema(columns, carried, optional, max_row_bytes)
        return pa.schema([keys.field(own.name) if own.name in keys.names else own for own in texts])

    def _require(self, wanted: Sequence[str], keys: Sequence[str]) -> None:
        for path, names in self.columns_by_file():
            require_columns(wanted, tuple(dict.fromkeys([*names, *keys])), path)

    def _peek(self) -> tuple[tuple[str, ...], int]:
        other: InputFile | None = None
        seen, known = 0, False  # whether a row has letters beyond ASCII in UTF-8
        for file, line, row in self._first_rows():
            seen += 1
            if isinstance(row, dict):
                known = known or (isinstance(line, bytes) and not line.isascii())
            elif row.error.code is ErrorCode.INVALID_UTF8:
                other = other or file
        if other is not None and not known:
            raise not_utf8(other.path, "WINDOWS-1252")
        return tuple(next((each.names for each in self._readers if each.names), ())), seen

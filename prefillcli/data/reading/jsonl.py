"""Rows out of JSON Lines files: one bad line is one error row."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from prefillcli.data.filesystems import reading
from prefillcli.data.proof import require_same
from prefillcli.data.reading.discovery import InputFile, Partitions
from prefillcli.data.rows import (
    BATCH_BYTES,
    BATCH_ROWS,
    MAX_ROW_BYTES,
    ColumnChoice,
    ErrorCode,
    RowBatch,
    RowError,
    Selection,
    require_columns,
    row_too_large,
)
from prefillcli.errors import UsageError

_BLOCK = 1 << 18
_REMOTE_BLOCK = 8 << 20  # bytes read ahead from an object store
_BOM = b"\xef\xbb\xbf"
_FEW_BLANK_LINES = 16  # one after each row are read as lines: looking ahead copies the buffer
_MAX_BLANK_BYTES = 1 << 30  # of blank lines in a row: a few kilobytes of a compressed file may be as many as one likes


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


# NaN and Infinity are no JSON: null; so are numbers that are larger than any float
_decode = json.JSONDecoder(parse_float=_finite, parse_constant=lambda _name: None).decode
_encode = json.JSONEncoder(separators=(",", ":")).encode


class JsonlInput:
    """One JSON Lines file, plain, gzip or zstd."""

    def __init__(self, found: InputFile) -> None:
        self.max_row_bytes = MAX_ROW_BYTES  # longer lines are not read into memory
        self._found = found

    def lines(self) -> Iterator[bytes | RowError]:
        """The lines that are not blank, or what is wrong with a line that is longer than `max_row_bytes`.

        Raises PrefillError if the file cannot be read to its end.
        """
        most = self.max_row_bytes
        with reading(self._found.path), self._open() as file:
            require_same(self._found)  # what is open now is what was found
            first, blank = True, 0
            while line := file.readline(most + 2):  # with its line break
                if first:
                    first, line = False, line.removeprefix(_BOM)
                if len(line) > most and (len(line.rstrip(b"\r\n")) > most or not line.endswith(b"\n")):
                    error = _skip_long_line(file, line, most)
                    if error is not None:
                        yield error
                elif line.isspace():
                    blank += 1
                    if blank > _FEW_BLANK_LINES:
                        _skip_blank_lines(file)
                elif line:
                    blank = 0
                    yield line

    def _open(self) -> io.BufferedReader:
        found = self._found
        if found.local:
            raw: Any = io.FileIO(found.inner)
        else:
            raw = found.filesystem.open(found.inner, "rb", block_size=_REMOTE_BLOCK)
        stream = raw if found.codec is None else pa.CompressedInputStream(raw, found.codec)
        return io.BufferedReader(stream, _BLOCK)


def _skip_blank_lines(file: io.BufferedReader) -> None:
    # Read on to the first line that is not blank, or to one that does not end in the buffer. A buffer at a time: one
    # line at a time, those that a small compressed file holds would take hours. Raises OSError where they do not end.
    skipped = 0
    while ahead := file.peek():
        blank = ahead.rfind(b"\n", 0, len(ahead) - len(ahead.lstrip())) + 1
        if not blank:
            return
        file.read(blank)
        skipped += blank
        if skipped > _MAX_BLANK_BYTES:
            raise OSError(f"more than {_MAX_BLANK_BYTES:,} bytes of blank lines in a row")


def _skip_long_line(file: io.BufferedReader, start: bytes, most: int) -> RowError | None:
    # Read a line that begins with `start` to its end without keeping it; None if it is blank after all.
    blank, size, piece = start.isspace(), len(start), start
    while not piece.endswith(b"\n") and (piece := file.readline(_BLOCK)):
        blank, size = blank and piece.isspace(), size + len(piece)
    return None if blank else row_too_large("the line", size, most)


def parse(line: bytes | RowError) -> dict[str, Any] | RowError:
    """The object on a line, or what is wrong with the line."""
    if isinstance(line, RowError):
        return line
    try:
        value = _decode(line.decode())
    except UnicodeDecodeError as error:
        return RowError(ErrorCode.INVALID_UTF8, f"byte {error.start} of the line: {error.reason}")
    except (ValueError, RecursionError) as error:
        return RowError(ErrorCode.INVALID_JSON, str(error).splitlines()[0])
    if type(value) is dict:
        return value
    return RowError(ErrorCode.WRONG_TYPE, f"the line holds {_NAMES[type(value)]}, not an object")


_NAMES: dict[type, str] = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


class BatchMaker:
    """Collects lines into row batches."""

    def __init__(
        self,
        columns: Sequence[str],
        carried: Sequence[str],
        selection: Selection,
        optional: Sequence[str] = (),
        *,
        most_rows: int = BATCH_ROWS,
    ) -> None:
        self._most_rows = most_rows
        self._columns = (*columns, *optional)
        self._optional = frozenset(optional)
        self._carried = tuple(carried)
        self._selection = selection
        self.row = 0  # number of the next line
        # Columns with the same value on all of the next lines, whatever the lines say.
        self.constants: dict[str, Any] = {}
        self._clear()

    def _clear(self) -> None:
        self._rows: list[int] = []
        self._values: dict[str, list[Any]] = {name: [] for name in self._columns}
        self._texts: dict[str, list[str | None]] = {name: [] for name in self._carried}
        self._errors: dict[int, RowError] = {}
        self._nbytes = 0

    def add(self, lines: Iterator[bytes | RowError]) -> Iterator[RowBatch]:
        """Full batches out of the selected `lines`; what is left over stays for `rest`."""
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
        """The last, partly filled batch, if any."""
        if self._rows:
            yield self._take()

    def _append(self, line: bytes | RowError) -> None:
        row = self.row
        self._rows.append(row)
        self._nbytes += len(line) if isinstance(line, bytes) else 0
        parsed = parse(line)
        if type(parsed) is dict:
            parsed |= self.constants
            get = parsed.get
            for name, values in self._values.items():
                values.append(get(name))
                if name not in parsed and name not in self._optional:
                    self._errors.setdefault(row, RowError(ErrorCode.MISSING_COLUMN, f"the line has no {name!r}"))
            for name, texts in self._texts.items():
                value = get(name)
                text = None if value is None else _encode(value)
                if text is not None and "\\ud" in text and not _is_unicode(text):
                    self._errors.setdefault(
                        row, RowError(ErrorCode.INVALID_UTF8, f"column {name}: half a surrogate pair")
                    )
                    text = None
                texts.append(text)
        else:
            self._errors[row] = parsed  # type: ignore[assignment]  # no dict, so a RowError
            for name, values in self._values.items():
                values.append(self.constants.get(name))
            for name, texts in self._texts.items():
                value = self.constants.get(name)
                texts.append(None if value is None else _encode(value))

    def _take(self) -> RowBatch:
        if self._carried:
            carried = pa.table({name: pa.array(texts, pa.string()) for name, texts in self._texts.items()})
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


_PEEK_ROWS = 100
_PEEK_BYTES = 16 << 20


class JsonlFiles:
    """The files of an input, read as one, with the methods of `ParquetFiles`."""

    def __init__(self, files: Sequence[InputFile], partitions: Partitions) -> None:
        self._files = tuple(files)
        self._readers = [JsonlInput(file) for file in files]
        self._partitions = partitions
        self.available, self._peeked = self._peek()
        self.total_rows: int | None = None
        self.starts: list[int] = []

    def count(self) -> int:
        if self.total_rows is None:
            self.total_rows = sum(1 for file in self._readers for _ in file.lines())
        return self.total_rows

    def columns_by_file(self) -> list[tuple[str, Sequence[str]]]:
        return [(self._files[0].path, self.available)]

    def carried_schema(
        self, columns: Sequence[str], carried: Sequence[str], optional: Sequence[str], max_row_bytes: int
    ) -> pa.Schema:
        keys = self._partitions.schema.names
        wanted = [name for name in (*columns, *carried) if name not in keys]
        if self._peeked:
            known = tuple(dict.fromkeys([*self.available, *keys]))
            require_columns(wanted, known, f"the first {self._peeked} lines")
        for reader in self._readers:
            reader.max_row_bytes = max_row_bytes
        return pa.schema([(name, pa.string()) for name in carried])

    def batches(self, choice: ColumnChoice, selection: Selection, most_rows: int) -> Iterator[RowBatch]:
        self.starts = []
        maker = BatchMaker(choice.columns, choice.carried.names, selection, choice.optional, most_rows=most_rows)
        for number, lines in enumerate(self._readers):
            if selection.end is not None and maker.row >= selection.end:
                break
            self.starts.append(maker.row)
            maker.constants = self._partitions.values[number]
            yield from maker.add(lines.lines())
        yield from maker.rest()

    def _peek(self) -> tuple[tuple[str, ...], int]:
        names: dict[str, None] = {}
        seen = size = 0
        wrong: RowError | None = None
        for line in islice((line for file in self._readers for line in file.lines()), _PEEK_ROWS):
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
                f"{self._files[0].path}: none of the first {seen} lines is a JSON object ({wrong.detail})\n"
                "JSON Lines has one JSON object on every line, in UTF-8"
            )
        return tuple(names), seen

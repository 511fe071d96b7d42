"""Records of CSV and TSV files: where they end, and their fields.

Quotes are those of RFC 4180: a field that begins with a quote may hold delimiters and line breaks, and a quote in it
is doubled. Anywhere else, and in the whole of a file without quoting, a quote is a character like any other.
`pyarrow.csv` would end at the first wrong row.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from prefillcli.rows.input.selection import MAX_LEFT_BYTES
from prefillcli.rows.records import BadLine, ErrorCode, RowError, row_too_large

_PIECE = 1 << 18  # bytes of a record that is too large
LINE_ENDS = b"\r\n"


ONE_COLUMN = "\n"  # as a delimiter: no field holds one without quotes, so that each record is one field


def line_numbers(first: int, last: int) -> str:
    """Return the lines of a record for a message: `line 5`, or `lines 5 to 7`."""
    return f"line {first}" if first == last else f"lines {first} to {last}"


class Delimited:
    """The form of a file: its delimiter, a character of ASCII, and whether fields may be in `quotes`."""

    def __init__(self, delimiter: str, *, quotes: bool = True) -> None:
        self.delimiter = delimiter
        self.quotes = quotes
        # The numbers, from 1, of the first and the last line of the record that `records` gave last.
        self.first_line = self.last_line = 0
        own = re.escape(delimiter)
        self._field = re.compile(rf'"((?:[^"]++|"")*+)"|([^"{own}][^{own}]*+)?+')
        # Unquoted fields, up to the delimiter before a quoted one.
        self.unquoted = re.compile(rf'[^{own}]*+(?:{own}(?!")[^{own}]*+)*+'.encode() if quotes else b"(?s:.*)")

    def fields(self, record: str) -> list[str | None]:
        """Return the fields of a whole record; an empty one without quotes is None.

        Raises ValueError for a field that is not written as RFC 4180 wants it.
        """
        record = record.removesuffix("\n").rstrip("\r")  # two of them, where Windows wrote a line break in two steps
        if not self.quotes or '"' not in record:
            if "\r" in record:
                raise ValueError("a carriage return outside quotes")
            return [text or None for text in record.split(self.delimiter)]
        found: list[str | None] = []
        at = 0
        while True:
            field: Any = self._field.match(record, at)  # it matches even nothing
            (quoted, plain), at = field.groups(), field.end()
            if plain is not None and "\r" in plain:
                raise ValueError("a carriage return outside quotes")
            found.append(plain if quoted is None else quoted.replace('""', '"'))
            if at == len(record):
                return found
            if record[at] != self.delimiter:
                escaped = ", not written with backslashes" if '\\"' in record else ""
                doubled = f"is followed by text: quotes inside are doubled{escaped}"
                what = "is never closed" if quoted is None else doubled
                raise ValueError(f"the quote of field {len(found)} {what}")
            at += 1

    def records(
        self, file: IO[bytes], most: int, kept: Mapping[int, str], blank: Callable[[], int], before: int = 0
    ) -> Iterator[bytes | BadLine]:
        """Yield the records of a file; of one with more than `most` bytes the short values at the `kept` places, by
        their names. `before` is the number of lines before them. `blank` is called after each blank line, and returns
        how many lines it skips itself.

        Where a quote is never closed, the lines after that of the record's beginning are records of their own. Raises
        OSError if the record is too large for that.
        """
        again = io.BytesIO()  # lines that are read once more
        at = before

        def lines(most: int) -> bytes:
            return again.readline(most) or file.readline(most)

        while line := lines(most + 2):
            at += 1
            if not line.strip(LINE_ENDS):
                at += blank()
                continue
            self.first_line = self.last_line = at
            if (not self.quotes or b'"' not in line) and line.endswith(b"\n") and len(line) <= most:  # most records
                yield line
                continue
            quotes, record = Quotes(self), bytearray(line)
            quotes.read(line)
            while quotes.inside and len(record) <= most and (line := lines(most + 2 - len(record))):
                quotes.read(line)
                record += line
            if len(record) > most and (quotes.inside or len(record.rstrip(LINE_ENDS)) > most):
                large = self._too_large(file, bytes(record), most, kept)
                at = self.last_line
                yield large
            elif quotes.inside:
                again = io.BytesIO(record)
                again.readline()
                yield BadLine(RowError(ErrorCode.INVALID_CSV, "its last quote is never closed"))
            else:
                at = self.last_line = at + record.count(b"\n", 0, -1)
                yield bytes(record)

    def _too_large(self, file: IO[bytes], start: bytes, most: int, kept: Mapping[int, str]) -> BadLine:
        # Read a record that begins with `start` to its end, without keeping more than its short values.
        quotes, values, size, piece = Quotes(self), _ShortFields(self, kept), 0, start
        while piece:
            values.read(piece, quotes.read(piece))
            size += len(piece)
            if piece.endswith(b"\n") and not quotes.inside:
                self.last_line += piece.count(b"\n", 0, -1)
                break
            self.last_line += piece.count(b"\n")
            piece = file.readline(_PIECE)
        if quotes.inside:
            raise OSError(f"a quote is never closed, and more than {most:,} bytes follow it")
        return BadLine(row_too_large("the row", size, most), values.found())


class Quotes:
    """Follows the quotes of a record that is read piece by piece."""

    def __init__(self, form: Delimited) -> None:
        self._quotes = form.quotes
        self._unquoted = form.unquoted
        self._delimiter = form.delimiter.encode()
        self._quoted = False
        self._at_start = True  # of a field
        self._closing = False  # after a quote in a quoted field, which another one may follow

    @property
    def inside(self) -> bool:
        """True if the record goes on after what was read, because a quoted field does."""
        return self._quoted and not self._closing

    def read(self, piece: bytes) -> list[tuple[bool, int, int]]:
        """Take the next bytes; return where quoted and other stretches begin and end, quoted ones with their
        quotes."""
        found, at, size = [], 0, len(piece)
        while at < size:
            start = at
            if self._quoted:
                at = self._end_of_quotes(piece, at)
                found.append((True, start, at))
            elif self._at_start and self._quotes and piece[at] == _QUOTE:
                self._quoted, self._at_start, at = True, False, at + 1
                found.append((True, start, at))
            else:
                at = self._unquoted.match(piece, at).end()  # type: ignore[union-attr]  # it matches even nothing
                if at < size:
                    at += 1  # the delimiter before a quote
                self._at_start = piece[at - 1 : at] == self._delimiter
                found.append((False, start, at))
        return found

    def _end_of_quotes(self, piece: bytes, at: int) -> int:
        if self._closing:
            self._closing = False
            if piece[at] != _QUOTE:
                self._quoted = False
                return at
            at += 1
        at = _QUOTED.match(piece, at).end()  # type: ignore[union-attr]  # it matches even nothing
        if at == len(piece):
            return at
        self._quoted, self._closing = at + 1 == len(piece), at + 1 == len(piece)
        return at + 1


_QUOTE = ord('"')
_QUOTED = re.compile(rb'(?:[^"]++|"")*+')


class _ShortFields:
    """The short fields at some places of a record that is never held as a whole."""

    def __init__(self, form: Delimited, kept: Mapping[int, str]) -> None:
        self._form = form
        self._kept = kept
        self._last = max(kept, default=-1)
        self._place = 0
        self._field = bytearray()
        self._found: dict[str, str | None] = {}

    def read(self, piece: bytes, stretches: Sequence[tuple[bool, int, int]]) -> None:
        """Take the next bytes, with the stretches of `Quotes.read`."""
        delimiter = self._form.delimiter.encode()
        for quoted, start, end in stretches:
            if self._place > self._last:
                return
            first, *rest = [piece[start:end]] if quoted else piece[start:end].split(delimiter)
            self._take(first)
            for each in rest:
                self._end()
                self._take(each)

    def found(self) -> dict[str, str | None]:
        """Return the values by name, once the record has ended."""
        self._end()
        return self._found

    def _take(self, part: bytes) -> None:
        if len(self._field) <= MAX_LEFT_BYTES:
            self._field += part

    def _end(self) -> None:
        name = self._kept.get(self._place)
        if name is not None and len(self._field) <= MAX_LEFT_BYTES:
            with suppress(ValueError):  # among them bytes that are not UTF-8
                (self._found[name],) = self._form.fields(self._field.decode())
        self._place, self._field = self._place + 1, bytearray()

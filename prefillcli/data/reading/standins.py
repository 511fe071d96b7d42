"""A view of a Parquet file in which pages that are too large to open hold nulls, so that the others can be read."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

from prefillcli.data.reading.pages import DATA_V2, DICTIONARY, Page, Pages

_PLAIN, _DELTA_LENGTH_BYTE_ARRAY = 0, 6
_I32, _STRUCT, _FALSE = 5, 12, 2


def can_stand_in(column: Any) -> bool:
    """Whether a page of `column` (pyarrow's ColumnSchema) can be replaced by nulls, or by empty texts.

    The number of rows in a page of a list is not known, and a column of numbers without nulls has no small stand-in.
    """
    if column.max_repetition_level > 0:
        return False
    return bool(column.max_definition_level > 0 or column.physical_type == "BYTE_ARRAY")


class Replaced(NamedTuple):
    """A column chunk of which some pages are replaced."""

    pages: Pages
    places: frozenset[int]
    """Which of the pages."""
    nullable: bool
    """Whether the column can hold nulls."""


@dataclass(frozen=True, slots=True)
class _Piece:
    start: int
    """Where it begins in the view."""
    length: int
    source: int | bytes
    """Where it begins in the file, or what stands there instead."""


class FileWithStandIns(io.RawIOBase):
    """A view of `file` of `size` bytes in which the pages of `replaced` that are not opened have stand-ins.

    Raises ValueError if they do not fit in the place of the pages.
    """

    def __init__(self, file: BinaryIO, size: int, replaced: Sequence[Replaced]) -> None:
        self._file = file
        self._size = size
        self._at = 0
        pieces: list[_Piece] = []
        end = 0
        for pages, places, nullable in sorted(replaced, key=lambda item: item.pages.start):
            _append(pieces, pages.start - end, end)
            for place, page in enumerate(pages.pages):
                if place in places:
                    stand_in = _stand_in(page, nullable)
                    _append(pieces, len(stand_in), stand_in)
                else:
                    _append(pieces, page.end - page.offset, page.offset)
            end = pages.end
            rest = end - (pieces[-1].start + pieces[-1].length)  # after the chunk's last value, so it is not read
            if rest < 0:
                raise ValueError("the stand-ins are longer than the pages")
            _append(pieces, rest, pages.pages[-1].end)
        _append(pieces, size - end, end)
        self._pieces = pieces
        self._starts = [piece.start for piece in pieces]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        if self._at >= self._size or len(view) == 0:
            return 0
        piece = self._pieces[bisect_right(self._starts, self._at) - 1]
        skipped = self._at - piece.start
        length = min(len(view), piece.length - skipped)
        if isinstance(piece.source, bytes):
            data = piece.source[skipped : skipped + length]
        else:
            self._file.seek(piece.source + skipped)
            data = self._file.read(length)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def _append(pieces: list[_Piece], length: int, source: int | bytes) -> None:
    if length:
        start = pieces[-1].start + pieces[-1].length if pieces else 0
        pieces.append(_Piece(start, length, source))


def _stand_in(page: Page, nullable: bool) -> bytes:
    """A page of as many nulls, or empty texts, as `page` has values; for a dictionary an empty one."""
    if page.kind == DICTIONARY:
        return _header(DICTIONARY, 0, 7, _fields({1: 0, 2: _PLAIN}))
    levels = data = _varint(page.values << 1) + b"\0"  # one run of level 0
    encoding = _PLAIN
    if not nullable:
        levels, data = b"", _no_lengths(page.values)
        encoding = _DELTA_LENGTH_BYTE_ARRAY
    nulls = page.values if nullable else 0
    inner = _fields({1: page.values, 2: nulls, 3: page.values, 4: encoding, 5: len(levels), 6: 0, 7: False})
    return _header(DATA_V2, len(data), 8, inner) + data


def _no_lengths(values: int) -> bytes:
    """Lengths of that many empty texts: blocks of 128 whose differences take no bits."""
    return _varint(128) + _varint(4) + _varint(values) + _varint(0) + bytes(5 * -(-(values - 1) // 128))


def _header(kind: int, size: int, field: int, inner: bytes) -> bytes:
    return _fields({1: kind, 2: size, 3: size})[:-1] + bytes([(field - 3) << 4 | _STRUCT]) + inner + b"\0"


def _fields(values: dict[int, int | bool]) -> bytes:
    """A struct of integers and false booleans in Thrift's compact protocol."""
    data = b""
    before = 0
    for number, value in values.items():
        kind = _FALSE if value is False else _I32
        data += bytes([(number - before) << 4 | kind]) + (b"" if value is False else _varint(value << 1))
        before = number
    return data + b"\0"


def _varint(number: int) -> bytes:
    data = bytearray()
    while number > 127:
        data.append(number & 127 | 128)
        number >>= 7
    data.append(number)
    return bytes(data)

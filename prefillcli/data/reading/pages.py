"""The pages of a Parquet column chunk, by their headers alone: how much reading them takes is known beforehand.

A page is decompressed as a whole, and a page of a few kilobytes may hold gigabytes. Arrow does not tell the sizes of
single pages, so their headers are read here (parquet.thrift, in Thrift's compact protocol).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from prefillcli.data.reading.footer import chunk_range

DATA, INDEX, DICTIONARY, DATA_V2 = range(4)
_PLAIN_DICTIONARY, _DELTA_BYTE_ARRAY, _RLE_DICTIONARY = 2, 7, 8
_READ_BYTES = 1 << 12
_MAX_HEADER_BYTES = 16 << 20  # as Arrow has it


@dataclass(frozen=True, slots=True)
class Page:
    """A page as its header describes it. Sizes in bytes."""

    offset: int
    """Where the header begins in the file."""
    end: int
    """Where the page ends in the file."""
    kind: int
    size: int
    """Uncompressed."""
    values: int
    """Values, nulls included; in a column without lists the rows."""
    encoding: int

    @property
    def of_dictionary(self) -> bool:
        """Whether its values are places in the dictionary."""
        return self.kind != DICTIONARY and self.encoding in (_PLAIN_DICTIONARY, _RLE_DICTIONARY)


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of a column chunk: the dictionary, if there is one, then those with data."""

    start: int
    end: int
    """Where the chunk begins and ends in the file."""
    pages: tuple[Page, ...]

    @property
    def size(self) -> int:
        """Bytes of all pages, uncompressed."""
        return sum(page.size for page in self.pages)

    @property
    def densest(self) -> float:
        """Bytes of a value in the page with the largest values, on average over the page."""
        return max((page.size / max(page.values, 1) for page in self.pages if page.kind != DICTIONARY), default=0)

    @property
    def dictionary(self) -> Page | None:
        return next((page for page in self.pages if page.kind == DICTIONARY), None)

    @property
    def longest_repeated(self) -> int:
        """Bytes of the longest value that may be stored once and read many times; 0 if every value is stored."""
        dictionary = self.dictionary
        sizes = [page.size for page in self.pages if page.encoding == _DELTA_BYTE_ARRAY]
        if dictionary is not None and any(page.of_dictionary for page in self.pages):
            sizes.append(dictionary.size)
        return max(sizes, default=0)

    def not_opened(self, most: int) -> frozenset[int]:
        """Places of the pages that cannot be read without opening a page of more than `most` bytes."""
        dictionary = self.dictionary
        unreadable = dictionary is not None and dictionary.size > most
        return frozenset(
            at for at, page in enumerate(self.pages) if page.size > most or (unreadable and page.of_dictionary)
        )

    def rows_in(self, places: Collection[int]) -> Iterator[tuple[int, int, int]]:
        """Of the data pages at `places` first row, the row after the last, and the size of the largest page needed.

        For a column without lists; rows are counted from the chunk's first.
        """
        start = 0
        for place, page in enumerate(self.pages):
            if page.kind in (DATA, DATA_V2):
                if place in places:
                    dictionary = self.dictionary if page.of_dictionary else None
                    yield start, start + page.values, max(page.size, dictionary.size if dictionary else 0)
                start += page.values


def read_pages(file: BinaryIO, chunk: Any) -> Pages:
    """The pages of a column chunk (pyarrow's ColumnChunkMetaData), up to the first header that makes no sense.

    What comes after such a header is left to Arrow, which then says what is wrong with it. Raises OSError where the
    pages have more or fewer values than the chunk.
    """
    start, end = chunk_range(chunk)
    pages, offset, values = [], start, 0
    while offset < end:
        page = _page_at(file, offset)
        if page is None:
            break
        pages.append(page)
        values += page.values if page.kind in (DATA, DATA_V2) else 0
        offset = page.end
    if values > chunk.num_values or (offset >= end and values < chunk.num_values):
        said = f"{chunk.num_values:,} in the footer"
        raise OSError(f"column {chunk.path_in_schema}: {values:,} values in its pages, but {said}")
    return Pages(start, end, tuple(pages))


def _page_at(file: BinaryIO, offset: int) -> Page | None:
    length = _READ_BYTES
    while length <= _MAX_HEADER_BYTES:
        file.seek(offset)
        data = file.read(length)
        try:
            header, size = _struct(data, 0)
        except IndexError:  # the header is longer than what was read
            if len(data) < length:
                return None
            length *= 8
            continue
        except (KeyError, RecursionError):
            return None
        return _page(header, offset, size)
    return None


def _page(header: dict[int, Any], offset: int, header_size: int) -> Page | None:
    """Field numbers are those of `PageHeader` in parquet.thrift."""
    kind, size, stored = header.get(1), header.get(2), header.get(3)
    if not (isinstance(kind, int) and isinstance(size, int) and isinstance(stored, int)) or size < 0 or stored < 0:
        return None
    inner = header.get({DATA: 5, DICTIONARY: 7, DATA_V2: 8}.get(kind, 0)) or {}
    if not isinstance(values := inner.get(1, 0), int) or values < 0:
        return None
    encoding = inner.get(4 if kind == DATA_V2 else 2, 0)
    return Page(offset, offset + header_size + stored, kind, size, values, encoding)


def _struct(data: bytes, at: int) -> tuple[dict[int, Any], int]:
    """The fields of a struct by number, and where it ends. Raises IndexError at the end of `data`."""
    fields: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            step, at = _varint(data, at)
            number = _signed(step)
        fields[number], at = _value(data, at, head & 15)
    return fields, at + 1


def _value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    """A value of one of Thrift's compact types. Raises KeyError for an unknown type."""
    if kind in (1, 2):  # a boolean field is its type
        return kind == 1, at
    if kind == 3:
        return data[at], at + 1
    if kind in (4, 5, 6):
        number, at = _varint(data, at)
        return _signed(number), at
    if kind == 7:
        return None, at + 8
    if kind == 8:
        length, at = _varint(data, at)
        if at + length > len(data):
            raise IndexError
        return None, at + length
    if kind in (9, 10):
        return _list(data, at)
    if kind == 12:
        return _struct(data, at)
    raise KeyError(kind)


def _list(data: bytes, at: int) -> tuple[None, int]:
    head = data[at]
    at += 1
    length = head >> 4
    if length == 15:
        length, at = _varint(data, at)
    for _ in range(length):
        _, at = (None, at + 1) if head & 15 in (1, 2) else _value(data, at, head & 15)
        if at > len(data):
            raise IndexError
    return None, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at
        if shift > 63:
            raise KeyError("varint")


def _signed(number: int) -> int:
    return (number >> 1) ^ -(number & 1)

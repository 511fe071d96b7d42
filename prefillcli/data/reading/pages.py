"""How large the pages of a Parquet column chunk are, by their headers alone.

A page is decompressed as a whole, and a page of a few kilobytes may hold gigabytes. Arrow does not tell the sizes of
single pages, so their headers are read here (parquet.thrift, in Thrift's compact protocol).
"""

from __future__ import annotations

from typing import Any, BinaryIO, NamedTuple

from prefillcli.data.reading.footer import chunk_range

DATA, DICTIONARY, DATA_V2 = 0, 2, 3
_DELTA_BYTE_ARRAY = 7
_READ_BYTES = 1 << 12
_MAX_HEADER_BYTES = 16 << 20  # as Arrow has it


class Page(NamedTuple):
    """A page as its header describes it."""

    kind: int
    size: int
    """Bytes, uncompressed."""
    values: int
    """Values, nulls included; in a column without lists the rows."""
    stores_once: bool
    """Whether it may store a value once that is read many times."""


def read_pages(file: BinaryIO, chunk: Any) -> list[Page]:
    """The pages of a column chunk (pyarrow's ColumnChunkMetaData), up to the first header that makes no sense.

    What comes after such a header is left to Arrow, which then says what is wrong with it. Raises OSError where the
    pages have more or fewer values than the chunk.
    """
    offset, end = chunk_range(chunk)
    pages = []
    while offset < end and (found := _page_at(file, offset)):
        page, offset = found
        pages.append(page)
    values = sum(page.values for page in pages if page.kind in (DATA, DATA_V2))
    if values > chunk.num_values or (offset >= end and values < chunk.num_values):
        said = f"{chunk.num_values:,} in the footer"
        raise OSError(f"column {chunk.path_in_schema}: {values:,} values in its pages, but {said}")
    return pages


def _page_at(file: BinaryIO, offset: int) -> tuple[Page, int] | None:
    """The page whose header is at `offset`, and where the next one begins."""
    length = _READ_BYTES
    while length <= _MAX_HEADER_BYTES:
        file.seek(offset)
        data = file.read(length)
        try:
            header, header_size = _value(data, 0, 12)
        except IndexError:  # the header is longer than what was read
            if len(data) < length:
                return None
            length *= 8
            continue
        except (KeyError, RecursionError):
            return None
        # Field numbers are those of `PageHeader` in parquet.thrift.
        kind, size, stored = (header.get(number) for number in (1, 2, 3))
        inner = header.get({DATA: 5, DICTIONARY: 7, DATA_V2: 8}.get(kind, 0), {})
        if not isinstance(inner, dict):
            return None
        values, encoding = inner.get(1, 0), inner.get(4 if kind == DATA_V2 else 2, 0)
        if not all(isinstance(number, int) and number >= 0 for number in (kind, size, stored, values)):
            return None
        once = kind == DICTIONARY or encoding == _DELTA_BYTE_ARRAY
        return Page(kind, size, values, once), offset + header_size + stored
    return None


def _value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    """A value of one of Thrift's compact types, and where it ends; of a struct, its fields by number.

    Texts and lists are passed over: no size is in them. Raises IndexError at the end of `data`, KeyError for an
    unknown type.
    """
    if kind in (1, 2):  # a boolean field is its type
        return kind == 1, at
    if kind == 3:
        return data[at], at + 1
    if kind in (4, 5, 6):
        number, at = _varint(data, at)
        return (number >> 1) ^ -(number & 1), at
    if kind == 7:
        return None, at + 8
    if kind == 8:
        length, at = _varint(data, at)
        if at + length > len(data):
            raise IndexError
        return None, at + length
    if kind in (9, 10):
        length, inner = data[at] >> 4, data[at] & 15
        at += 1
        if length == 15:
            length, at = _varint(data, at)
        for _ in range(length):
            at = at + 1 if inner in (1, 2) else _value(data, at, inner)[1]
            if at > len(data):
                raise IndexError
        return None, at
    if kind != 12:
        raise KeyError(kind)
    fields: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        at += 1
        step = head >> 4
        if not step:
            step, at = _value(data, at, 4)
        number += step
        fields[number], at = _value(data, at, head & 15)
    return fields, at + 1


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

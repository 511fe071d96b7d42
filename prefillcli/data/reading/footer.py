"""What the footer of a Parquet file and the headers of its pages say of its rows, and whether they agree.

Arrow believes each number by itself: of row groups that say fewer rows than their columns hold, it reads fewer. A page
is decompressed as a whole, and a page of a few kilobytes may hold gigabytes. Arrow does not tell the sizes of single
pages, so their headers are read here (parquet.thrift, in Thrift's compact protocol).
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, BinaryIO, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

_MAGIC_BYTES = 4  # before the first page
_TAIL_BYTES = 8  # after the footer: its length and the magic


@dataclass(frozen=True, slots=True)
class Footer:
    """What is left of a footer when it was checked."""

    rows: int
    wrong: dict[str, str]
    """By the path of a column what is wrong with its chunks; other columns can be read."""

    @classmethod
    def check(cls, metadata: pq.FileMetaData, size: int) -> Footer:
        """Check the footer of a file of `size` bytes, of which nothing else is read.

        Raises OSError unless the row groups have the rows of the file.
        """
        groups = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        if min(groups, default=0) < 0 or sum(groups) != metadata.num_rows:
            listed = ", ".join(f"{rows:,}" for rows in groups[:5]) + (", ..." if len(groups) > 5 else "")
            raise OSError(f"its footer says {metadata.num_rows:,} rows, but {listed or 'none'} in its row groups")
        return cls(metadata.num_rows, dict(_wrong_chunks(metadata, size)))

    def require(self, names: Sequence[str]) -> None:
        """Raise OSError if one of these columns cannot be read as the footer says; without names, if any cannot."""
        for path, what in self.wrong.items():
            if not names or any(is_part_of(path, name) for name in names):
                raise OSError(what)


def is_part_of(path: str, name: str) -> bool:
    """Whether the column chunks of this path are of the column `name`, which may be nested."""
    return f"{path}.".startswith(f"{name}.")


def chunk_range(chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """Where the pages of a column chunk begin and end in the file."""
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
        start = chunk.dictionary_page_offset
    return start, start + chunk.total_compressed_size


def _wrong_chunks(metadata: pq.FileMetaData, size: int) -> Iterator[tuple[str, str]]:
    """Paths of columns, and what is wrong with a chunk of each."""
    schema = metadata.schema
    columns = [schema.column(number) for number in range(metadata.num_columns)]
    paths, nested = [each.path for each in columns], [each.max_repetition_level > 0 for each in columns]
    taken = [(0, _MAGIC_BYTES, ""), (size - _TAIL_BYTES - metadata.serialized_size, size, "")]
    for number, refused in enumerate(_refused(metadata, size, len(columns))):
        group = metadata.row_group(number)
        for at, path in enumerate(paths):
            if at in refused:
                yield path, refused[at]
                continue
            chunk = group.column(at)
            values = chunk.num_values
            # A list has a value for each of its elements, and an empty one has one too.
            if values < group.num_rows or (values > group.num_rows and not nested[at]):
                yield path, f"column {path}: {values:,} values in a row group of {group.num_rows:,} rows"
            if values:
                taken.append((*chunk_range(chunk), path))
    taken.sort()
    for (_, end, path), (start, _, other) in pairwise(taken):
        if start < end:
            for each in filter(None, (path, other)):
                yield each, f"column {each}: its place in the file is that of other data as well"


def _refused(metadata: pq.FileMetaData, size: int, columns: int) -> Iterator[dict[int, str]]:
    """For each row group the numbers of columns whose chunks Arrow does not take, and why.

    Asking pyarrow for such a chunk ends the process: `RowGroupMetaData.column` lets no C++ exception through. But
    making its reader raises, and a reader with a buffer reads nothing before the readers of all columns are made.
    """
    source = pa.PythonFile(_Unread(size), mode="r")
    reader = pq.ParquetFile(source, metadata=metadata, pre_buffer=False, buffer_size=_TAIL_BYTES).reader

    def refuse(group: int, chosen: Sequence[int]) -> str | None:
        try:
            with suppress(_ReadError):
                reader.read_row_group(group, column_indices=chosen, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            return str(error) or type(error).__name__
        return None

    for group in range(metadata.num_row_groups):
        found: dict[int, str] = {}
        if refuse(group, range(columns)) is not None:
            found = {at: what for at in range(columns) if (what := refuse(group, [at])) is not None}
        yield found


class _ReadError(Exception):
    """A reader wants to read."""


class _Unread(io.RawIOBase):
    """A file of `size` bytes, none of which can be read."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, count: int = -1) -> NoReturn:
        raise _ReadError


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

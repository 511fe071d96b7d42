"""What the footer of a Parquet file says of its rows, and whether its numbers agree.

Arrow believes each of them by itself: of row groups that say fewer rows than their columns hold, it reads fewer.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn

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

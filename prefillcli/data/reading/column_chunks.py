"""What a Parquet footer says of column chunks, if Arrow takes it.

Where it does not, asking pyarrow for it ends the process: `RowGroupMetaData.column` lets no C++ exception through. But
making a reader for the chunk raises.
"""

from __future__ import annotations

import io
from contextlib import suppress
from typing import NoReturn

import pyarrow as pa
import pyarrow.parquet as pq


class ColumnChunks:
    """The column chunks of a Parquet file of `size` bytes. Nothing of the file is read."""

    def __init__(self, metadata: pq.FileMetaData, size: int) -> None:
        self._metadata = metadata
        source = pa.PythonFile(_Unread(size), mode="r")
        self._reader = pq.ParquetFile(source, metadata=metadata, pre_buffer=False).reader

    def of(self, group: int, number: int) -> pq.ColumnChunkMetaData:
        """What the footer says of a chunk, by the numbers of row group and column. Raises OSError if it is damaged."""
        with suppress(_ReadError):  # the reader is there, and would read
            self._reader.read_row_group(group, column_indices=[number], use_threads=False)
        return self._metadata.row_group(group).column(number)


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

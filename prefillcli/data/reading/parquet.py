"""Rows out of a Parquet file, a bounded number of bytes at a time.

The sizes of all pages are looked at before any is read. Pages that are too large to open are read as nulls, and their
rows are error rows; where that cannot be done (lists, numbers that are never null) those of the whole row group are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from prefillcli.data.filesystems import reading
from prefillcli.data.proof.contents import require_same
from prefillcli.data.reading.discovery import InputFile
from prefillcli.data.reading.footer import Footer
from prefillcli.data.reading.record_batches import row_batches
from prefillcli.data.reading.row_groups import RowGroup, UnopenedRows
from prefillcli.data.reading.selection import BATCH_ROWS, Selection
from prefillcli.data.reading.standins import FileWithStandIns
from prefillcli.data.rows import MAX_ROW_BYTES, RowBatch

_MAX_PAGE_BYTES = 128 << 20  # DuckDB's pages have up to 100 MB, others' 1 MiB
_HEADER_BUFFER = 1 << 16  # bytes read at a time from a remote file for the headers of pages
_BUFFER = 1 << 20  # bytes read ahead per column, so that a large row group is not loaded whole
# Of remote files. Columns are read in turns, so blocks of each stay in memory: reading ahead would drop and get them
# again.
_BLOCKS: dict[str, Any] = {"block_size": 4 << 20, "cache_type": "blockcache", "cache_options": {"maxblocks": 16}}
_READING: dict[str, Any] = {"buffer_size": _BUFFER, "pre_buffer": False}


class ParquetInput:
    """One Parquet file: its footer now, its rows when asked for."""

    def __init__(self, found: InputFile) -> None:
        self.max_row_bytes = MAX_ROW_BYTES
        """Longer rows become error rows."""
        self.found = found
        with reading(found.path), _open_parquet(found) as file:
            self.schema: pa.Schema = file.schema_arrow
            self._footer = Footer.check(file.metadata, found.size)
        self.rows = self._footer.rows

    def require(self, names: Sequence[str]) -> None:
        """Raise PrefillError if the footer says of these columns what cannot be; without names, of any."""
        with reading(self.found.path):
            self._footer.require(names)

    def batches(
        self, first_row: int, columns: Sequence[str], carried: pa.Schema, selection: Selection, most_rows: int
    ) -> Iterator[RowBatch]:
        """The selected rows, where the file's first row has the number `first_row`, at most `most_rows` at a time.

        Raises PrefillError naming the file if it is damaged; batches before the damage have been yielded.
        """
        with reading(self.found.path), _open_parquet(self.found) as file:
            metadata = file.metadata
        groups = _GroupReader(self, metadata, columns, carried.names)
        start = first_row
        for number in range(metadata.num_row_groups):
            size = metadata.row_group(number).num_rows
            if size and selection.before(start) == selection.before(start + size):  # where it says 0, pages are asked
                start += size
                continue
            end = start + size
            pieces, unopened = groups.read(number, start)
            for piece in pieces:
                yield from row_batches(
                    piece, start, columns, carried, selection, unopened, self.max_row_bytes, most_rows
                )
                start += piece.num_rows
                if selection.end is not None and start >= selection.end:
                    return
            if start != end:  # a page header that lies: Arrow gives fewer rows and no error
                with reading(self.found.path):
                    raise OSError(f"a row group of {size:,} rows has {start - end + size:,}")


class _GroupReader:
    """Reads row groups of a file. Of `columns`, not of `carried`, texts that repeat come as dictionaries."""

    def __init__(
        self, file: ParquetInput, metadata: pq.FileMetaData, columns: Sequence[str], carried: Sequence[str]
    ) -> None:
        self._found = file.found
        self._schema = file.schema
        self._metadata = metadata
        self._max_page = max(_MAX_PAGE_BYTES, 2 * file.max_row_bytes)
        self._names = list(dict.fromkeys([*columns, *carried]))
        self._texts = [name for name in columns if _is_text_column(file.schema.field(name).type)]
        self._files: dict[tuple[str, ...], pq.ParquetFile] = {}

    def read(self, number: int, first_row: int) -> tuple[Iterator[pa.RecordBatch], list[UnopenedRows]]:
        """The rows of a group, a bounded number of bytes at a time, and which of them are not read but nulls."""
        with reading(self._found.path):
            with self._open(_HEADER_BUFFER) as file:
                group = RowGroup.survey(file, self._metadata, number, self._names, self._max_page)
            repeated = tuple(name for name in self._texts if group.repeats(name))
            parquet = self._file(group, repeated)
        if parquet is None:
            return self._nulls(group.rows), group.all_unopened(first_row)
        return self._pieces(parquet, number, group, repeated), group.unopened(first_row)

    def _file(self, group: RowGroup, repeated: tuple[str, ...]) -> pq.ParquetFile | None:
        """The file in which the group's pages can be opened; None if there is none."""
        options = {"metadata": self._metadata, "read_dictionary": list(repeated)}
        if not group.can_be_opened():
            return None
        replaced = group.replaced()
        if replaced:
            try:
                view = FileWithStandIns(self._open(_BUFFER), self._found.size, replaced)
            except ValueError:
                return None
            return pq.ParquetFile(pa.PythonFile(view, mode="r"), **_READING, **options)
        if repeated not in self._files:
            self._files[repeated] = _open_parquet(self._found, **options)
        return self._files[repeated]

    def _open(self, block_size: int) -> BinaryIO:
        found = self._found
        options = {} if found.local else {"block_size": block_size}
        file: BinaryIO = found.filesystem.open(found.inner, "rb", **options)
        require_same(found)  # what is open now is what was found
        return file

    def _pieces(
        self, file: pq.ParquetFile, number: int, group: RowGroup, repeated: tuple[str, ...]
    ) -> Iterator[pa.RecordBatch]:
        rows = group.rows_at_once(repeated)
        if not self._names:  # a template without columns: only the number of rows matters
            for at in range(0, group.rows, rows):
                yield pa.record_batch({"": pa.nulls(min(rows, group.rows - at))})
            return
        pieces = file.iter_batches(batch_size=rows, row_groups=[number], columns=self._names)
        while True:
            with reading(self._found.path):
                piece = next(pieces, None)
                if piece is not None:
                    _require_indices(piece)
            if piece is None:
                return
            yield piece

    def _nulls(self, rows: int) -> Iterator[pa.RecordBatch]:
        fields = [self._schema.field(name) for name in self._names]
        for at in range(0, rows, BATCH_ROWS):
            yield pa.record_batch([pa.nulls(min(BATCH_ROWS, rows - at), f.type) for f in fields], self._names)


def _require_indices(piece: pa.RecordBatch) -> None:
    """Raise OSError for a dictionary column with indices beyond its dictionary, which Arrow reads unseen."""
    for name, column in zip(piece.schema.names, piece.columns, strict=True):
        if pa.types.is_dictionary(column.type):
            ends = pc.min_max(column.indices).as_py()
            if ends["max"] is not None and not 0 <= ends["min"] <= ends["max"] < len(column.dictionary):
                raise OSError(f"column {name}: an index is beyond the dictionary")


def _open_parquet(found: InputFile, metadata: pq.FileMetaData | None = None, **options: Any) -> pq.ParquetFile:
    """A file for its rows, or without `metadata` for its footer alone."""
    source: Any = found.inner
    if not found.local:
        blocks = {"block_size": _HEADER_BUFFER} if metadata is None else _BLOCKS
        source = found.filesystem.open(found.inner, "rb", **blocks)
    file = pq.ParquetFile(source, metadata=metadata, **_READING, **options)
    require_same(found)  # what is open now is what was found
    return file


def _is_text_column(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind in (pa.string_view(), pa.binary()))

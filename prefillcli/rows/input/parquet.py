"""Rows out of Parquet files, a bounded number of bytes at a time."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from prefillcli.errors import UsageError
from prefillcli.rows.filesystems import reading
from prefillcli.rows.input.discovery import InputFile, Partitions
from prefillcli.rows.input.selection import (
    BATCH_BYTES,
    BATCH_ROWS,
    ColumnChoice,
    Selection,
    require_columns,
    row_batches,
)
from prefillcli.rows.proof import JOB_KEY, require_same
from prefillcli.rows.records import MAX_ROW_BYTES, RowBatch
from prefillcli.rows.values import is_text, plain_column, plain_type
from prefillcli.runtime.clock import Expected

_MAGIC_BYTES = 4  # before the first page
_TAIL_BYTES = 8  # after the footer: its length and the magic


@dataclass(frozen=True, slots=True)
class Footer:
    """The result of checking a footer."""

    rows: int
    wrong: dict[str, str]  # faults of chunks, by the path of their column; other columns can be read

    @classmethod
    def check(cls, metadata: pq.FileMetaData, size: int) -> Footer:
        """Check the footer of a file of `size` bytes; nothing else of it is read.

        Raises OSError unless the row groups have the rows of the file.
        """
        groups = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        if min(groups, default=0) < 0 or sum(groups) != metadata.num_rows:
            listed = ", ".join(f"{rows:,}" for rows in groups[:5]) + (", ..." if len(groups) > 5 else "")
            raise OSError(f"its footer has {metadata.num_rows:,} rows, but {listed or 'none'} in its row groups")
        return cls(metadata.num_rows, dict(_wrong_chunks(metadata, size)))

    def require(self, names: Sequence[str]) -> None:
        """Raise OSError if one of these columns cannot be read as the footer describes; without names, if any column
        cannot."""
        for path, what in self.wrong.items():
            if not names or any(is_part_of(path, name) for name in names):
                raise OSError(what)


def is_part_of(path: str, name: str) -> bool:
    """Return whether the column chunks of this path belong to the column `name`, which may be nested."""
    return f"{path}.".startswith(f"{name}.")


def chunk_range(chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """Return where the pages of a column chunk begin and end in the file."""
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
        start = chunk.dictionary_page_offset
    return start, start + chunk.total_compressed_size


def _wrong_chunks(metadata: pq.FileMetaData, size: int) -> Iterator[tuple[str, str]]:
    # Paths of columns, with the fault of a chunk of each.
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
            # A list has a value for each of its elements; an empty list has one too.
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
    # For each row group, the numbers of columns whose chunks Arrow rejects, and why. Asking pyarrow for such a chunk
    # ends the process: `RowGroupMetaData.column` lets no C++ exception through. But constructing a reader raises, and
    # a reader with a buffer reads nothing before the readers of all columns are made.
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


_MAX_PIECE_BYTES = 256 << 20  # bytes read at a time, where values are stored once and repeated
_DICTIONARY_BYTES = 16 << 20  # a column chunk larger than this and its indices holds texts that differ
_INDEX_BYTES = 6
_FOOTER_BUFFER = 1 << 16  # bytes read at a time from a remote file for its footer
_BUFFER = 1 << 20  # bytes read ahead per column, so that a large row group is not loaded whole
# For remote files. Columns are read in turns, so blocks of each stay in memory: reading ahead would drop them and
# fetch them again.
_BLOCKS: dict[str, Any] = {"block_size": 4 << 20, "cache_type": "blockcache", "cache_options": {"maxblocks": 16}}
_READING: dict[str, Any] = {"buffer_size": _BUFFER, "pre_buffer": False}


class ParquetInput:
    """One Parquet file: its footer now, its rows when asked for."""

    def __init__(self, found: InputFile) -> None:
        self.max_row_bytes = MAX_ROW_BYTES  # longer rows become error rows
        self.found = found
        with reading(found.path), _open_parquet(found) as file:
            self.schema: pa.Schema = file.schema_arrow
            self._footer = Footer.check(file.metadata, found.stamp.size)
        self.rows = self._footer.rows

    def require(self, names: Sequence[str]) -> None:
        """Raise PrefillError if the footer's data of these columns are impossible; without names, of any column."""
        with reading(self.found.path):
            self._footer.require(names)

    def fits(self, name: str, kind: pa.DataType) -> bool:
        """Return whether all values of a column stay as they are in this type; reads the column. Raises as
        `batches`."""
        with reading(self.found.path), _open_parquet(self.found) as file:
            own = plain_type(self.schema.field(name).type)
            for piece in file.iter_batches(columns=[name]):
                try:
                    values, _ = plain_column(piece.column(0), own)
                    if not values.cast(kind).cast(own).equals(values):
                        return False
                except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
                    return False
        return True

    def batches(
        self,
        first_row: int,
        columns: Sequence[str],
        carried: pa.Schema,
        selection: Selection,
        most_rows: int,
        files: frozenset[str] = frozenset(),
    ) -> Iterator[RowBatch]:
        """Yield the selected rows, where the file's first row has the number `first_row`, at most `most_rows` at a
        time.

        Raises PrefillError naming the file if it is damaged; batches before the damage have been yielded.
        """
        with reading(self.found.path), _open_parquet(self.found) as file:
            metadata = file.metadata
        groups = _GroupReader(self, metadata, columns, carried.names)
        start = first_row
        for number in range(metadata.num_row_groups):
            size = metadata.row_group(number).num_rows
            if selection.before(start) == selection.before(start + size):
                start += size
                continue
            end = start + size
            for piece in groups.read(number):
                yield from row_batches(piece, start, columns, carried, selection, self.max_row_bytes, most_rows, files)
                start += piece.num_rows
                if selection.end is not None and start >= selection.end:
                    return
            if start != end:  # a page header that lies: Arrow gives fewer rows and no error
                with reading(self.found.path):
                    raise OSError(f"a row group of {size:,} rows has {start - end + size:,}")


class _Chunk(NamedTuple):
    """A column chunk of a row group: of a column, or of a part of a nested one."""

    name: str
    values: int
    size: int  # bytes, uncompressed
    dictionary: float  # about the bytes of texts that are stored once

    @classmethod
    def of(cls, name: str, chunk: pq.ColumnChunkMetaData) -> _Chunk:
        start, end = chunk_range(chunk)
        # Numbers that repeat take next to no space in the file, so their count decides.
        size = max(chunk.total_uncompressed_size, 4 * chunk.num_values)
        share = (chunk.data_page_offset - start) / max(end - start, 1) if chunk.physical_type == "BYTE_ARRAY" else 0.0
        return cls(name, chunk.num_values, size, share * size)

    @property
    def repeats(self) -> bool:
        # Whether a text column is stored as few texts that repeat, and so can be read as a dictionary. Arrow collects
        # the dictionary over the whole row group, which for texts that differ would fill the memory.
        return self.dictionary > 0 and self.size <= _DICTIONARY_BYTES + _INDEX_BYTES * self.values


_TEXTS = (pa.string(), pa.large_string(), pa.string_view(), pa.binary())  # types that may come as dictionaries


class _GroupReader:
    """Reads row groups of a file. Texts that repeat come as dictionaries in `columns`, but not in `carried`."""

    def __init__(
        self, file: ParquetInput, metadata: pq.FileMetaData, columns: Sequence[str], carried: Sequence[str]
    ) -> None:
        self._found = file.found
        self._metadata = metadata
        self._wanted = list(dict.fromkeys([*columns, *carried]))
        # Without columns Arrow takes the number of rows from the footer; the pages of one column prove it.
        self._names = self._wanted or file.schema.names[:1]
        self._texts = [name for name in columns if file.schema.field(name).type in _TEXTS]
        self._files: dict[tuple[str, ...], pq.ParquetFile] = {}

    def read(self, number: int) -> Iterator[pa.RecordBatch]:
        # The rows of a group, a bounded number of bytes at a time, as far as the footer has their sizes.
        rows, chunks = self._metadata.row_group(number).num_rows, self._chunks(number)
        repeated = tuple(name for name in self._texts if all(each.repeats for each in chunks if each.name == name))
        at_once = min(BATCH_ROWS, BATCH_BYTES * rows // max(sum(chunk.size for chunk in chunks), 1))
        for chunk in chunks:
            if chunk.name not in repeated:
                longest = chunk.dictionary * -(-chunk.values // max(rows, 1))
                at_once = min(at_once, int(_MAX_PIECE_BYTES // max(longest, 1)))
        with reading(self._found.path):
            if repeated not in self._files:
                self._files[repeated] = _open_parquet(self._found, self._metadata, read_dictionary=list(repeated))
            pieces = self._files[repeated].iter_batches(max(at_once, 1), row_groups=[number], columns=self._names)
        while True:
            with reading(self._found.path):
                piece = next(pieces, None)
                if piece is not None:
                    _require_indices(piece)
            if piece is None:
                return
            yield piece.select(self._wanted)

    def _chunks(self, number: int) -> list[_Chunk]:
        # The chunks of the needed columns, which `Footer.require` has accepted.
        group, schema = self._metadata.row_group(number), self._metadata.schema
        return [
            _Chunk.of(name, group.column(at))
            for at in range(group.num_columns)
            for name in self._names
            if is_part_of(schema.column(at).path, name)
        ]


def _require_indices(piece: pa.RecordBatch) -> None:
    # Raise OSError for a dictionary column with indices beyond its dictionary, which Arrow reads without a check.
    for name, column in zip(piece.schema.names, piece.columns, strict=True):
        if pa.types.is_dictionary(column.type):
            ends = pc.min_max(column.indices).as_py()
            if ends["max"] is not None and not 0 <= ends["min"] <= ends["max"] < len(column.dictionary):
                raise OSError(f"column {name}: an index is beyond the dictionary")


def _open_parquet(found: InputFile, metadata: pq.FileMetaData | None = None, **options: Any) -> pq.ParquetFile:
    # A file to read its rows, or without `metadata` its footer alone.
    source: Any = found.inner
    if not found.local:
        blocks = {"block_size": _FOOTER_BUFFER} if metadata is None else _BLOCKS
        source = found.filesystem.open(found.inner, "rb", **blocks)
    file = pq.ParquetFile(source, metadata=metadata, **_READING, **options)
    require_same(found)  # the open file is the one that was found
    return file


class ParquetFiles:
    """The files of an input, read as one."""

    def __init__(self, files: Sequence[InputFile], partitions: Partitions) -> None:
        self._files = tuple(files)
        self._readers = [ParquetInput(file) for file in files]
        self._partitions = partitions
        self.available: tuple[str, ...] = tuple(self._readers[0].schema.names)
        self.total_rows: int | None = sum(file.rows for file in self._readers)
        self.starts: list[int] = []  # of every file that `batches` has begun, the number of its first row

    def expected_rows(self) -> Expected | None:
        """Return the number of rows of all files."""
        return None if self.total_rows is None else Expected(self.total_rows)

    def count(self) -> int:
        """Return the number of rows of all files; reads JSON Lines to the end once."""
        return self.total_rows or 0

    def columns_by_file(self) -> list[tuple[str, Sequence[str]]]:
        """Return the paths of files with their columns, where these are known."""
        return [(file.path, each.schema.names) for file, each in zip(self._files, self._readers, strict=True)]

    def refuse_outputs(self, inputs: Sequence[str]) -> None:
        """Raise UsageError for outputs of scoring among other files, unless they are named: hardly anybody means to
        score them."""
        ours = [JOB_KEY in (file.schema.metadata or {}) for file in self._readers]
        for file, written in zip(self._files, ours, strict=True):
            if written and not all(ours) and file.path not in inputs:
                raise UsageError(
                    f"{file.path} was written by prefill score and lies among other input files\n"
                    "move it out of there, or name the input files one by one"
                )

    def carried_schema(
        self, columns: Sequence[str], carried: Sequence[str], optional: Sequence[str], max_row_bytes: int
    ) -> pa.Schema:
        """Return the types of the carried columns.

        Raises UsageError if one of the columns is missing and not `optional`, if two have its name, or if its types
        differ; PrefillError if a file contradicts itself about it. From now on rows of more than `max_row_bytes` are
        error rows.
        """
        keys = self._partitions.schema
        wanted = [name for name in (*columns, *carried) if name not in keys.names]
        for path, names in self.columns_by_file():
            require_columns(wanted, (*names, *keys.names), path, optional)
        for reader in self._readers:
            reader.require([*wanted, *optional])
            reader.max_row_bytes = max_row_bytes
        return pa.schema([keys.field(name) if name in keys.names else self._common_field(name) for name in carried])

    def batches(self, choice: ColumnChoice, selection: Selection, most_rows: int) -> Iterator[RowBatch]:
        """Yield the selected rows of all files."""
        self.starts = []
        keys = self._partitions.schema.names
        own = pa.schema([field for field in choice.carried if field.name not in keys])
        start = 0
        for number, file in enumerate(self._readers):
            if selection.end is not None and start >= selection.end:
                return
            self.starts.append(start)
            names = [name for name in choice.columns_and_optional if name in file.schema.names]
            for batch in file.batches(start, names, own, selection, most_rows, choice.files):
                if keys:
                    _add_partition(batch, self._partitions.values[number], choice)
                yield batch
            start += file.rows

    def _common_field(self, name: str) -> pa.Field:
        # The type of a carried column that holds its values in every file.
        kinds = [plain_type(file.schema.field(name).type) for file in self._readers]
        if all(kind == kinds[0] for kind in kinds):
            return pa.field(name, kinds[0])
        try:
            schemas = [pa.schema([(name, kind)]) for kind in kinds]
            common = pa.unify_schemas(schemas, promote_options="permissive").field(0)
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            raise self._unlike(name, kinds, 0, "") from None
        for at, (reader, kind) in enumerate(zip(self._readers, kinds, strict=True)):
            if not _always_fits(kind, common.type) and not reader.fits(name, common.type):
                raise self._unlike(name, kinds, at, f"\n{common.type} does not hold all values of both")
        return common

    def _unlike(self, name: str, kinds: Sequence[pa.DataType], at: int, why: str) -> UsageError:
        # The types of a column in this file and in the next one that has another.
        other = next(each for each in range(len(kinds)) if kinds[each] != kinds[at])
        at, other = sorted((at, other))
        return UsageError(
            f"column {name!r} is {kinds[at]} in {self._files[at].path} but {kinds[other]} in "
            f"{self._files[other].path}{why}\nscore the files in separate jobs or leave the column out"
        )


def _always_fits(kind: pa.DataType, common: pa.DataType) -> bool:
    # Whether every value of a type is one of another, as far as that is plain without looking at the values.
    if kind == common or pa.types.is_null(kind) or is_text(kind):
        return True
    if pa.types.is_integer(kind) and pa.types.is_integer(common):
        signs = pa.types.is_signed_integer(kind), pa.types.is_signed_integer(common)
        return kind.bit_width < common.bit_width and signs != (True, False)
    return bool(pa.types.is_floating(kind) and pa.types.is_floating(common))


def _add_partition(batch: RowBatch, values: dict[str, object], choice: ColumnChoice) -> None:
    rows = len(batch.rows)
    for name, value in values.items():
        if name in choice.columns_and_optional:
            batch.columns[name] = [value] * rows
        if name in choice.carried.names:
            column = pa.array([value] * rows, choice.carried.field(name).type)
            batch.carried = batch.carried.append_column(name, column)
    batch.carried = batch.carried.select(choice.carried.names)

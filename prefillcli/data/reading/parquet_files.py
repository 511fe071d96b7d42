"""The Parquet files of an input, read as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from prefillcli.data.proof.seals import JOB_KEY
from prefillcli.data.reading.discovery import InputFile
from prefillcli.data.reading.parquet import ParquetInput
from prefillcli.data.reading.partitions import Partitions
from prefillcli.data.reading.selection import ColumnChoice, Selection, require_columns
from prefillcli.data.rows import RowBatch
from prefillcli.data.values import plain_type
from prefillcli.errors import UsageError


class ParquetFiles:
    """See `InputFiles`."""

    def __init__(self, files: Sequence[InputFile], partitions: Partitions) -> None:
        self._files = tuple(files)
        self._readers = [ParquetInput(file) for file in files]
        self._partitions = partitions
        self.available: tuple[str, ...] = tuple(self._readers[0].schema.names)
        self.total_rows: int | None = sum(file.rows for file in self._readers)
        self.starts: list[int] = []

    def count(self) -> int:
        return self.total_rows or 0

    def columns_by_file(self) -> list[tuple[str, Sequence[str]]]:
        return [(file.path, each.schema.names) for file, each in zip(self._files, self._readers, strict=True)]

    def refuse_outputs(self, inputs: Sequence[str]) -> None:
        """Raise UsageError for scores among other files, unless they are named: hardly anybody means to score them."""
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
        keys = self._partitions.schema
        wanted = [name for name in (*columns, *carried) if name not in keys.names]
        for path, names in self.columns_by_file():
            require_columns(wanted, (*names, *keys.names), path, optional)
        for reader in self._readers:
            reader.require([*wanted, *optional])
            reader.max_row_bytes = max_row_bytes
        return pa.schema([keys.field(name) if name in keys.names else self._common_field(name) for name in carried])

    def batches(self, choice: ColumnChoice, selection: Selection, most_rows: int) -> Iterator[RowBatch]:
        self.starts = []
        keys = self._partitions.schema.names
        own = pa.schema([field for field in choice.carried if field.name not in keys])
        start = 0
        for number, file in enumerate(self._readers):
            if selection.end is not None and start >= selection.end:
                return
            self.starts.append(start)
            names = [name for name in choice.columns_and_optional if name in file.schema.names]
            for batch in file.batches(start, names, own, selection, most_rows):
                if keys:
                    _add_partition(batch, self._partitions.values[number], choice)
                yield batch
            start += file.rows

    def _common_field(self, name: str) -> pa.Field:
        """The type of a carried column that holds its values in every file."""
        kinds = [plain_type(file.schema.field(name).type) for file in self._readers]
        if all(kind == kinds[0] for kind in kinds):
            return pa.field(name, kinds[0])
        try:
            schemas = [pa.schema([(name, kind)]) for kind in kinds]
            return pa.unify_schemas(schemas, promote_options="permissive").field(0)
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            other = next(at for at, kind in enumerate(kinds) if kind != kinds[0])
            raise UsageError(
                f"column {name!r} is {kinds[0]} in {self._files[0].path} but {kinds[other]} in "
                f"{self._files[other].path}\nscore the files in separate jobs or leave the column out"
            ) from None


def _add_partition(batch: RowBatch, values: dict[str, object], choice: ColumnChoice) -> None:
    """Add the columns that the folders of the batch's file name."""
    rows = len(batch.rows)
    for name, value in values.items():
        if name in choice.columns_and_optional:
            batch.columns[name] = [value] * rows
        if name in choice.carried.names:
            column = pa.array([value] * rows, choice.carried.field(name).type)
            batch.carried = batch.carried.append_column(name, column)
    batch.carried = batch.carried.select(choice.carried.names)

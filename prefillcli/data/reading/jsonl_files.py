"""The JSON Lines files of an input, read as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import pyarrow as pa

from prefillcli.data.reading.discovery import InputFile
from prefillcli.data.reading.jsonl import BatchMaker, JsonlInput, parse
from prefillcli.data.reading.partitions import Partitions
from prefillcli.data.reading.selection import ColumnChoice, Selection, require_columns
from prefillcli.data.rows import RowBatch, RowError
from prefillcli.errors import UsageError

_PEEK_ROWS = 100
_PEEK_BYTES = 16 << 20


class JsonlFiles:
    """See `InputFiles`."""

    def __init__(self, files: Sequence[InputFile], partitions: Partitions) -> None:
        self._files = tuple(files)
        self._readers = [JsonlInput(file) for file in files]
        self._partitions = partitions
        self.available, self._peeked = self._peek()
        self.total_rows: int | None = None
        self.starts: list[int] = []

    def count(self) -> int:
        if self.total_rows is None:
            self.total_rows = sum(file.count() for file in self._readers)
        return self.total_rows

    def columns_by_file(self) -> list[tuple[str, Sequence[str]]]:
        return [(self._files[0].path, self.available)]

    def carried_schema(
        self, columns: Sequence[str], carried: Sequence[str], optional: Sequence[str], max_row_bytes: int
    ) -> pa.Schema:
        keys = self._partitions.schema.names
        wanted = [name for name in (*columns, *carried) if name not in keys]
        if self._peeked:
            known = tuple(dict.fromkeys([*self.available, *keys]))
            require_columns(wanted, known, f"the first {self._peeked} lines")
        for reader in self._readers:
            reader.max_row_bytes = max_row_bytes
        return pa.schema([(name, pa.string()) for name in carried])

    def batches(self, choice: ColumnChoice, selection: Selection, most_rows: int) -> Iterator[RowBatch]:
        self.starts = []
        maker = BatchMaker(choice.columns, choice.carried.names, selection, choice.optional, most_rows=most_rows)
        for number, lines in enumerate(self._readers):
            if selection.end is not None and maker.row >= selection.end:
                break
            self.starts.append(maker.row)
            maker.constants = self._partitions.values[number]
            yield from maker.add(lines.lines())
        yield from maker.rest()

    def _peek(self) -> tuple[tuple[str, ...], int]:
        """Columns on the first lines, and the number of lines looked at."""
        names: dict[str, None] = {}
        seen = size = 0
        wrong: RowError | None = None
        for line in islice((line for file in self._readers for line in file.lines()), _PEEK_ROWS):
            seen += 1
            size += len(line) if isinstance(line, bytes) else 0
            row = parse(line)
            if isinstance(row, dict):
                names |= dict.fromkeys(row)
            elif wrong is None:
                wrong = row
            if size > _PEEK_BYTES:
                break
        if wrong is not None and not names:
            raise UsageError(
                f"{self._files[0].path}: none of the first {seen} lines is a JSON object ({wrong.detail})\n"
                "JSON Lines has one JSON object on every line, in UTF-8"
            )
        return tuple(names), seen

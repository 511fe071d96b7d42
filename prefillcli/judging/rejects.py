"""The file of rejects, written from a finished output and its input."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
from pydantic import RootModel

from prefillcli.core.roles import Judge
from prefillcli.errors import PrefillError, UsageError
from prefillcli.report.finding import Finding
from prefillcli.rows.filesystems import split_path, written_path
from prefillcli.rows.input.source import Source
from prefillcli.rows.output import FILE_ENDINGS, format_of
from prefillcli.rows.output.columns import ROW_COLUMN
from prefillcli.rows.output.destination import open_format
from prefillcli.rows.output.schema import kinds_of, type_for, typed_column
from prefillcli.rows.output.sink import Sink
from prefillcli.rows.output.store import open_store
from prefillcli.rows.records import is_error
from prefillcli.stats.arrays import Int64Array

if TYPE_CHECKING:
    from prefillcli.core.run import Run

OPTION = "--rejects"
_ERRORS = ("error", "error_detail")


def check_rejects(path: str, source: Source) -> None:
    """Raise UsageError unless error rows can be written to `path`, with all columns of the input."""
    if format_of(path) is None or path.endswith("/"):
        raise UsageError(f"unknown ending of {OPTION} {path}\nuse {', '.join(FILE_ENDINGS)}")
    source.select(columns=(), carried=_columns(source))


def write_rejects(path: str, source: Source, sink: Sink) -> None:
    """Write the error rows of a finished output to a file, which appears whole: number, input columns and error.

    Rows that were skipped at the user's request are not errors. A value that cannot be read is null. From now on
    `source` reads other columns. Raises PrefillError, and ContentChangedError if the input has changed.
    """
    found = format_of(path)
    if found is None:
        raise UsageError(f"unknown ending of {OPTION} {path}")
    file_format = open_format(found)
    source.select(columns=(), carried=_columns(source))
    numbers = _error_rows(source, sink)
    as_text = source.kind == "jsonl" and file_format.json_text
    typed = source.kind == "jsonl" and not as_text
    carried = source.carried_schema
    if typed:  # the types for the values in rows of JSON Lines
        kinds: dict[str, set[str]] = defaultdict(set)
        for batch in source.rows(numbers):
            for name in batch.carried.column_names:
                kinds[name].update(kinds_of(batch.carried[name]))
        ids = sink.schema.id_name
        carried = pa.schema([(name, type_for(kinds[name], ids=name == ids)) for name in carried.names])
    schema = pa.schema([(ROW_COLUMN, pa.int64()), *carried, *((name, pa.string()) for name in _ERRORS)])

    def tables() -> Iterator[pa.Table]:  # the rows, ascending
        errors = _errors(sink)
        for batch in source.rows(numbers):
            own = list(islice(errors, len(batch.rows)))
            columns: list[Any] = [pa.array(batch.rows)]
            for name in batch.carried.column_names:
                column = batch.carried[name]
                columns.append(typed_column(column, schema.field(name).type) if typed else column)
            columns += [pa.array([pair[at] for pair in own], pa.string()) for at in range(len(_ERRORS))]
            yield pa.Table.from_arrays(columns, schema=schema)

    folder, name = split_path(written_path(path, OPTION))
    store = open_store(folder)
    store.clean(lambda left: left == name)
    with store.create(name) as file:
        file_format.write(file, schema, tables(), carried.names if as_text else ())
        source.require_unchanged(None)


def _error_rows(source: Source, sink: Sink) -> Int64Array:
    # The numbers of the error rows; the output has the rows that were selected, in their order.
    places, rows = [np.empty(0, np.int64)], 0
    for table in sink.tables(["error"]):
        places.append(np.flatnonzero([is_error(code) for code in table["error"].to_pylist()]) + rows)
        rows += len(table)
    found, chosen = np.concatenate(places), source.selection().chosen
    return found if chosen is None else chosen[found]


def _errors(sink: Sink) -> Iterator[tuple[str, ...]]:
    # Code and detail of each error row.
    for table in sink.tables(list(_ERRORS)):
        pairs = zip(*(table[name].to_pylist() for name in _ERRORS), strict=True)
        yield from (pair for pair in pairs if is_error(pair[0]))


def _columns(source: Source) -> list[str]:
    return [name for name in source.available if name not in (ROW_COLUMN, *_ERRORS)]


def is_rejects(path: str, start: bytes) -> bool:
    """Return whether the file at a path has the rejects of an earlier run."""
    try:
        names = Source.open([path]).available
    except PrefillError:
        return False
    return names[:1] == (ROW_COLUMN,) and names[-2:] == _ERRORS and "computed_tokens" not in names


class RejectsFile(Finding, RootModel[str]):
    """The file with the error rows."""

    key: ClassVar[str] = "rejects"


class Rejects(Judge):
    """The error rows of a job, in a file beside the scores."""

    def __init__(self, path: str) -> None:
        self.path = path

    def check_source(self, source: Source) -> None:
        """Raise UsageError unless error rows can be written, with all columns of the input."""
        check_rejects(self.path, source)

    def ended(self, run: Run) -> None:
        with run.clock.phase("write"), run.stop.at_once():
            write_rejects(self.path, run.inputs.source, run.sink)
        run.report.add(RejectsFile(self.path))

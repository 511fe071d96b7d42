"""Rows as a caller has them: tables, data frames, lists, or the names of files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike, fspath
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from prefillcli.errors import UsageError, brief


class ArrowStream(Protocol):
    """A table or a column in Arrow's C stream interface: of pyarrow, pandas, polars, DuckDB and others."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any: ...


Rows = (
    str
    | PathLike[str]
    | ArrowStream
    | Mapping[str, Sequence[Any]]
    | Iterable[Mapping[str, Any] | str | PathLike[str] | None]
)
"""What `prefillcli.score` takes."""


GivenRows: TypeAlias = "pa.Table | tuple[str, ...]"
"""Rows in a table, or the paths of the files they are in."""


def read_rows(rows: Any, text_column: str) -> GivenRows:
    """The rows as a table, or the paths of the files they are in.

    Texts become the column `text_column`. Raises UsageError for anything else, and for values of a column that have
    no type in common.
    """
    if isinstance(rows, str | PathLike):
        return (fspath(rows),)
    if isinstance(rows, pa.Table):
        return rows
    if isinstance(rows, pa.RecordBatch):
        return pa.Table.from_batches([rows])
    try:
        if hasattr(rows, "__arrow_c_stream__") or hasattr(rows, "__arrow_c_array__"):
            return _of_arrow(rows, text_column)
        if hasattr(rows, "__dataframe__"):
            return pa.interchange.from_dataframe(rows)
        if isinstance(rows, Mapping):
            return pa.table({name: _column(name, values) for name, values in rows.items()})
    except (pa.ArrowException, TypeError, ValueError, NotImplementedError) as error:
        raise UsageError(f"cannot read rows of the type {_kind(rows)}: {brief(error)}\n{_TAKEN}") from None
    if isinstance(rows, bytes) or not isinstance(rows, Iterable):
        raise UsageError(f"cannot read rows of the type {_kind(rows)}\n{_TAKEN}")
    return _of_items(list(rows), text_column)


_TAKEN = (
    "give an Arrow table, a pandas or polars data frame, a list of dicts, a list of prompts, or the path of a Parquet "
    "or JSON Lines file"
)


def _of_arrow(rows: Any, text_column: str) -> pa.Table:
    """A table of whatever library, or a column of texts."""
    try:
        return pa.table(rows)
    except (pa.ArrowException, TypeError, ValueError):  # a column: only a table's schema is a struct
        column = pa.chunked_array(rows) if hasattr(rows, "__arrow_c_stream__") else pa.chunked_array([pa.array(rows)])
    if not (_is_text(column.type) or pa.types.is_null(column.type)):
        raise TypeError(f"it is a column of {column.type}, not of texts")
    return pa.table({text_column: column})


def _is_text(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def _of_items(items: list[Any], text_column: str) -> GivenRows:
    if items and all(isinstance(each, PathLike) for each in items):
        return tuple(fspath(each) for each in items)
    if all(each is None or isinstance(each, str) for each in items):
        return pa.table({text_column: pa.array([None if each is None else str(each) for each in items], pa.string())})
    mapped = any(isinstance(each, Mapping) for each in items)
    for number, each in enumerate(items):
        if (mapped or not isinstance(each, str | None)) and not isinstance(each, Mapping):
            raise UsageError(f"cannot read rows from a list whose item {number} has the type {_kind(each)}\n{_TAKEN}")
    names = dict.fromkeys(name for row in items for name in row)  # later rows may have more
    return pa.table({str(name): _column(name, [row.get(name) for row in items]) for name in names})


def _column(name: Any, values: Any) -> Any:
    if isinstance(values, str | bytes):
        raise TypeError(f"column {name!r} is one text; for one row give a list of one dict")
    try:
        return pa.array(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"column {name!r}: its values have no type in common: {brief(error)}") from None


def _kind(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]} {kind.__name__}"

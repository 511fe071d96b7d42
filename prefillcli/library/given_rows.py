"""Rows as a caller has them: tables, data frames, lists, or the names of files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any, Protocol

import pyarrow as pa

from prefillcli.errors import PrefillError, UsageError, brief


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


@dataclass(frozen=True, slots=True)
class GivenTable:
    """Rows in a table."""

    table: pa.Table
    bad: dict[int, str] = field(default_factory=dict)
    """By row, which column has a text that is no Unicode. In the table it has U+FFFD, or null for a nested value."""


GivenRows = GivenTable | tuple[str, ...]
"""Rows in a table, or the paths of the files they are in."""


def read_rows(rows: Any, text_column: str) -> GivenRows:
    """The rows as a table, or the paths of the files they are in.

    Texts become the column `text_column`. What the caller's own readers, generators and mappings raise goes through as
    it is. Raises UsageError for anything else, and for values of a column that have no type in common; PrefillError
    where a stream of another library breaks off.
    """
    if isinstance(rows, str | PathLike):
        return (fspath(rows),)
    if isinstance(rows, pa.Table):
        return GivenTable(rows)
    if isinstance(rows, pa.RecordBatch):
        return GivenTable(pa.Table.from_batches([rows]))
    if isinstance(rows, pa.RecordBatchReader):
        return GivenTable(rows.read_all())  # through its stream, the caller's exceptions would be texts
    if any(hasattr(rows, name) for name in ("__arrow_c_stream__", "__arrow_c_array__", "__dataframe__")):
        return GivenTable(_of_arrow(rows, text_column))
    if isinstance(rows, Mapping):
        return _of_columns(rows.items())
    if isinstance(rows, bytes) or not isinstance(rows, Iterable):
        raise UsageError(f"cannot read rows of the type {_kind(rows)}\n{_TAKEN}")
    return _of_items(list(rows), text_column)


_TAKEN = (
    "give an Arrow table, a pandas or polars data frame, a list of dicts, a list of prompts, or the path of a Parquet "
    "or JSON Lines file"
)


def _of_arrow(rows: Any, text_column: str) -> pa.Table:
    """A table of whatever library, or a column of texts."""
    streams = hasattr(rows, "__arrow_c_stream__")
    try:
        if not streams and not hasattr(rows, "__arrow_c_array__"):
            from pyarrow.interchange import from_dataframe

            return from_dataframe(rows)
        try:
            found = pa.RecordBatchReader.from_stream(rows) if streams else pa.table(rows)
        except (pa.ArrowException, TypeError, ValueError):  # a column: only a table's schema is a struct
            column = pa.chunked_array(rows) if streams else pa.chunked_array([pa.array(rows)])
            if not (_is_text(column.type) or pa.types.is_null(column.type)):
                raise TypeError(f"it is a column of {column.type}, not of texts") from None
            return pa.table({text_column: column})
    except (pa.ArrowException, TypeError, ValueError, NotImplementedError) as error:
        raise UsageError(f"cannot read rows of the type {_kind(rows)}: {brief(error)}\n{_TAKEN}") from error
    try:
        return found.read_all() if streams else found
    except (pa.ArrowException, OSError) as error:
        why = str(error).partition(". Detail: Python exception")[0]
        raise PrefillError(f"the stream of the type {_kind(rows)} broke off: {why}") from error


def _is_text(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def _of_items(items: list[Any], text_column: str) -> GivenRows:
    if items and all(isinstance(each, PathLike) for each in items):
        return tuple(fspath(each) for each in items)
    if all(each is None or isinstance(each, str) for each in items):
        texts = [None if each is None else str(each) for each in items]
        return _of_columns([(text_column, texts)], pa.string())
    mapped = any(isinstance(each, Mapping) for each in items)
    for number, each in enumerate(items):
        if (mapped or not isinstance(each, str | None)) and not isinstance(each, Mapping):
            raise UsageError(f"cannot read rows from a list whose item {number} has the type {_kind(each)}\n{_TAKEN}")
    names = dict.fromkeys(name for row in items for name in row)  # later rows may have more
    if not names:
        return GivenTable(pa.table({"": pa.nulls(len(items))}).select([]))
    return _of_columns([(name, [row.get(name) for row in items]) for name in names])


def _of_columns(columns: Iterable[tuple[Any, Any]], kind: pa.DataType | None = None) -> GivenTable:
    """A table of names and values; of columns of this `kind`, if it is given."""
    arrays: dict[str, Any] = {}
    bad: dict[int, str] = {}
    for name, values in columns:
        if str(name) in arrays:
            raise UsageError(f"two columns are called {str(name)!r}: rename one")
        arrays[str(name)] = _column(name, list(values) if isinstance(values, Iterator) else values, kind, bad)
    try:
        return GivenTable(pa.table(arrays), bad)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise UsageError(f"cannot make a table of the columns: {brief(error)}\n{_TAKEN}") from None


def _column(name: Any, values: Any, kind: pa.DataType | None, bad: dict[int, str]) -> Any:
    """The values as an array. Rows with a text that is no Unicode are added to `bad`."""
    if isinstance(values, str | bytes):
        raise UsageError(f"column {name!r} is one text; for one row give a list of one dict\n{_TAKEN}")
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        whole = list(values)
        for row, value in enumerate(whole):
            if not _is_unicode(value):
                bad.setdefault(row, f"column {name}: half a surrogate pair")
                is_text = isinstance(value, str)
                whole[row] = value.encode("utf-8", "surrogatepass").decode("utf-8", "replace") if is_text else None
        return _column(name, whole, kind, bad)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"column {name!r}: its values have no type in common: {brief(error)}") from None


def _is_unicode(value: Any) -> bool:
    """Whether all texts in a value are Unicode: half a surrogate pair is none."""
    try:
        pa.array([value])
    except UnicodeEncodeError:
        return False
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        pass  # something else is wrong with it
    return True


def _kind(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]} {kind.__name__}"

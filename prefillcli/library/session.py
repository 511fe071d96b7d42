"""`prefillcli.score` and `prefillcli.Scorer`. Importing this module takes no torch along."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike, fspath
from threading import Event
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, Unpack, get_args

import numpy as np
import pyarrow as pa

from prefillcli.errors import EngineDiedError, FailedRowsError, PrefillError, UsageError, brief
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.keywords import FileOptions, ScoreOptions, ScorerOptions, StrPath
from prefillcli.options.load import lists_options, scorer_settings
from prefillcli.rows.input.selection import DEFAULT_COLUMN
from prefillcli.rows.input.source import Source
from prefillcli.rows.records import SKIPPED_CODES
from prefillcli.runtime.cores import left_as_found
from prefillcli.runtime.extras import without_fetched_code
from prefillcli.runtime.signals import OwnThread

if TYPE_CHECKING:
    from prefillcli.library.table_scoring import Steps, TableScorer

# Rows in a caller's form: tables, data frames, lists, or the names of files.


class ArrowStream(Protocol):
    """A table or a column in Arrow's C stream interface: of pyarrow, pandas, polars, DuckDB and others."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any: ...


# Rows as `prefillcli.score` takes them.
Rows = (
    str
    | PathLike[str]
    | ArrowStream
    | Mapping[str, Sequence[Any]]
    | Iterable[Mapping[str, Any] | str | PathLike[str] | None]
)


@dataclass(frozen=True, slots=True)
class GivenTable:
    """Rows in a table."""

    table: pa.Table
    # By row, the column with a text that is not Unicode. In the table that text has U+FFFD, or a nested value is null.
    bad: dict[int, str] = field(default_factory=dict)


GivenRows = GivenTable | tuple[str, ...]  # rows in a table, or the paths of the files they are in


def read_rows(rows: Any, text_column: str) -> GivenRows:
    """Read the rows as a table, or return the paths of the files they are in.

    Texts become the column `text_column`. Exceptions of the caller's own readers, generators and mappings pass
    through. Raises UsageError for anything else, and for values of a column that have no type in common; PrefillError
    where a stream of another library breaks off.
    """
    if isinstance(rows, str | PathLike):
        return (fspath(rows),)
    if isinstance(rows, pa.Table):
        return GivenTable(rows)
    if isinstance(rows, pa.RecordBatch):
        return GivenTable(pa.Table.from_batches([rows]))
    if isinstance(rows, pa.RecordBatchReader):
        return GivenTable(rows.read_all())  # through its stream, the caller's exceptions would become texts
    if any(hasattr(rows, name) for name in ("__arrow_c_stream__", "__arrow_c_array__", "__dataframe__")):
        return GivenTable(_of_arrow(rows, text_column))
    if isinstance(rows, Mapping):
        return _of_columns(rows.items())
    if isinstance(rows, bytes) or not isinstance(rows, Iterable):
        raise UsageError(f"cannot read rows of the type {_kind(rows)}\n{_TAKEN}")
    return _of_items(list(rows), text_column)


_TAKEN = (
    "give an Arrow table, a pandas or polars data frame, a list of dicts, a list of prompts, or the path of a "
    "Parquet, JSON Lines or CSV file"
)


def _of_arrow(rows: Any, text_column: str) -> pa.Table:
    # A table of any library, or a column of texts.
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
    items = [None if _is_missing(each) else each for each in items]
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
    # A table from names and values; its columns have this `kind`, if it is given.
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
    # The values as an array. Rows with a text that is not Unicode are added to `bad`.
    if isinstance(values, np.ndarray) and values.dtype == object:
        values = values.tolist()
    if isinstance(values, list | tuple):
        values = [None if _is_missing(each) else each for each in values]
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


def _is_missing(value: Any) -> bool:
    # Whether it is NaN, or NaT or NA of pandas: a data frame's own table has nulls for them.
    return (isinstance(value, float) and value != value) or type(value).__name__ in ("NaTType", "NAType")


def _is_unicode(value: Any) -> bool:
    # Whether all texts in a value are Unicode: half a surrogate pair is none.
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


OnError = Literal["row", "raise"]
_NO_FAILURE = {None, *SKIPPED_CODES}


class Scorer:
    """A model that stays loaded, and scores rows whenever it is called.

        with prefillcli.Scorer("models/judge", template="{{ history }}\\n{{ post }}\\nAnswer:") as scorer:
            table = scorer.score(rows)

    The first argument is the model: a folder or a hub name. The other options are those of `prefill score` that
    determine how a row is scored, by name: `help(prefillcli.Scorer.__init__)` explains each. The environment
    (PREFILL_MODEL, ...) is not read. Several threads may use one Scorer: it scores for one after the other. Raises
    UsageError for wrong options and models, and ResourceError where the model does not fit.
    """

    @lists_options(ScorerOptions)
    def __init__(self, model: StrPath | None = None, **options: Unpack[ScorerOptions]) -> None:
        self._given: dict[str, Any] = {**options}
        self._model = model
        self._thread = OwnThread("prefill-scorer")
        self._tables: TableScorer | None = None
        try:
            self._settings = scorer_settings(model, options, owner="Scorer")
            self._tables = self._thread.run(_loading(self._settings), unwanted=lambda late: late.close())
        finally:
            if self._tables is None:
                self._thread.close(wait=False)

    @lists_options(FileOptions)
    def score(
        self, rows: Rows, *, progress: bool = False, on_error: OnError = "row", **options: Unpack[FileOptions]
    ) -> pa.Table:
        """Score the rows, and return them with their scores, in the same order.

        `rows` may be an Arrow table or record batch, a pandas or polars data frame, a list of dicts, a dict of
        columns, or a list of prompts: all columns are kept, and those of scoring follow. It may also be a path (or a
        list of `pathlib.Path`): files, a folder, a glob or a URL. Then the table is the output that `prefill score`
        would write for them, with these `options`.

        A row that cannot be scored has an `error`; with `on_error="raise"` it raises FailedRowsError, which has the
        table. `progress` shows a bar, or lines every 30 seconds where there is no terminal or notebook. Raises
        UsageError for rows that do not fit the options, PrefillError for damaged files, and ResourceError if the
        memory does not suffice. A KeyboardInterrupt stops it; the Scorer can be used again.
        """
        return self._score(read_rows(rows, _text_column(self._given)), progress, on_error, options)

    def __call__(self, rows: Rows) -> pa.Table:
        """Return `score(rows)`."""
        return self.score(rows)

    def close(self) -> None:
        """Free the models and their memory. A closed Scorer cannot score."""
        tables, self._tables = self._tables, None
        if tables is not None:
            self._thread.run(lambda stopped: tables.close())
            self._thread.close()
            del tables
            _free_memory()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<prefillcli.Scorer {'(closed)' if self._tables is None else self._tables.place}>"

    def _score(self, rows: GivenRows, progress: bool, on_error: OnError, options: Mapping[str, Any]) -> pa.Table:
        if on_error not in get_args(OnError):
            raise UsageError(f"on_error={on_error!r}: use 'row' or 'raise'")
        with _a_text_is_a_path(rows):
            settings = _settings_for(rows, self._model, self._given, options)
            if isinstance(rows, tuple):
                table = self._run(lambda tables, steps: tables.score_files(settings, steps), progress)
            else:
                table = self._run(lambda tables, steps: tables.score_table(rows.table, rows.bad, steps), progress)
        if on_error == "raise":
            _refuse_errors(table)
        return table

    def _loaded(self) -> TableScorer:
        if self._tables is None:
            raise UsageError("this Scorer is closed: make another one")
        return self._tables

    def _run(self, work: Callable[[TableScorer, Steps], pa.Table], progress: bool) -> pa.Table:
        # The table that `work` makes in the thread of this Scorer.
        self._loaded()

        def run(stopped: Event) -> pa.Table:
            from prefillcli.library.table_scoring import Steps

            tables = self._loaded()  # by now it may be closed
            with left_as_found(), without_fetched_code(), Steps(stopped, shown=progress) as steps:
                tables.resume_threads()
                return work(tables, steps)

        try:
            return self._thread.run(run)
        except EngineDiedError:
            self.close()
            raise EngineDiedError(
                "the engine's processes have ended; what they wrote shows why\nmake another Scorer"
            ) from None


@lists_options(ScoreOptions)
def score(
    rows: Rows,
    model: StrPath | None = None,
    *,
    progress: bool = False,
    on_error: OnError = "row",
    **options: Unpack[ScoreOptions],
) -> pa.Table:
    """Score the rows, and return them with their scores, in the same order: `Scorer.score` of a Scorer just for these
    rows.

        prefillcli.score(["Is the sky blue? Answer:"], "models/judge", labels="Yes,No")

    It loads the model, scores, and frees it. `rows`, `progress` and `on_error` are those of `Scorer.score`,
    `model` and the `options` are those of `Scorer`, and for paths also those of `Scorer.score`. It raises the same
    errors.
    """
    of_files: dict[str, Any] = {name: value for name, value in options.items() if name in FileOptions.__annotations__}
    others: Any = {name: value for name, value in options.items() if name not in of_files}
    scorer_settings(model, others, owner="score()")  # all of this before a model is loaded
    given = read_rows(rows, _text_column(others))
    with _a_text_is_a_path(given):
        settings = _settings_for(given, model, others, of_files)
        if isinstance(given, tuple):
            Source.open(settings.input.inputs, **settings.input.csv)
    with Scorer(model, **others) as scorer:
        return scorer._score(given, progress, on_error, of_files)


def _text_column(options: Mapping[str, Any]) -> str:
    column: str = options.get("prompt_column", DEFAULT_COLUMN)
    return column


def _settings_for(
    rows: GivenRows, model: StrPath | None, options: Mapping[str, Any], of_files: Mapping[str, Any]
) -> ScoreSettings:
    # The settings for these rows. Raises UsageError for options of files if the rows are a table.
    if isinstance(rows, tuple):
        return scorer_settings(model, {**options, **of_files}, owner="score()", paths=rows)
    for name in of_files:
        if name in FileOptions.__annotations__:
            raise UsageError(f"{name} is for paths: a table keeps all its rows and columns\nchoose them before")
    return scorer_settings(model, {**options, **of_files}, owner="score()")


def _refuse_errors(table: pa.Table) -> None:
    codes = [(row, code) for row, code in enumerate(table["error"].to_pylist()) if code not in _NO_FAILURE]
    if not codes:
        return
    counts = ", ".join(f"{code} {count:,}" for code, count in sorted(Counter(code for _, code in codes).items()))
    first, code = codes[0]
    detail = table["error_detail"][first].as_py()
    raise FailedRowsError(
        f"{len(codes):,} of {table.num_rows:,} rows have no score ({counts}); row {first}: {code}: {detail}\n"
        "the attribute `table` of this error has all rows",
        table,
    )


@contextmanager
def _a_text_is_a_path(rows: GivenRows) -> Iterator[None]:
    # Messages about a path that looks like a prompt mention that.
    try:
        yield
    except PrefillError as error:
        if isinstance(rows, tuple) and any(space in rows[0] for space in " \n") and not os.path.lexists(rows[0]):
            error.args = (f"{error}\na text is a path: for one prompt give a list, score([prompt])",)
        raise


def _free_memory() -> None:
    # Give back the memory of the models: some is in cycles, and CUDA keeps freed memory.
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _loading(settings: ScoreSettings) -> Callable[[Event], TableScorer]:
    # Loads the models, in the thread that calls it.
    from prefillcli.scoring.runners.worker import memory_share

    share = memory_share(settings.lm.device)

    def load(stopped: Event) -> TableScorer:
        from prefillcli.library.table_scoring import TableScorer  # takes torch along

        with left_as_found(), without_fetched_code():
            return TableScorer(settings, share=share)

    return load

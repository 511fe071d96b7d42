"""`prefillcli.score` and `prefillcli.Scorer`. Importing this module takes no torch along."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Event
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, get_args

import pyarrow as pa

from prefillcli.data.prompts.settings import DEFAULT_COLUMN
from prefillcli.data.reading.source import Source
from prefillcli.data.rows import SKIPPED_CODES
from prefillcli.errors import EngineDiedError, FailedRowsError, PrefillError, UsageError
from prefillcli.library.given_rows import GivenRows, Rows, read_rows
from prefillcli.options.keywords import (
    FileOptions,
    ScoreOptions,
    ScorerOptions,
    StrPath,
    lists_options,
    scorer_settings,
)
from prefillcli.options.score import ScoreSettings
from prefillcli.runtime.cores import left_as_found
from prefillcli.runtime.signals import OwnThread
from prefillcli.runtime.streams import without_fetched_code

if TYPE_CHECKING:  # takes torch along
    from prefillcli.library.table_scoring import Steps, TableScorer

OnError = Literal["row", "raise"]
_NO_FAILURE = {None, *SKIPPED_CODES}


class Scorer:
    """A model that stays loaded, and scores rows whenever it is called.

        with prefillcli.Scorer("models/judge", template="{{ history }}\\n{{ post }}\\nAnswer:") as scorer:
            table = scorer.score(rows)

    The first argument is the model: a folder or a hub name. The other options are those of `prefill score` that say
    how a row is scored, by name; docs/score.md says what each means. The environment (PREFILL_MODEL, ...) is not read.
    Several threads may use one Scorer: it scores for one after the other. Raises UsageError for wrong options and
    models, and ResourceError where the model does not fit.
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
        """The rows with their scores, in the same order.

        `rows` may be an Arrow table or record batch, a pandas or polars data frame, a list of dicts, a dict of
        columns, or a list of prompts: all columns are kept, and those of scoring follow. It may also be a path (or a
        list of `pathlib.Path`): files, a folder, a glob or a URL. Then the table has what `prefill score` would write
        of them, with the `options` `id_column`, `keep_columns`, `limit`, `sample` and `seed`.

        A row that cannot be scored has an `error`; with `on_error="raise"` it raises FailedRowsError, which has the
        table. `progress` shows a bar, or lines every 30 seconds where there is no terminal or notebook. Raises
        UsageError for rows that do not fit the options, PrefillError for damaged files, and ResourceError if the
        memory does not suffice. A KeyboardInterrupt stops it; the Scorer can be used again.
        """
        return self._score(read_rows(rows, _text_column(self._given)), progress, on_error, options)

    def __call__(self, rows: Rows) -> pa.Table:
        """`score(rows)`."""
        return self.score(rows)

    def close(self) -> None:
        """Let go of the models and their memory. A closed Scorer cannot score."""
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
        """What `work` makes in the thread of this Scorer."""

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
                "the engine's processes have ended; what they wrote says why\nmake another Scorer"
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
    """The rows with their scores, in the same order: `Scorer.score` of a Scorer for these rows alone.

        prefillcli.score(["Is the sky blue? Answer:"], "models/judge", labels="Yes,No")

    It loads the model, scores, and lets go of it. `rows`, `progress` and `on_error` are those of `Scorer.score`,
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
            Source.open(settings.inputs)
    with Scorer(model, **others) as scorer:
        return scorer._score(given, progress, on_error, of_files)


def _text_column(options: Mapping[str, Any]) -> str:
    """The column that a list of texts becomes."""
    column: str = options.get("prompt_column", DEFAULT_COLUMN)
    return column


def _settings_for(
    rows: GivenRows, model: StrPath | None, options: Mapping[str, Any], of_files: Mapping[str, Any]
) -> ScoreSettings:
    """The settings for these rows. Raises UsageError if they are a table and there are options for files."""
    if isinstance(rows, tuple):
        return scorer_settings(model, {**options, **of_files}, owner="score()", paths=rows)
    for name in of_files:
        if name in FileOptions.__annotations__:
            raise UsageError(f"{name} is for paths: a table keeps all its rows and columns\nchoose them before")
    return scorer_settings(model, {**options, **of_files}, owner="score()")


def _refuse_errors(table: pa.Table) -> None:
    """Raise FailedRowsError if rows could not be scored."""
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
    """Messages about a path that looks like a prompt say so."""
    try:
        yield
    except PrefillError as error:
        if isinstance(rows, tuple) and any(space in rows[0] for space in " \n") and not os.path.lexists(rows[0]):
            error.args = (f"{error}\na text is a path: for one prompt give a list, score([prompt])",)
        raise


def _free_memory() -> None:
    """Give back what the models took: some of it is in cycles, and CUDA keeps what was freed."""
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _loading(settings: ScoreSettings) -> Callable[[Event], TableScorer]:
    """Loads the models, in whatever thread calls it."""
    from prefillcli.jobs.runners.ray_actor import memory_share

    share = memory_share(settings.device)

    def load(stopped: Event) -> TableScorer:
        from prefillcli.library.table_scoring import TableScorer  # takes torch along

        with left_as_found(), without_fetched_code():
            return TableScorer(settings, share=share)

    return load

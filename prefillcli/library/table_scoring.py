"""Scoring rows in this process like `prefill score`, without writing anything."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from threading import Event
from typing import TYPE_CHECKING, Self, cast

import pyarrow as pa

from prefillcli.core.inputs import Inputs
from prefillcli.core.scorer import LedgerInMemory, ModelScorer, settle_models
from prefillcli.errors import Interrupted, UsageError
from prefillcli.options.commands import ScoreSettings
from prefillcli.plan.blocks import CarriedBlock
from prefillcli.plan.pack import Pack
from prefillcli.prompts.settings import USUAL_COLUMNS
from prefillcli.rows.input.source import TableRows
from prefillcli.rows.output.columns import ResultRows
from prefillcli.rows.output.parts import make_rows
from prefillcli.rows.output.schema import kinds_of
from prefillcli.rows.records import Window
from prefillcli.runtime import log
from prefillcli.runtime.clock import Expected, Phase, Progress
from prefillcli.scoring.compose import Parts, compose
from prefillcli.scoring.identity import require_model_of_heads
from prefillcli.scoring.loading import open_models
from prefillcli.scoring.loop import Finished
from prefillcli.scoring.opening import (
    answers_of,
    open_rows,
    require_uses,
    rows_of,
    tell_way,
    use_models,
    with_common_prompts,
    with_heads,
)
from prefillcli.scoring.recorder import FirstWindow
from prefillcli.scoring.scorer import load_here, make_scorer, score

if TYPE_CHECKING:  # these take torch along
    from prefillcli.rows.input.source import Source


SECONDS_BETWEEN_LINES = 30.0


class TableScorer:
    """Models that are loaded once, for any number of tables and files.

    Those of the `settings` that concern reading and writing have no effect. Without `--memory`, packs are sized by
    this `share` of the free memory. Raises UsageError or ResourceError.
    """

    def __init__(self, settings: ScoreSettings, *, share: float = 1.0) -> None:
        self._parts = compose(settings)
        rows = rows_of(settings, self._parts, cast("Source", TableRows(pa.table({}))))
        opened = open_models(settings)
        labels, schema = answers_of(rows, self._parts, opened)
        opened = with_heads(self._parts, opened, labels)
        require_model_of_heads(settings, opened, self._parts)
        builder = rows.make_builder(opened, labels, ())
        builder.close()  # a wrong template costs no load
        self._inputs = Inputs(rows, opened, labels, schema, builder)
        self._ledger = LedgerInMemory()
        self._models = load_here(opened, settings, labels, self._ledger, share=share)
        settle_models(self._models, self._ledger)
        self._first_window = FirstWindow(labels, opened.tokenizer, settings.answers.temperature)
        self._usual: frozenset[str] | None = None  # columns of prompts, of the rows that the builder is for
        self._told = ""  # how chats get to the answer
        self._checked = False  # whether the labels have followed some prompts

    @property
    def place(self) -> str:
        """The model's folder, device and number format."""
        files = self._inputs.opened.files
        return f"{files.path} on {self._inputs.opened.device} in {str(files.dtype).removeprefix('torch.')}"

    def score_table(self, table: pa.Table, bad: Mapping[int, str], steps: Steps) -> pa.Table:
        """Score a table, and return it with the columns of an output added, in the same rows. Those in `bad` are error
        rows.

        Its rows are planned together, in windows of a bounded size. Raises UsageError if the table has such a column
        already or lacks one that the prompt needs, or if the labels fail after every prompt of the first table.
        """
        schema = self._inputs.schema.results
        for name in schema.names:
            if name in table.column_names:
                raise UsageError(f"the table has a column {name!r} already, which scoring adds\nrename or drop it")
        steps.expect(table.num_rows)
        found: list[pa.Table] = []
        if table.num_rows:  # an empty list has no columns either
            rows = TableRows(table, bad)
            if not self._checked:
                require_uses(self._inputs.settings, self._parts, rows.available)
            self._prepare(rows)
            scorer = make_scorer(self._inputs, self._parts, self._models, self._ledger)
            found = [each.select(schema.names) for each in self._scored(self._parts, scorer, steps)]
        added = pa.concat_tables(found or [schema.empty_table()])
        for name in added.column_names:
            table = table.append_column(added.field(name), added[name])
        return table

    def score_files(self, settings: ScoreSettings, steps: Steps) -> pa.Table:
        """Return the output that `prefill score` would write for the inputs of these `settings`; all other settings
        are this scorer's.

        Files are read a window at a time. Raises UsageError or PrefillError, as reading does.
        """
        rows, parts = open_rows(settings, (settings.ids.id_column, *settings.files.keep_columns))
        inputs = use_models(rows, parts, self._inputs.opened, self._inputs.labels)
        try:
            if parts.heads is not None:
                parts.heads.require_wording(inputs)
            schema = inputs.schema
            schema.require_distinct()
            steps.expect(inputs.source.expected_rows)
            ledger = LedgerInMemory(self._ledger.settled)
            found = self._scored(parts, make_scorer(inputs, parts, self._models, ledger), steps)
        finally:
            inputs.builder.close()
        if not found:
            return schema.arrow({}).empty_table()
        table = pa.concat_tables(found)
        kinds = {name: kinds_of(table[name]) for name in schema.carried.names} if schema.json_carried else {}
        return schema.table(table, schema.arrow(kinds))

    def resume_threads(self) -> None:
        """Compute with the threads chosen when the models were loaded."""
        if self._inputs.opened.threads is not None:
            self._inputs.opened.threads.resume()

    def close(self) -> None:
        """Free the models, and end the process that renders templates."""
        self._close_builder()
        self._models.close()

    def _prepare(self, table: TableRows) -> None:
        # Prepare for prompts from these rows, with the builder of the last table where it fits.
        inputs, builder = self._inputs, self._inputs.builder
        usual, before = USUAL_COLUMNS.intersection(table.available), self._usual
        if usual != before:
            self._close_builder()
            builder = inputs.rows.make_builder(inputs.opened, inputs.labels, table.available)
            self._told = tell_way(inputs.settings, builder, self._told)
            self._usual = usual
        table.select(
            columns=builder.needed,
            optional=builder.optional,
            files=builder.image_columns,
            max_row_bytes=builder.max_row_bytes,
        )
        rows = replace(inputs.rows, source=cast("Source", table))
        self._inputs = replace(inputs, rows=rows, builder=builder)
        if usual != before and self._parts.heads is not None:
            self._parts.heads.require_wording(self._inputs)
        if not self._checked:
            self._inputs = with_common_prompts(self._inputs)

    def _close_builder(self) -> None:
        # The next table gets another one.
        self._inputs.builder.close()
        self._usual = None

    def _scored(self, parts: Parts, scorer: ModelScorer, steps: Steps) -> list[pa.Table]:
        # Row numbers, carried and result columns, window by window, of the rows that `scorer` reads.
        inputs, calibration = scorer.inputs, parts.calibration
        if calibration is not None:
            calibration.learn(scorer, lambda tokens: steps.step(0, 0))
        self._ledger.settle(scorer.ledger.settled)
        received = ReceivedRows(inputs, parts, self._first_window, steps)
        with inputs.windows() as coming:
            try:
                score(scorer, parts, self._checking(coming), received)
            except BaseException:
                inputs.builder.close()  # else its thread would go on with a window that nobody needs
                self._close_builder()
                raise
        return received.tables

    def _checking(self, coming: Iterable[Window]) -> Iterator[Window]:
        for window in coming:
            if not self._checked:
                self._inputs.labels.check(window)
                self._checked = True
            yield window


class ReceivedRows:
    """The `Receiver` of scoring in memory: a table for each window."""

    def __init__(self, inputs: Inputs, parts: Parts, first_window: FirstWindow, steps: Steps) -> None:
        self.tables: list[pa.Table] = []
        self._inputs, self._parts = inputs, parts
        self._first_window = first_window
        self._steps = steps
        self._finished = Finished()

    @property
    def listens(self) -> bool:
        return self._first_window.listens

    def done(self, window: int) -> set[int]:
        return set()

    def window_before(self, window: int) -> int:
        return window - 1

    def carried_into(self, window: int) -> Sequence[CarriedBlock]:
        return ()

    def begin(self, window: Window, done: set[int]) -> None:
        self._finished = Finished(errors=dict(window.errors))
        self._steps.step(len(window.errors), 0)

    def take(self, window: Window, finished: Finished) -> None:
        self._steps.step(len(finished.errors), 0)
        self._finished.add(finished)

    def end(self, window: Window) -> None:
        inputs, rows = self._inputs, self._finished.rows
        self._first_window.take(window, rows)
        self._first_window.end(window.index)
        temperature, probabilities = inputs.settings.answers.temperature, self._parts.probabilities
        done = ResultRows.of(window, rows, self._finished.errors, inputs.schema, temperature, probabilities)
        self.tables.append(make_rows(window, done))

    def written_if_stopped(self) -> AbstractContextManager[None]:
        return nullcontext()

    def phase(self, name: Phase, *, waits: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def planned(self, packs: list[Pack], rows: int) -> None: ...

    def pack_begins(self, pack: Pack) -> None: ...

    def step(self, pack: Pack | None, rows: float, tokens: float, share: float) -> None:
        self._steps.step(rows, tokens)

    def pack_ends(self, pack: Pack) -> None: ...


class Steps:
    """Progress of scoring in memory, `shown` on request. A `step` raises Interrupted if that was `asked` for.

    Use it as a context manager.
    """

    def __init__(self, asked: Event, *, shown: bool) -> None:
        self._asked = asked
        self._shown = shown
        self._progress: Progress | None = None

    def expect(self, rows: int | Callable[[], Expected | None]) -> None:
        """Take the number of rows that will be scored, as far as it is known."""
        if self._shown:
            live = log.on_terminal() or "ipykernel" in sys.modules  # a notebook understands carriage returns
            self._progress = Progress(rows, interval=SECONDS_BETWEEN_LINES, live=live)
            self._progress.start()

    def step(self, rows: float, tokens: float) -> None:
        """Count this many more computed rows and prompt tokens."""
        if self._asked.is_set():
            raise Interrupted(signal.SIGINT)
        if self._progress is not None:
            self._progress.advance(rows, tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._progress is not None:
            self._progress.close()

"""Scoring rows in this process, as `prefill score` scores them, without writing anything."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from threading import Event
from typing import TYPE_CHECKING, Any, Self, cast

import pyarrow as pa

from prefillcli.data.output.columns import ResultRows, kinds_of, result_schema
from prefillcli.data.output.manifest import Job
from prefillcli.data.output.parts import make_rows
from prefillcli.data.prompts.builder import PromptBuilder, prompt_column
from prefillcli.data.prompts.labels import Labels
from prefillcli.data.reading.record_batches import TableRows
from prefillcli.data.rows import RowError, ScoredRow, Window
from prefillcli.data.windows import Prefetcher, windows
from prefillcli.engines.base import Engine
from prefillcli.engines.registry import loader_of
from prefillcli.errors import Interrupted, UsageError
from prefillcli.jobs.inputs import Opening, make_builder, refuse_idle_draft, refuse_missing_adapters
from prefillcli.jobs.load import Models, load_models
from prefillcli.jobs.recorder import LabelMassCheck
from prefillcli.jobs.row_choice import RowChoice, check_rationales
from prefillcli.jobs.wanted_rows import JobRationales, job_rationales, text_room
from prefillcli.jobs.window_scoring import ScoringOptions, score_window
from prefillcli.options.commands import ScoreSettings
from prefillcli.plan.blocks import BLOCK_TOKENS, CarriedBlock
from prefillcli.plan.pack import Pack
from prefillcli.runtime import log
from prefillcli.runtime.clock import Phase
from prefillcli.runtime.progress import Progress

if TYPE_CHECKING:  # these take torch along
    from prefillcli.compress.window_compressor import KeepChoice, WindowCompressor
    from prefillcli.data.reading.source import Source


SECONDS_BETWEEN_LINES = 30.0


class TableScorer:
    """Models that are loaded once, for any number of tables and files.

    Of the `settings`, those that say how rows are read and written have no effect. Where `--memory` is not given,
    packs are sized by this `share` of the memory that is free. Raises UsageError or ResourceError.
    """

    def __init__(self, settings: ScoreSettings, *, share: float = 1.0) -> None:
        check_rationales(settings)
        self._settings = settings
        opening = Opening(settings)
        opening.source = cast("Source", TableRows(pa.table({})))
        for each in opening.features:
            each.source_opened(opening)
        loader = loader_of(settings.engine)
        opening.use_models(loader.open_models(settings))
        self._opened, self._labels = opening.opened, opening.labels
        make_builder(settings, self._opened, ()).close()  # a wrong template costs no load
        self._models = load_models(
            self._opened,
            settings,
            loader,
            keep=float(settings.keep),
            options=settings.engine_options,
            share=share,
            placement=settings,
            **text_room(settings, self._opened, self._labels.names),
        )
        self._compressor = _compressor(self._models, self._labels)
        self._label_mass = LabelMassCheck(self._labels)
        self._tables = opening
        self._learnt: dict[str, Any] = {}
        self._checked = False  # whether the labels have come after some prompts

    @property
    def place(self) -> str:
        """The model's folder, device and number format."""
        files = self._opened.files
        return f"{files.path} on {self._opened.device} in {str(files.dtype).removeprefix('torch.')}"

    def score_table(self, table: pa.Table, bad: Mapping[int, str], heard: Steps) -> pa.Table:
        """The table with the columns of an output added, one row for each row. Those in `bad` are error rows.

        Its rows are planned together, in windows of a bounded size. Raises UsageError if the table has such a column
        already or lacks one that the prompt needs, or if the labels fail after every prompt of the first table.
        """
        opening = self._tables
        schema = result_schema(self._labels.names, opening.groups, self._labels.measure)
        for name in schema.names:
            if name in table.column_names:
                raise UsageError(f"the table has a column {name!r} already, which scoring adds\nrename or drop it")
        heard.expect(table.num_rows)
        found = [schema.empty_table()]
        if table.num_rows:  # an empty list has no columns either
            rows = TableRows(table, bad)
            opening.source = cast("Source", rows)
            if not self._checked:
                refuse_idle_draft(self._settings, rows)
            self._prepare(rows)
            found += [each.select(schema.names) for each in self._scored(opening, heard)]
        added = pa.concat_tables(found)
        for name in added.column_names:
            table = table.append_column(added.field(name), added[name])
        return table

    def score_files(self, settings: ScoreSettings, heard: Steps) -> pa.Table:
        """What `prefill score` would write of the inputs of `settings`, which else are those of this scorer.

        Files are read a window at a time. Raises UsageError or PrefillError, as reading does.
        """
        opening = Opening(settings)
        opening.open_source()
        opening.use_models(self._opened, self._labels)
        opening.open_rows()
        try:
            schema = opening.schema()
            schema.require_distinct()
            heard.expect(opening.source.selected_rows)
            found = list(self._scored(opening, heard))
        finally:
            opening.builder.close()
        job = Job({}, {}, settings.id_column)
        if not found:
            return schema.arrow(job, {}).remove_metadata().empty_table()
        rows = pa.concat_tables(found)
        kinds = {name: kinds_of(rows[name]) for name in schema.carried.names} if schema.json_carried else {}
        return schema.table(rows, schema.arrow(job, kinds).remove_metadata())

    def resume_threads(self) -> None:
        """Compute with the threads that were chosen when the models were loaded."""
        if self._opened.threads is not None:
            self._opened.threads.resume()

    def close(self) -> None:
        """Let go of the models, and of the process that renders templates."""
        self._drop_builder()
        self._models.close()

    def _prepare(self, rows: TableRows) -> None:
        """Make prompts possible of these rows, with the builder of the last table where it fits."""
        builder: PromptBuilder | None = getattr(self._tables, "builder", None)
        if builder is None or (
            builder.template is None
            and builder.column != prompt_column(builder.settings.prompt_column, rows.available)
        ):
            self._drop_builder()
            self._tables.builder = builder = make_builder(self._settings, self._opened, rows.available)
        refuse_missing_adapters(builder.settings.adapter_column, rows)
        rows.select(columns=builder.columns, optional=builder.optional, max_row_bytes=builder.max_row_bytes)
        if not self._checked:
            for each in self._tables.features:
                each.rows_opened(self._tables)

    def _drop_builder(self) -> None:
        if hasattr(self._tables, "builder"):
            self._tables.builder.close()
            del self._tables.builder

    def _scored(self, opening: Opening, heard: Steps) -> Iterator[pa.Table]:
        """Row numbers, carried and result columns, window by window."""
        settings, builder, labels = opening.settings, opening.builder, self._labels
        for each in opening.features:
            self._learnt |= each.learn(
                opening, self._models.engine, self._learnt, lambda tokens: heard.step(None, 0, 0, 0)
            )
        carried: tuple[CarriedBlock, ...] = ()
        rationales = job_rationales(opening, RowChoice.of(settings, opening.schema()))
        with Prefetcher(windows(opening.source, builder, labels, id_column=settings.id_column)) as coming:
            try:
                for window in coming:
                    if not self._checked:
                        labels.check(window)
                        self._checked = True
                    rows, carried = self._score(opening, window, carried, rationales, heard)
                    yield rows
            except BaseException:
                builder.close()  # else its thread would go on with a window that nobody wants
                self._drop_builder()
                raise
            finally:
                if rationales is not None and rationales.evidence is not None:
                    rationales.evidence.close()

    def _score(
        self,
        opening: Opening,
        window: Window,
        carried: tuple[CarriedBlock, ...],
        rationales: JobRationales | None,
        heard: Steps,
    ) -> tuple[pa.Table, tuple[CarriedBlock, ...]]:
        """A window's rows, and the blocks that it hands to the next window."""
        threads = self._opened.threads
        options = ScoringOptions(
            labels=self._labels,
            schedule=self._settings.schedule,
            block_tokens=BLOCK_TOKENS if self._compressor is None else 0,
            rationales=rationales,
            adjust_threads=(lambda: None) if threads is None else threads.adjust,
        )
        results: list[ScoredRow] = []
        errors: dict[int, RowError] = dict(window.errors)
        handed: tuple[CarriedBlock, ...] = ()
        heard.step(None, len(errors), 0, 0)
        for finished in score_window(window, set(), carried, self._models.engine, self._compressor, options, heard):
            heard.step(None, len(finished.errors), 0, 0)
            results += finished.rows
            errors |= finished.errors
            handed = handed if finished.carried is None else finished.carried
        self._label_mass.take(window.index, results)
        self._label_mass.end(window.index)
        labels, temperature = self._labels, self._settings.temperature
        done = ResultRows.of(window, results, errors, labels.names, temperature, opening.probabilities, labels.measure)
        return make_rows(window, done, opening.groups), handed


class Steps:
    """The `Listener` of scoring in memory. It stops where it is `asked` to, and shows how far it is if `shown`.

    Use it as a context manager.
    """

    def __init__(self, asked: Event, *, shown: bool) -> None:
        self._asked = asked
        self._shown = shown
        self._progress: Progress | None = None

    def expect(self, rows: int | None) -> None:
        """So many rows will be scored, as far as is known."""
        if self._shown:
            live = log.on_terminal() or "ipykernel" in sys.modules  # a notebook understands carriage returns
            self._progress = Progress(rows, interval=SECONDS_BETWEEN_LINES, live=live)

    def phase(self, name: Phase, *, waits: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def chose(self, choice: KeepChoice) -> None: ...

    def planned(self, packs: list[Pack], rows: int) -> None: ...

    def pack_begins(self, pack: Pack) -> None: ...

    def step(self, pack: Pack | None, rows: float, tokens: float, share: float) -> None:
        if self._asked.is_set():
            raise Interrupted(signal.SIGINT)
        if self._progress is not None:
            self._progress.advance(rows, tokens)

    def pack_ends(self, pack: Pack) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._progress is not None:
            self._progress.close()


def _compressor(models: Models[Engine], labels: Labels) -> WindowCompressor | None:
    if models.compressor is None:
        return None
    from prefillcli.compress.window_compressor import WindowCompressor  # takes torch along

    return WindowCompressor(models.compressor, models.engine, labels, methods={})

"""Scoring rows in this process, as `prefill score` scores them, without writing anything."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from threading import Event
from typing import TYPE_CHECKING, Self

import pyarrow as pa

from prefillcli.data.output.columns import OutputSchema, ResultRows, kinds_of, result_schema
from prefillcli.data.output.manifest import Job
from prefillcli.data.output.parts import make_rows
from prefillcli.data.prompts.builder import PromptBuilder
from prefillcli.data.prompts.labels import Labels
from prefillcli.data.prompts.settings import prompt_column
from prefillcli.data.reading.record_batches import TableRows
from prefillcli.data.reading.source import Source
from prefillcli.data.rows import RowError, ScoredRow, Window
from prefillcli.data.windows import Prefetcher, windows
from prefillcli.engines.base import Engine
from prefillcli.engines.registry import loader_of
from prefillcli.errors import Interrupted, UsageError
from prefillcli.jobs.calibration_file import (
    calibration_of,
    check_calibration,
    content_free_prompts,
    contextual_calibration,
)
from prefillcli.jobs.inputs import (
    carried_columns,
    make_builder,
    open_source,
    prompt_builder,
    refuse_idle_draft,
    refuse_missing_adapters,
    require_label_uses,
)
from prefillcli.jobs.load import Models, load_models
from prefillcli.jobs.recorder import LabelMassCheck
from prefillcli.jobs.row_choice import RowChoice, check_rationales, column_groups
from prefillcli.jobs.wanted_rows import JobRationales, job_rationales, text_room
from prefillcli.jobs.window_scoring import ScoringOptions, score_window
from prefillcli.models.open import answer_labels
from prefillcli.options.score import ScoreSettings
from prefillcli.plan.blocks import BLOCK_TOKENS, CarriedBlock
from prefillcli.plan.pack import Pack
from prefillcli.runtime import log
from prefillcli.runtime.clock import Phase
from prefillcli.runtime.progress import Progress

if TYPE_CHECKING:  # these take torch along
    from prefillcli.compress.window_compressor import KeepChoice, WindowCompressor


SECONDS_BETWEEN_LINES = 30.0


class TableScorer:
    """Models that are loaded once, for any number of tables and files.

    Of the `settings`, those that say how rows are read and written have no effect. Where `--memory` is not given,
    packs are sized by this `share` of the memory that is free. Raises UsageError or ResourceError.
    """

    def __init__(self, settings: ScoreSettings, *, share: float = 1.0) -> None:
        check_calibration(settings)
        check_rationales(settings)
        loader = loader_of(settings.engine)
        opened = self._opened = loader.open_models(settings)
        self._settings = settings
        self._groups = column_groups(settings)
        self._labels = answer_labels(opened, settings)
        require_label_uses(settings, self._labels)
        self._calibration = calibration_of(settings, self._labels.labels)
        self._builder: PromptBuilder | None = make_builder(settings, opened, ())  # a wrong template costs no load
        self._models = load_models(
            opened,
            settings,
            loader,
            keep=float(settings.keep),
            options=settings.engine_options,
            share=share,
            placement=settings,
            **text_room(settings, opened, self._labels.names),
        )
        self._compressor = _compressor(self._models, self._labels)
        self._label_mass = LabelMassCheck(self._labels)
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
        schema = result_schema(self._labels.names, self._groups, self._labels.measure)
        choice = RowChoice.of(self._settings, self._labels, pa.schema([]), TableRows.kind)
        for name in schema.names:
            if name in table.column_names:
                raise UsageError(f"the table has a column {name!r} already, which scoring adds\nrename or drop it")
        heard.expect(table.num_rows)
        found = [schema.empty_table()]
        if table.num_rows:  # an empty list has no columns either
            rows = TableRows(table, bad)
            scored = self._scored(rows, self._prepared(rows), self._settings, choice, heard)
            found += [each.select(schema.names) for each in scored]
        added = pa.concat_tables(found)
        for name in added.column_names:
            table = table.append_column(added.field(name), added[name])
        return table

    def score_files(self, settings: ScoreSettings, heard: Steps) -> pa.Table:
        """What `prefill score` would write of the inputs of `settings`, which else are those of this scorer.

        Files are read a window at a time. Raises UsageError or PrefillError, as reading does.
        """
        source, template = open_source(settings, carried_columns(settings))
        refuse_idle_draft(settings, source)
        builder = prompt_builder(settings, self._opened, source, carried_columns(settings, source), template)
        try:
            schema = OutputSchema(
                labels=self._labels.names,
                id_name=settings.id_column,
                carried=source.carried_schema,
                json_carried=source.kind == "jsonl",
                json_text=False,
                truth=None,
                groups=self._groups,
                measure=self._labels.measure,
            )
            schema.require_distinct()
            choice = RowChoice.of(settings, self._labels, source.carried_schema, source.kind)
            heard.expect(source.selected_rows)
            found = list(self._scored(source, builder, settings, choice, heard))
        finally:
            builder.close()
        job = Job({}, {}, settings.id_column)
        if not found:
            return schema.arrow(job, {}).remove_metadata().empty_table()
        rows = pa.concat_tables(found)
        kinds = {name: kinds_of(rows[name]) for name in source.carried_schema.names} if schema.json_carried else {}
        return schema.table(rows, schema.arrow(job, kinds).remove_metadata())

    def resume_threads(self) -> None:
        """Compute with the threads that were chosen when the models were loaded."""
        if self._opened.threads is not None:
            self._opened.threads.resume()

    def close(self) -> None:
        """Let go of the models, and of the process that renders templates."""
        self._drop_builder()
        self._models.close()

    def _prepared(self, rows: TableRows) -> PromptBuilder:
        """The builder, with the columns chosen that it needs of these rows."""
        if not self._checked:
            refuse_idle_draft(self._settings, rows)
        builder = self._builder
        if builder is None or (
            builder.template is None
            and builder.column != prompt_column(builder.settings.prompt_column, rows.available)
        ):
            self._drop_builder()
            builder = self._builder = make_builder(self._settings, self._opened, rows.available)
        refuse_missing_adapters(builder.settings.adapter_column, rows)
        rows.select(columns=builder.columns, optional=builder.optional, max_row_bytes=builder.max_row_bytes)
        return builder

    def _drop_builder(self) -> None:
        if self._builder is not None:
            self._builder.close()
        self._builder = None

    def _scored(
        self,
        source: TableRows | Source,
        builder: PromptBuilder,
        settings: ScoreSettings,
        choice: RowChoice | None,
        heard: Steps,
    ) -> Iterator[pa.Table]:
        """Row numbers, carried and result columns, window by window."""
        if settings.calibrate_with and self._calibration is None:
            prompts = content_free_prompts(settings, source, builder, self._labels)
            self._calibration = contextual_calibration(
                prompts, self._labels, self._models.engine, lambda tokens: heard.step(None, 0, 0, 0)
            )
        carried: tuple[CarriedBlock, ...] = ()
        rationales = job_rationales(settings, choice, self._opened, self._labels, builder, self._calibration)
        with Prefetcher(windows(source, builder, self._labels, id_column=settings.id_column)) as coming:
            try:
                for window in coming:
                    if not self._checked:
                        self._labels.check(window)
                        self._checked = True
                    rows, carried = self._score(window, carried, rationales, heard)
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
        done = ResultRows.of(window, results, errors, labels.names, temperature, self._calibration, labels.measure)
        return make_rows(window, done, self._groups), handed


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

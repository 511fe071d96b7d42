"""Scoring an Arrow table in this process, as `prefill score` scores a file with the same rows."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import pyarrow as pa

from prefillcli.data.output.columns import ResultRows, result_arrays, result_schema
from prefillcli.data.prompts.builder import PromptBuilder
from prefillcli.data.prompts.labels import Labels, parse_labels
from prefillcli.data.reading.arrow_table import TableRows
from prefillcli.data.rows import RowError, ScoredRow, Window
from prefillcli.data.windows import Prefetcher, windows
from prefillcli.engines.base import Engine
from prefillcli.engines.registry import loader_of
from prefillcli.errors import UsageError
from prefillcli.jobs.calibration_file import calibration_of
from prefillcli.jobs.content_free import content_free_prompts, contextual_calibration
from prefillcli.jobs.inputs import prompt_builder, refuse_idle_draft
from prefillcli.jobs.load import Models, load_models
from prefillcli.jobs.window_scoring import ScoringOptions, score_window
from prefillcli.options.score import ScoreSettings
from prefillcli.plan.blocks import BLOCK_TOKENS, CarriedBlock
from prefillcli.plan.pack import Pack
from prefillcli.runtime.clock import Phase

if TYPE_CHECKING:  # these take torch along
    from prefillcli.compress.auto import KeepChoice
    from prefillcli.compress.window_compressor import WindowCompressor


class TableScorer:
    """Models that are loaded once, for any number of tables.

    Of the `settings`, those that say how rows are read and written have no effect. Where `--memory` is not given,
    packs are sized by this `share` of the memory that is free. Raises UsageError or ResourceError.
    """

    def __init__(self, settings: ScoreSettings, *, share: float = 1.0) -> None:
        wanted = parse_labels(settings.labels)
        self._calibration = calibration_of(settings, wanted)
        loader = loader_of(settings.engine)
        opened = self._opened = loader.open_models(settings)
        self._settings = settings
        self._labels = Labels(opened.tokenizer, wanted)
        self._models = load_models(
            opened, settings, loader, keep=float(settings.keep), options=settings.engine_options
        )
        self._compressor = _compressor(self._models, self._labels)
        self._builder: PromptBuilder | None = None

    def score(self, table: pa.Table) -> pa.Table:
        """The table with the columns of an output added, one row for each row.

        Its rows are planned together, in windows of a bounded size. Raises UsageError if the table has such a column
        already or lacks one that the prompt needs, or if the labels fail after every prompt of the first table.
        """
        schema = result_schema(self._labels.names, calibrated=self._settings.calibrates)
        for name in schema.names:
            if name in table.column_names:
                raise UsageError(f"the table has a column {name!r} already, which scoring adds\nrename or drop it")
        rows = TableRows(table)
        first = self._builder is None
        builder = self._prepared(rows)
        found = [pa.table([[] for _ in schema], schema=schema)]
        carried: tuple[CarriedBlock, ...] = ()
        with Prefetcher(windows(rows, builder, self._labels, id_column=None)) as coming:
            for window in coming:
                if first:
                    self._labels.check(window)
                    first = False
                scored, carried = self._score(window, carried)
                found.append(scored)
        added = pa.concat_tables(found)
        for name in added.column_names:
            table = table.append_column(added.field(name), added[name])
        return table

    def close(self) -> None:
        """Let go of the models, and of the process that renders templates."""
        if self._builder is not None:
            self._builder.close()
        self._models.close()

    def _prepared(self, rows: TableRows) -> PromptBuilder:
        """The builder, with the columns chosen that it needs of these rows."""
        builder = self._builder
        if builder is None:
            refuse_idle_draft(self._settings, rows)
            builder = self._builder = prompt_builder(self._settings, self._opened, rows, ())
        rows.select(columns=builder.columns, optional=builder.optional, max_row_bytes=builder.max_row_bytes)
        if self._settings.calibrate_with and self._calibration is None:
            prompts = content_free_prompts(self._settings, rows, builder, self._labels)
            self._calibration = contextual_calibration(prompts, self._labels, self._models.engine)
        return builder

    def _score(self, window: Window, carried: tuple[CarriedBlock, ...]) -> tuple[pa.Table, tuple[CarriedBlock, ...]]:
        """The new columns of a window's rows, and the blocks that it hands to the next window of its table."""
        threads = self._opened.threads
        options = ScoringOptions(
            labels=self._labels,
            schedule=self._settings.schedule,
            block_tokens=BLOCK_TOKENS if self._compressor is None else 0,
            adjust_threads=(lambda: None) if threads is None else threads.adjust,
        )
        results: list[ScoredRow] = []
        errors: dict[int, RowError] = dict(window.errors)
        handed: tuple[CarriedBlock, ...] = ()
        for finished in score_window(
            window, set(), carried, self._models.engine, self._compressor, options, _Unheard()
        ):
            results += finished.rows
            errors |= finished.errors
            handed = handed if finished.carried is None else finished.carried
        done = ResultRows.of(
            window, results, errors, self._labels.names, self._settings.temperature, self._calibration
        )
        schema = result_schema(self._labels.names, calibrated=self._settings.calibrates)
        return pa.Table.from_arrays(result_arrays(done), schema=schema), handed


class _Unheard:
    """A `Listener` that tells nobody."""

    def phase(self, name: Phase, *, waits: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def chose(self, choice: KeepChoice) -> None: ...

    def planned(self, packs: list[Pack], rows: int) -> None: ...

    def pack_begins(self, pack: Pack) -> None: ...

    def step(self, pack: Pack | None, rows: float, tokens: float, share: float) -> None: ...

    def pack_ends(self, pack: Pack) -> None: ...


def _compressor(models: Models[Engine], labels: Labels) -> WindowCompressor | None:
    if models.compressor is None:
        return None
    from prefillcli.compress.window_compressor import WindowCompressor  # takes torch along

    return WindowCompressor(models.compressor, models.engine, labels, methods={})

"""The job of `prefill score`: source -> prompts -> plan -> engine -> sink -> report."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from prefillcli.compress.audit_draw import AuditDraw
from prefillcli.data.output.heartbeat import Heartbeat
from prefillcli.data.output.sink import Sink
from prefillcli.data.prompts.builder import PromptBuilder
from prefillcli.data.prompts.labels import Labels, parse_labels
from prefillcli.data.reading.source import Source
from prefillcli.data.rows import Int64Array, Window
from prefillcli.data.windows import Prefetcher, windows
from prefillcli.engines.base import Engine
from prefillcli.engines.choice import loader_of
from prefillcli.engines.kinds import ENGINES
from prefillcli.errors import (
    OutputBusyError,
    OutputConflictError,
    OutputExistsError,
    UsageError,
)
from prefillcli.forecast.profile import find_profile
from prefillcli.forecast.remaining_time import RemainingTime
from prefillcli.jobs.dry_run import dry_run_job
from prefillcli.jobs.identity import fingerprint, selection
from prefillcli.jobs.inputs import (
    LocalModels,
    carried_columns,
    open_source,
    prompt_builder,
    refuse_idle_draft,
    refuse_unlike_partitions,
)
from prefillcli.jobs.load import Models, load_models
from prefillcli.jobs.outcome import conclude, fail
from prefillcli.jobs.paths import default_output, default_report, refuse_among_inputs
from prefillcli.jobs.window import WindowScorer
from prefillcli.models.open import Opened
from prefillcli.options.score import ScoreSettings
from prefillcli.redaction import shown, shown_report
from prefillcli.report.files import write_files
from prefillcli.report.run import MemoryTrace, RunReport, ThreadCounts, versions
from prefillcli.report.run_table import print_table
from prefillcli.runtime.clock import Clock, MemoryWatch
from prefillcli.runtime.memory import peak_memory
from prefillcli.runtime.progress import Progress
from prefillcli.runtime.signals import Stop
from prefillcli.runtime.threads import Threads
from prefillcli.stats.audit import audit_of

if TYPE_CHECKING:
    from prefillcli.forecast.profile import Profile
    from prefillcli.jobs.compressing import WindowCompressor


def score_job(settings: ScoreSettings) -> dict[str, Any]:
    """Run the job; write `run.json` and its page whatever happens; return the summary for the last line on stdout.

    Errors are told on stderr, and become the exit code in the summary. A dry run writes a report of its own.
    """
    if settings.dry_run:
        return dry_run_job(settings)
    clock = Clock()
    report = RunReport(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        settings=shown(settings.model_dump(mode="json")),
    )
    job, memory = _ScoreJob(settings, clock, report), MemoryWatch(clock)
    try:
        with memory, Stop() as stop:
            job.run(stop)
    except BaseException as error:
        fail(error, report, debug=settings.debug)
    job.finish_report()
    report.memory_trace = MemoryTrace.of(memory.samples)
    write_files(report, settings.metrics_file)
    if not settings.quiet and report.status == "complete":
        print_table(shown_report(report))
    return report.summary()


class _ScoreJob:
    """One run of `prefill score`."""

    def __init__(self, settings: ScoreSettings, clock: Clock, report: RunReport) -> None:
        self.settings = settings
        self.clock = clock
        self.report = report
        self.source: Source | None = None
        self.builder: PromptBuilder | None = None
        self.sink: Sink | None = None
        self.forecast: RemainingTime | None = None
        self.threads: Threads | None = None
        self._loader = loader_of(settings.engine)
        self._scored_before = 0  # rows that an earlier run has scored

    def run(self, stop: Stop) -> None:
        settings, clock, report = self.settings, self.clock, self.report
        output = settings.output or default_output(settings.inputs[0], partition=settings.partition)
        report.output = output
        report.report = settings.report or default_report(output)
        with clock.phase("read"):
            source = self.source = open_source(settings, carried_columns(settings))
            self._refuse_among_inputs(output, source)
            refuse_unlike_partitions(settings, source, output)
            refuse_idle_draft(settings, source)
            source.begin_hashing()
            models = LocalModels(settings)  # before anything of them is read
        with clock.phase("load"), stop.at_once():
            opened = self._loader.open_models(settings)
            builder = self.builder = prompt_builder(settings, opened, source, carried_columns(settings, source))
        self.threads = opened.threads
        labels = Labels(opened.tokenizer, parse_labels(settings.labels))
        with clock.phase("read"), stop.at_once():
            report.fingerprint = fingerprint(settings, opened, models, source, builder, labels)
        with self._open_sink(output, source, labels) as sink:
            self.sink = sink
            report.resumed = sink.counts.total > 0
            self._scored_before = sink.counts.scored
            if opened.draft is not None:
                report.keep, report.keep_auto = self._keep(sink), sink.plan.get("keep_auto")
            if not sink.complete:
                profile = self._profile(opened)
                if profile is not None:
                    self.forecast = RemainingTime(profile.seconds, source.selection().count(source.count()))
                self._score(source, builder, labels, sink, opened, profile, stop, models)
            self._report_audit(sink, labels)
        conclude(report, sink.counts, max_error_rate=settings.max_error_rate, skip_empty=settings.skip_empty)

    def _refuse_among_inputs(self, output: str, source: Source) -> None:
        refuse_among_inputs(output, source)
        if self.settings.report is not None:
            try:
                refuse_among_inputs(self.settings.report, source, option="--report")
            except UsageError:
                self.report.report = None
                raise

    def _profile(self, opened: Opened) -> Profile | None:
        """None without a profile that applies; it is told of one that does not, with a warning if it was asked for."""
        if "forecast" not in ENGINES[self.settings.engine].can:
            return None
        files = opened.files
        profile, name, why = find_profile(
            self.settings.profile, self.report.fingerprint["model"], files.dtype, opened.device
        )
        self.report.no_prediction = why
        if why is not None and self.settings.profile is not None:
            print(f"prefill: warning: no prediction: {why}", file=sys.stderr)
        elif why is not None and not self.settings.quiet and os.path.exists(name):
            print(f"prefill: no prediction: {why}", file=sys.stderr)
        return profile

    def _open_sink(self, output: str, source: Source, labels: Labels) -> Sink:
        """The output. Where it must not be touched, neither must the report that lies beside it."""
        settings = self.settings
        try:
            return Sink.open(
                output,
                fingerprint=self.report.fingerprint,
                selection=selection(settings),
                resume=settings.resume,
                overwrite=settings.overwrite,
                label_names=labels.names,
                carried=source.carried_schema,
                id_name=settings.id_column,
                jsonl_input=source.kind == "jsonl",
                audit=settings.audit > 0,
                truth=settings.truth,
                partitions=source.partitions if settings.partition else None,
            )
        except (OutputExistsError, OutputConflictError, OutputBusyError):
            self.report.report = None
            raise

    def _score(
        self,
        source: Source,
        builder: PromptBuilder,
        labels: Labels,
        sink: Sink,
        opened: Opened,
        profile: Profile | None,
        stop: Stop,
        models: LocalModels,
    ) -> None:
        settings, clock = self.settings, self.clock

        def unchanged(rows: Int64Array | None) -> None:
            models.require_unchanged()
            source.require_unchanged(rows)

        audit = None
        if settings.audit:
            audit = AuditDraw(settings.audit, source.selection(), source.count())
        ended: list[int] = []
        coming = Prefetcher(
            windows(source, builder, labels, id_column=settings.id_column, skip=sink.finished, ended=ended.append),
            cancel=builder.close,
        )
        forecast = self.forecast
        progress = Progress(
            source.selected_rows,
            interval=settings.progress_interval,
            quiet=settings.quiet,
            seconds_left=(lambda: None) if forecast is None else forecast.seconds_left,
        )
        with ExitStack() as engine, coming, progress, Heartbeat(sink.work, progress.pace):
            progress.resume(sink.counts.total)
            if forecast is not None:
                forecast.skip(sink.counts.total)
            scorer: WindowScorer | None = None
            for window in self._waiting(coming, stop):
                if scorer is None:
                    labels.check(window)
                    with clock.phase("load"), stop.at_once():
                        loaded = self._load(opened, sink, profile)
                    engine.callback(loaded.close)
                    scorer = WindowScorer(
                        loaded.engine,
                        sink,
                        labels,
                        schedule=settings.schedule,
                        temperature=settings.temperature,
                        report=self.report,
                        clock=clock,
                        progress=progress,
                        stop=stop,
                        threads=opened.threads,
                        compress=self._compress_with(loaded, labels, sink),
                        audit=audit,
                        forecast=forecast,
                        unchanged=unchanged,
                    )
                scorer.score(window)
            with clock.phase("write"):
                unchanged(None)
                (count,) = ended  # told at the end of the input
                sink.finish(count)

    def _report_audit(self, sink: Sink, labels: Labels) -> None:
        """Sum up what compression did to the rows that were read both ways."""
        if not self.settings.audit:
            return
        audited = sink.counts.audited
        pairs = [(score, full, labels.is_positive(answer)) for score, full, _, answer in audited]
        self.report.audit = audit_of(pairs, [flipped for _, _, flipped, _ in audited])

    def _waiting(self, coming: Iterator[Window], stop: Stop) -> Iterator[Window]:
        """The windows, with the time spent waiting for them."""
        while True:
            with self.clock.phase("waiting"), stop.at_once():
                window = next(coming, None)
            if window is None:
                return
            yield window

    def _load(self, opened: Opened, sink: Sink, profile: Profile | None) -> Models[Engine]:
        settings = self.settings
        loaded = load_models(
            opened,
            settings,
            self._loader,
            keep=self._keep(sink),
            before=sink.plan,
            options=settings.engine_options,
            measured=profile,
        )
        sink.plan = loaded.plan
        return loaded

    def _keep(self, sink: Sink) -> float:
        """The job's keep rate: given or chosen; 1 until it is."""
        keep = self.settings.keep
        rate: float = sink.plan.get("keep", 1.0 if keep == "auto" else keep)
        return rate

    def _compress_with(self, loaded: Models[Engine], labels: Labels, sink: Sink) -> WindowCompressor | None:
        if loaded.compressor is None:
            return None
        from prefillcli.jobs.compressing import WindowCompressor  # takes torch along

        return WindowCompressor(loaded.compressor, loaded.engine, labels, sink, self.settings, self.report)

    def finish_report(self) -> None:
        """Put the numbers of the run into the report."""
        report, seconds = self.report, self.report.seconds
        if self.sink is not None:
            report.take(self.sink.counts)
        for name, value in self.clock.seconds.items():
            setattr(seconds, name, value)
        if self.forecast is not None:
            report.predicted_seconds = self.forecast.ran
        if self.threads is not None and self.threads.ran:
            report.threads = ThreadCounts(min=self.threads.ran[0], max=self.threads.ran[1])
        if self.source is not None:
            seconds.read += self.source.seconds
        if self.builder is not None:
            seconds.render, seconds.tokenize = self.builder.render_seconds, self.builder.tokenize_seconds
        seconds.total = self.clock.total
        report.rows_per_second = (report.rows.scored - self._scored_before) / seconds.total
        report.tokens_per_second = report.tokens.prompt / seconds.total
        report.peak_memory_bytes = type(report.peak_memory_bytes)(**peak_memory())
        report.versions = versions()

"""The job of `prefill score`: source -> prompts -> plan -> engine -> sink -> report."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from typing import Any

from prefillcli.data.output.sink import ShardSink, Sink, plan_of, refuse_known
from prefillcli.data.rows import Int64Array, Window
from prefillcli.errors import shown, shown_report
from prefillcli.forecast.profile import Profile, find_profile
from prefillcli.jobs.dry_run import dry_run_job
from prefillcli.jobs.identity import LocalModels, fingerprint, is_same, output_job
from prefillcli.jobs.path_table import output_of, report_path, require_apart
from prefillcli.jobs.recorder import Recorder, RemainingTime
from prefillcli.jobs.scorer import DTYPES, USUAL, Granularity, Scorer
from prefillcli.jobs.shell import conclude, leave_earlier_report, shell
from prefillcli.options.commands import ScoreSettings
from prefillcli.report.run import (
    ComputedIn,
    RunReport,
    print_table,
    write_files,
)
from prefillcli.runtime import log
from prefillcli.runtime.clock import Clock, Expected, MemoryWatch, step
from prefillcli.runtime.signals import Stop


def score_job(settings: ScoreSettings, granularity: Granularity = USUAL) -> dict[str, Any]:
    """Run the job; write `run.json` and its page however it ends; return the summary for the last line on stdout.

    Errors are reported on stderr, and become the exit code in the summary. A dry run writes a report of its own.
    """
    run_id = settings.run_id or log.new_run_id()
    with log.log_of(run_id, json_lines=settings.log_format == "json"):
        if settings.dry_run:
            return dry_run_job(settings, granularity)
        return _run_job(settings, run_id, granularity)


def _run_job(settings: ScoreSettings, run_id: str, granularity: Granularity) -> dict[str, Any]:
    clock = Clock()
    report = RunReport.new(
        run_id=run_id,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        settings=shown(settings.model_dump(mode="json")),
    )
    log.event("started", "the run begins", settings=report.settings)
    settings = settings.model_copy(update={"run_id": run_id})  # workers say it, too
    job, memory = Job(settings, clock, report, granularity), MemoryWatch(clock)

    def finish() -> None:
        job.fill_report()
        report.take_memory(memory.samples)
        leave_earlier_report(report, job.output, settings.shard_of, quiet=settings.quiet)
        write_files(report, job.metrics_file)

    with shell(report, debug=settings.debug, resumable=True, finish=finish) as stop, memory:
        job.run(stop)
    step("")
    if not settings.quiet and report.status == "complete" and not log.logs_json():
        print_table(shown_report(report))
    log.event("ended", f"the run is {report.status}, exit code {report.exit_code}", summary=report.summary())
    return report.summary()


class Job(Scorer):
    """One run of `prefill score`, as its features see it."""

    stop: Stop
    sink: Sink
    recorder: Recorder
    profile: Profile | None = None
    """Predicts times, and sizes packs."""

    def __init__(self, settings: ScoreSettings, clock: Clock, report: RunReport, granularity: Granularity) -> None:
        super().__init__(settings, granularity)
        self.clock = clock
        self.report = report
        """The report of the run; nothing is read back from it."""
        self.output = output_of(settings)
        self.metrics_file: str | None = None
        """The path of metrics, once it is certain that nothing else is there."""
        self._scored_before = 0  # rows that an earlier run has scored
        self._forecast: RemainingTime | None = None

    def run(self, stop: Stop) -> None:
        settings, report = self.settings, self.report
        self.stop = stop
        report.output, report.shard = self.output, settings.shard
        with self.clock.phase("read"), stop.at_once():
            require_apart(settings)  # before anything is written, even the report of a failed run
        report.report = report_path(self.output, settings.report, settings.shard_of)
        self.metrics_file = settings.metrics_file
        for each in self.features:
            each.begin(report)
        self._open_inputs()
        step("reading the files of input and model, to recognise them later")
        with self.clock.phase("read"), stop.at_once():
            report.fingerprint = fingerprint(self, self.models)
            report.take_chat(self.builder.way)
            for each in self.features:
                each.identified(self)
        step("opening the output")
        with self._open_sink() as sink:
            self.sink = sink
            if settings.shard is not None:  # else as the user named it, with its slash
                report.output = sink.location
            self._scored_before = sink.counts.scored - sink.counts.taken_over
            report.resumed = sink.counts.total > 0
            if not sink.complete:
                self._score()
            step("looking at the finished output")
            if settings.audit:
                report.take_audit(sink.counts, self.labels.is_positive)
            failed: list[str] = []
            if settings.shard is None:  # prefill merge judges and evaluates shards
                for each in self.features:
                    each.ended(self)
                report.take(sink.counts)
                failed = [text for each in self.features for text in each.judge(report)]
            # A shard's share of errors tells nothing about the whole: prefill merge judges that.
            most = settings.max_error_rate if settings.shard is None else None
            skip = settings.skip_empty and sink.empty_input
        conclude(report, sink.counts, max_error_rate=most, skip_empty=skip, failed=failed)

    def _open_inputs(self) -> None:
        settings = self.settings
        with self.clock.phase("read"), self.stop.at_once():
            if settings.profile is not None:
                Profile.load(settings.profile)
            self.open_source()
            self.source.begin_hashing()
            self.models = LocalModels(settings)  # before anything is read from them
            self._refuse_known_output()
        with self.clock.phase("load"), self.stop.at_once():
            self.dtypes = self._earlier_dtypes()
            self.open_models()
        self.report.model = self.report.settings.get("model") or f"{self.opened.files.origin} (the sample model)"
        why = self.opened.files.dtype_why or "as the model is saved"
        why = "as --dtype says" if settings.dtype != "auto" else "as the job began" if self.dtypes else why
        self.report.dtype = ComputedIn(name=self.opened.dtypes[0], why=why)

    def _earlier_dtypes(self) -> Sequence[str]:
        """The number formats of the models in an earlier attempt at the job; none without."""
        earlier = None if self.settings.overwrite else plan_of(self.output, self.settings.shard_of)
        return () if earlier is None else tuple(earlier.get(DTYPES, ()))

    def _refuse_known_output(self) -> None:
        """Refuse an output that this job must not touch, as far as is known before torch is imported."""
        settings = self.settings
        if settings.overwrite or settings.shard is not None or any(each.reopens() for each in self.features):
            return
        refuse_known(self.output, partial(is_same, self, self.models), resume=settings.resume)

    def _open_sink(self) -> Sink:
        settings, source, schema = self.settings, self.source, self.schema()
        return (Sink if settings.shard is None else ShardSink).open(
            self.output,
            output_job(self.report.fingerprint, settings),
            schema,
            resume=settings.resume,
            overwrite=settings.overwrite,
            retry_errors=any(each.reopens() for each in self.features),
            partitions=source.partitions if settings.partition else None,
            shard=settings.shard_of,
        )

    def _score(self) -> None:
        settings, sink = self.settings, self.sink
        sink.plan = sink.plan | {DTYPES: self.opened.dtypes}
        self.profile = self._find_profile()
        if self.profile is not None:
            self._forecast = RemainingTime(self.profile.seconds, self._expected_rows, settings.workers)
        ended: list[int] = []
        columns = frozenset() if self.condition is None else self.condition.columns
        coming = self.windows(
            self.builder.close,
            skip=sink.finished,
            ended=ended.append,
            change=sink.digests(columns, self.common),
        )
        self.recorder = Recorder(self, self._expected_rows, self._forecast)
        with self.loaded, coming, self.recorder.running():
            waiting = self._waiting(coming)
            for each in self.features:
                waiting = each.left_to_score(self, waiting)
            step("making prompts of the first rows")
            if (first := next(waiting, None)) is not None:
                self.labels.check(first)
                for each in self.features:
                    each.first_window(self, first)
                step("loading the model")
                self.load_models()
                step("preparing to score")
                self.learn(self.tick)
                self.score(
                    chain([first], waiting),
                    self.recorder,
                    ready=lambda: coming.ready,
                    chosen=lambda: sink.counts.tallies.chosen_rows,
                    written=self._written,
                )
                self.pool.ask_for_reports()
            step("writing the output")
            with self.clock.phase("write"):
                self.require_unchanged(None)
                (count,) = ended  # reported at the end of the input
                if settings.shard is not None:  # for prefill merge, which judges and evaluates the whole
                    sink.plan = sink.plan | {"max_error_rate": settings.max_error_rate}
                    for each in self.features:
                        sink.plan = sink.plan | dict(each.shard_ended(self))
                sink.finish(count)
            for each in self.features:
                each.finished(self)

    def _expected_rows(self) -> Expected | None:
        """Return how many rows the job has; of a shard its share of them."""
        found, shard = self.source.expected_rows(), self.settings.shard_of
        if found is None or shard is None:
            return found
        return Expected(-(-found.rows // shard.count), exact=False)

    @property
    def plan(self) -> Mapping[str, Any]:
        return self.sink.plan

    @plan.setter
    def plan(self, plan: Mapping[str, Any]) -> None:
        self.sink.plan = dict(plan)

    def load_models(self) -> None:
        """Load the models here or in workers."""
        if self.settings.uses_workers:
            with self.clock.phase("load"):
                self.start_workers(self.stop, self.models.digests, self.profile)
            return
        with self.clock.phase("load"), self.stop.at_once():
            self.load(profile=self.profile)
        if self._forecast is not None:
            self._forecast.least_pack = self.pack_seconds

    def _written(self, window: int) -> None:
        for each in self.features:
            each.window_written(self, window)

    def require_unchanged(self, rows: Int64Array | None) -> None:
        """Raise ContentChangedError unless the models and the sources of these rows (None: of all rows) are
        unchanged."""
        self.models.require_unchanged()
        self.source.require_unchanged(rows)

    def _find_profile(self) -> Profile | None:
        """The profile that applies here, or None. A message tells of one that does not, as a warning if it was asked
        for."""
        settings = self.settings
        profile, name, why = find_profile(settings, self.opened, self.report.fingerprint["model"])
        self.report.no_prediction = why
        if why is not None and settings.profile is not None:
            log.warning(f"no prediction: {why}")
        elif why is not None and not settings.quiet and os.path.exists(name):
            log.info(f"no prediction: {why}")
        return profile

    def _waiting(self, coming: Iterator[Window]) -> Iterator[Window]:
        """The windows, with the time spent waiting for them."""
        while True:
            with self.clock.phase("waiting"), self.stop.at_once():
                window = next(coming, None)
            if window is None:
                return
            yield window

    def tick(self, tokens: float) -> None:
        """Called while something is computed: a signal may stop it."""
        self.stop.check()

    def fill_report(self) -> None:
        """Put the numbers of the run into the report, however it ended. The numbers of steps that it did not reach
        stay None."""
        report = self.report
        report.end(self.clock)
        sink: Sink | None = getattr(self, "sink", None)
        if hasattr(self, "pool"):
            report.take_use(self.pool.used())
        scored = 0
        if sink is not None:
            report.take(sink.counts)
            scored = sink.counts.scored - sink.counts.taken_over - self._scored_before
        for each in self.features:
            each.reported(self, None if sink is None else sink.counts)
        if self._forecast is not None:
            report.predicted_seconds = self._forecast.ran
        if hasattr(self, "recorder"):
            report.tokens, report.packs = self.recorder.tokens, self.recorder.packs
            report.first_answers = self.recorder.first_window.found
        if hasattr(self, "builder"):
            threads, builder, seconds = self.opened.threads, self.builder, report.seconds
            if threads is not None and threads.ran:
                report.take_threads(*threads.ran)
            seconds.read += self.source.seconds
            seconds.render, seconds.tokenize = builder.render_seconds, builder.tokenize_seconds
        report.rows_per_second = scored / report.seconds.total
        report.tokens_per_second = report.tokens.prompt / report.seconds.total

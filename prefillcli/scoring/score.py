"""The job of `prefill score`: rows -> prompts -> plan -> engine -> parts -> output -> report."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from typing import Any

from prefillcli.core.inputs import Inputs
from prefillcli.core.run import Run
from prefillcli.core.scorer import DTYPES, USUAL, Granularity
from prefillcli.core.windows import Prefetcher, WindowSize
from prefillcli.errors import shown, shown_report
from prefillcli.forecast.profile import Profile, find_profile
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.groups import PIPE
from prefillcli.report.run import ComputedIn, RunReport, print_table, write_files
from prefillcli.report.verdict import ABOUT_ANSWERS, untold
from prefillcli.rows.output.resumption import plan_of, refuse_known
from prefillcli.rows.output.shards import ShardSink
from prefillcli.rows.output.sink import Sink
from prefillcli.rows.records import Window
from prefillcli.runtime import log
from prefillcli.runtime.clock import Clock, Expected, MemoryWatch, step
from prefillcli.scoring.compose import Parts, sections_of
from prefillcli.scoring.dry_run import dry_run_job
from prefillcli.scoring.identity import LocalModels, fingerprint, is_same, output_job
from prefillcli.scoring.opening import Opening
from prefillcli.scoring.path_table import output_of, report_path, require_apart
from prefillcli.scoring.pipes import piped
from prefillcli.scoring.recorder import Recorder, RemainingTime, left_to_score
from prefillcli.scoring.scorer import load_here, make_scorer, score, start_workers
from prefillcli.scoring.shell import conclude, leave_earlier_report, shell
from prefillcli.stats.arrays import Int64Array


def score_job(settings: ScoreSettings, granularity: Granularity = USUAL) -> dict[str, Any]:
    """Run the job; write `run.json` and its page however it ends; return the summary for the last line on stdout.

    Errors are reported on stderr, and become the exit code in the summary. A dry run writes its own report.
    """
    run_id = settings.log.run_id or log.new_run_id()
    with log.log_of(run_id, json_lines=settings.log.log_format == "json"):
        if settings.prediction.dry_run:
            return dry_run_job(settings, granularity)
        return _run_job(settings, run_id, granularity)


def _run_job(settings: ScoreSettings, run_id: str, granularity: Granularity) -> dict[str, Any]:
    clock = Clock()
    report = RunReport.new(
        sections_of,
        run_id=run_id,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        settings=shown(settings.to_json()),
    )
    log.event("started", "the run begins", settings=report.settings)
    given = settings.with_options({"run_id": run_id})  # workers log it, too
    memory = MemoryWatch(clock)
    job: ScoreJob | None = None
    output = metrics_file = None
    at_end = False

    def finish() -> None:
        report.end(clock)
        if job is not None:
            job.fill_report()
        report.take_memory(memory.samples)
        report.warnings = log.warnings_of_run(without=ABOUT_ANSWERS)
        if output is not None and not at_end:
            leave_earlier_report(report, output, given.files.shard_of, quiet=given.run.quiet)
        write_files(report, metrics_file)

    ended = shell(report, debug=given.run.debug, can_resume=given.can_resume, finish=finish)
    with ended as stop, memory, ExitStack() as pipes:
        report.output, report.shard = PIPE if given.writes_stdout else output_of(given), given.files.shard
        with clock.phase("read"), stop.at_once():
            pipe = pipes.enter_context(piped(given))
            settings, output = pipe.settings, output_of(pipe.settings)
            require_apart(settings)  # before anything is written, even the report of a failed run
        metrics_file = settings.files.metrics_file
        if pipe.output is None or settings.files.report is not None:
            report.report = report_path(output, settings.files.report, settings.files.shard_of)
        job = ScoreJob(Run(settings, report, output, clock, stop), granularity)
        job.run()
        at_end = True
        with stop.at_once():
            pipe.write_out()
    step("")
    if not given.run.quiet and report.status == "complete" and not log.logs_json():
        print_table(shown_report(report))
    else:
        for text in untold(report):
            log.warning(text, event=ABOUT_ANSWERS)
    log.event("ended", f"the run is {report.status}, exit code {report.exit_code}", summary=report.summary())
    return report.summary()


class ScoreJob:
    """The steps of one run of `prefill score`."""

    parts: Parts
    models: LocalModels
    recorder: Recorder

    def __init__(self, run: Run, granularity: Granularity) -> None:
        self._run = run
        self._granularity = granularity
        self._opening = Opening(run.settings, (run.settings.ids.id_column, *run.settings.files.keep_columns))
        self._profile: Profile | None = None
        self._forecast: RemainingTime | None = None
        self._scored_before = 0  # rows that an earlier run has scored
        run.load_models, run.reopen = self._load_models, self._reopened
        run.require_unchanged = self._require_unchanged

    def run(self) -> None:
        """Open the inputs, score what is left to score, and look at the finished output."""
        run, settings, report = self._run, self._run.settings, self._run.report
        self._open_inputs()
        self._identify()
        step("opening the output")
        with self._open_sink() as sink:
            run.sink = sink
            if settings.files.shard is not None:  # else as the user named it, with its slash
                report.output = sink.location
            self._scored_before = sink.counts.scored - sink.counts.taken_over
            report.resumed = sink.counts.total > 0
            if not sink.complete:
                self._score()
            step("looking at the finished output")
            failed = self._judge(sink)
            # A shard's share of errors shows nothing about the whole: prefill merge judges that.
            most = settings.files.max_error_rate if settings.files.shard is None else None
            empty = sink.empty_input
        skip = settings.files.skip_empty
        conclude(report, sink.counts, max_error_rate=most, empty_input=empty, skip_empty=skip, failed=failed)

    def _open_inputs(self) -> None:
        run, settings, opening = self._run, self._run.settings, self._opening
        with run.clock.phase("read"), run.stop.at_once():
            if settings.prediction.profile is not None:
                Profile.load(settings.prediction.profile)
            opening.open_source()
            self.parts = opening.parts
            run.settings = settings = opening.inputs.settings
            self.parts.gates.begin(run.report)
            opening.inputs.source.begin_hashing()
            self.models = LocalModels(settings)  # before anything is read from them
            self._refuse_known_output()
        with run.clock.phase("load"), run.stop.at_once():
            dtypes = self._earlier_dtypes()
            opening.open_models(dtypes)
        run.scorer = make_scorer(opening.inputs, self.parts, self._granularity)
        opened = opening.inputs.opened
        run.report.model = run.report.settings.get("model") or f"{opened.files.origin} (the sample model)"
        why = opened.files.dtype_why or "as the model is saved"
        why = "set by --dtype" if settings.lm.dtype != "auto" else "as the job began" if dtypes else why
        run.report.dtype = ComputedIn(name=opened.dtypes[0], why=why)

    def _identify(self) -> None:
        run, parts = self._run, self.parts
        step("reading the files of input and model, to recognise them later")
        with run.clock.phase("read"), run.stop.at_once():
            run.report.fingerprint = fingerprint(run.inputs, parts, self.models)
            run.report.take_chat(run.inputs.builder.way)
            if parts.earlier is not None:
                parts.earlier.find(run)
            if parts.calibration is not None:
                parts.calibration.require_fitting(run.report.fingerprint)
            if parts.review is not None:
                parts.review.require_fitting(run.report.fingerprint)
            if parts.exits is not None:
                parts.exits.require_same_job(run)

    def _earlier_dtypes(self) -> Sequence[str]:
        # The number formats of the models in an earlier attempt at the job; none without.
        settings = self._run.settings
        earlier = None if settings.files.overwrite else plan_of(self._run.output, settings.files.shard_of)
        return () if earlier is None else tuple(earlier.get(DTYPES, ()))

    def _refuse_known_output(self) -> None:
        # Refuse an output that this job must not touch, as far as is known before torch is imported.
        settings = self._run.settings
        if settings.files.overwrite or settings.files.shard is not None or settings.earlier.retry_errors:
            return
        refuse_known(
            self._run.output, partial(is_same, self._opening.inputs, self.models), resume=settings.files.resume
        )

    def _open_sink(self) -> Sink:
        run, settings, inputs = self._run, self._run.settings, self._run.inputs
        return (Sink if settings.files.shard is None else ShardSink).open(
            run.output,
            output_job(run.report.fingerprint, settings),
            inputs.schema(),
            resume=settings.files.resume,
            overwrite=settings.files.overwrite,
            retry_errors=settings.earlier.retry_errors,
            partitions=inputs.source.partitions if settings.files.partition else None,
            shard=settings.files.shard_of,
        )

    def _score(self) -> None:
        run, parts, sink, scorer = self._run, self.parts, self._run.sink, self._run.scorer
        scorer.plans = sink
        scorer.plan = {**scorer.plan, DTYPES: run.inputs.opened.dtypes}
        run.profile = self._profile = self._find_profile()
        if self._profile is not None:
            self._forecast = RemainingTime(self._profile.seconds, self._expected_rows, run.settings.processes.workers)
        ended: list[int] = []
        coming = self._windows(ended)
        self.recorder = Recorder(run, self._expected_rows, self._forecast)
        with scorer.loaded, coming, self.recorder.running():
            waiting = self._waiting(coming)
            if parts.earlier is not None and (rows := parts.earlier.open(run)) is not None:
                waiting = left_to_score(waiting, rows, sink, self.recorder)
            step("making prompts of the first rows")
            if (first := next(waiting, None)) is not None:
                run.inputs.labels.check(first)
                if parts.compression is not None:
                    parts.compression.begin(run)
                step("loading the model")
                self._load_models()
                step("preparing to score")
                self._learn()
                score(
                    scorer,
                    parts,
                    chain([first], waiting),
                    self.recorder,
                    ready=lambda: coming.ready,
                    chosen=lambda: sink.counts.tallies.chosen_rows,
                    written=self._written,
                )
                scorer.pool.ask_for_reports()
            step("writing the output")
            self._finish(ended)

    def _windows(self, ended: list[int]) -> Prefetcher[Window]:
        # The windows that are left to score, made ahead of the model. At the end of the input `ended` gets their
        # number.
        inputs, sink, granularity = self._run.inputs, self._run.sink, self._granularity
        condition = self.parts.condition(inputs.schema())
        return inputs.windows(
            inputs.builder.close,
            size=WindowSize(granularity.window_rows, batch_rows=granularity.batch_rows),
            skip=sink.finished,
            ended=ended.append,
            change=sink.digests(frozenset() if condition is None else condition.columns, inputs.common),
        )

    def _learn(self) -> None:
        # Learning of the parts from answers of the models, before the first window.
        run, parts = self._run, self.parts
        if parts.calibration is not None:
            parts.calibration.learn(run.scorer, run.tick)
        if parts.exits is not None:
            parts.exits.learn(run)
        run.scorer.earlier = run.scorer.plan

    def _finish(self, ended: Sequence[int]) -> None:
        run, parts, sink = self._run, self.parts, self._run.sink
        with run.clock.phase("write"):
            self._require_unchanged(None)
            (count,) = ended  # reported at the end of the input
            if run.settings.files.shard is not None:  # for prefill merge, which judges and evaluates the whole
                sink.plan = sink.plan | {"max_error_rate": run.settings.files.max_error_rate}
                for each in parts.judges:
                    sink.plan = sink.plan | dict(each.shard_plan())
            sink.finish(count)
        if parts.exits is not None:
            parts.exits.finished(run)
        if parts.estimate is not None:
            parts.estimate.finished(run)

    def _judge(self, sink: Sink) -> Sequence[str]:
        # Judge the finished output. Returns sentences on how it differs from the expected one.
        run, report = self._run, self._run.report
        asked = zip(run.inputs.schema().questions, run.inputs.labels.asked, strict=False)
        report.take_audits(sink.counts, {own.key: labels.is_positive for own, labels in asked})
        if run.settings.files.shard is not None:  # prefill merge judges and evaluates shards
            return ()
        for each in self.parts.judges:
            each.ended(run)
        report.take(sink.counts)
        return self.parts.gates.judge(report)

    def _expected_rows(self) -> Expected | None:
        # The number of rows of the job; of a shard its share of them.
        found, shard = self._run.inputs.source.expected_rows(), self._run.settings.files.shard_of
        if found is None or shard is None:
            return found
        return Expected(-(-found.rows // shard.count), exact=False)

    def _load_models(self) -> None:
        # Load the models here or in workers.
        run = self._run
        if run.settings.processes.uses_workers:
            with run.clock.phase("load"):
                start_workers(run.scorer, run.stop, self.models.digests, self._profile)
            return
        with run.clock.phase("load"), run.stop.at_once():
            load_here(run.scorer, profile=self._profile)
        if self._forecast is not None:
            self._forecast.least_pack = run.scorer.pack_seconds

    def _reopened(self, settings: ScoreSettings) -> Inputs:
        # The rows of other settings once more, with the models of this job.
        again = Opening(settings)
        again.open_source()
        again.use_models(self._run.inputs.opened)
        return again.inputs

    def _written(self, window: int) -> None:
        if self.parts.exits is not None:
            self.parts.exits.window_written(self._run, window)

    def _require_unchanged(self, rows: Int64Array | None) -> None:
        self.models.require_unchanged()
        self._run.inputs.source.require_unchanged(rows)

    def _find_profile(self) -> Profile | None:
        # The profile that applies here, or None. A message names one that does not, as a warning if it was asked for.
        run, settings = self._run, self._run.settings
        profile, name, why = find_profile(settings, run.inputs.opened, run.report.fingerprint["model"])
        run.report.no_prediction = why
        if why is not None and settings.prediction.profile is not None:
            log.warning(f"no prediction: {why}")
        elif why is not None and not settings.run.quiet and os.path.exists(name):
            log.info(f"no prediction: {why}")
        return profile

    def _waiting(self, coming: Iterator[Window]) -> Iterator[Window]:
        # The windows, with the time spent waiting for them.
        while True:
            with self._run.clock.phase("waiting"), self._run.stop.at_once():
                window = next(coming, None)
            if window is None:
                return
            yield window

    def fill_report(self) -> None:
        """Put the numbers of the run into the report, however it ended. The numbers of steps that it did not reach
        stay None."""
        run, report, inputs = self._run, self._run.report, self._opening.inputs
        sink: Sink | None = getattr(run, "sink", None)
        pool = getattr(getattr(run, "scorer", None), "pool", None)
        if pool is not None:
            report.take_use(pool.used())
        scored = 0
        if sink is not None:
            report.take(sink.counts)
            scored = sink.counts.scored - sink.counts.taken_over - self._scored_before
        for each in self.parts.judges if hasattr(self, "parts") else ():
            each.reported(run, None if sink is None else sink.counts)
        if self._forecast is not None:
            report.predicted_seconds = self._forecast.ran
        report.tokens = run.tokens
        if hasattr(self, "recorder"):
            report.packs, report.first_answers = self.recorder.packs, self.recorder.first_window.found
        if hasattr(inputs, "builder"):
            threads, builder, seconds = inputs.opened.threads, inputs.builder, report.seconds
            if threads is not None and threads.ran:
                report.take_threads(*threads.ran)
            seconds.read += inputs.source.seconds
            seconds.render, seconds.tokenize = builder.render_seconds, builder.tokenize_seconds
        report.rows_per_second = scored / report.seconds.total
        report.tokens_per_second = report.tokens.prompt / report.seconds.total

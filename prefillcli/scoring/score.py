"""The job of `prefill score`: rows -> prompts -> plan -> engine -> parts -> output -> report."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from typing import Any

from prefillcli.asking.layouts import LayoutUse
from prefillcli.core.inputs import Inputs, OpenRows
from prefillcli.core.run import Reached, Run
from prefillcli.core.scorer import DTYPES, USUAL, Granularity, ModelScorer, settle_models
from prefillcli.core.windows import Prefetcher, WindowSize
from prefillcli.errors import shown, shown_report
from prefillcli.forecast.profile import Profile, find_profile
from prefillcli.judging.estimate import estimate
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.groups import PIPE
from prefillcli.report.run import ComputedIn, RunReport, print_table, write_files
from prefillcli.report.verdict import ABOUT_ANSWERS, untold
from prefillcli.rows.output.resumption import refuse_known, settled_by
from prefillcli.rows.output.shards import ShardSink
from prefillcli.rows.output.sink import Sink
from prefillcli.rows.records import Window
from prefillcli.runtime import log
from prefillcli.runtime.clock import Clock, Expected, MemoryWatch, step
from prefillcli.runtime.signals import Stop
from prefillcli.scoring.compose import Parts
from prefillcli.scoring.dry_run import dry_run_job
from prefillcli.scoring.identity import LocalModels, fingerprint, is_same, output_job
from prefillcli.scoring.opening import open_inputs, open_rows
from prefillcli.scoring.path_table import output_of, report_path, require_apart
from prefillcli.scoring.pipes import piped
from prefillcli.scoring.recorder import Recorder, RemainingTime, left_to_score
from prefillcli.scoring.scorer import load_here, make_scorer, score, start_workers
from prefillcli.scoring.shell import conclude, leave_earlier_report, shell


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
    report = RunReport(
        run_id=run_id,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        settings=shown(settings.to_json()),
    )
    log.event("started", "the run begins", settings=report.settings)
    given = settings.with_options({"run_id": run_id})  # workers log it, too
    memory, reached = MemoryWatch(clock), ReachedSteps()
    output = metrics_file = None
    at_end = False

    def finish() -> None:
        report.end(clock)
        _fill_report(report, reached)
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
        _opened_job(settings, output, report, clock, stop, reached, granularity)
        at_end = True
        with stop.at_once():
            pipe.write_out()
    step("")
    if not given.run.quiet and report.status == "complete" and not log.logs_json():
        print_table(shown_report(report))
    else:
        for text in untold(report):
            log.warning(text, event=ABOUT_ANSWERS)
    summary = report.summary()
    log.event("ended", f"the run is {report.status}, exit code {report.exit_code}", summary=summary)
    return summary


@dataclass
class ReachedSteps(Reached):
    """What a run has reached, with the steps of its job."""

    parts: Parts | None = None
    scored_before: int = 0
    """Rows that an earlier run has scored."""
    recorder: Recorder | None = None


def _opened_job(
    settings: ScoreSettings,
    output: str,
    report: RunReport,
    clock: Clock,
    stop: Stop,
    reached: ReachedSteps,
    granularity: Granularity,
) -> None:
    # Open the inputs and the output, score what is left to score, and look at the finished output.
    with clock.phase("read"), stop.at_once():
        if settings.prediction.profile is not None:
            Profile.load(settings.prediction.profile)
        rows, parts = open_rows(settings, (settings.ids.id_column, *settings.files.keep_columns))
        reached.parts = parts
        parts.gates.begin(report)
        rows.source.begin_hashing()
        models = LocalModels(rows.settings)  # before anything is read from them
        _refuse_known_output(rows, models, output)
    with clock.phase("load"), stop.at_once():
        dtypes = _earlier_dtypes(rows, output)
        reached.inputs = inputs = open_inputs(rows, parts, dtypes)
    files = inputs.opened.files
    report.model = report.settings.get("model") or f"{files.origin} (the sample model)"
    why = "as the job began" if dtypes else files.dtype_why or "as the model is saved"
    why = "set by --dtype" if settings.lm.dtype != "auto" else why
    report.dtype = ComputedIn(name=inputs.opened.dtypes[0], why=why)
    step("reading the files of input and model, to recognise them later")
    with clock.phase("read"), stop.at_once():
        _identify(inputs, parts, models, report, output)
    step("opening the output")
    with _open_sink(inputs, report.fingerprint, output) as sink:
        reached.sink, reached.scored_before = sink, sink.counts.scored - sink.counts.taken_over
        if settings.files.shard is not None:  # else as the user named it, with its slash
            report.output = sink.location
        report.resumed = sink.counts.total > 0
        ScoreJob(Run(report, clock, stop, inputs, sink), parts, models, reached, granularity).run()


def _refuse_known_output(rows: OpenRows, models: LocalModels, output: str) -> None:
    # Refuse an output that this job must not touch, as far as is known before torch is imported.
    files = rows.settings.files
    if files.overwrite or files.shard is not None or rows.settings.earlier.retry_errors:
        return
    refuse_known(output, partial(is_same, rows, models), resume=files.resume)


def _earlier_dtypes(rows: OpenRows, output: str) -> Sequence[str]:
    # The number formats of the models in an earlier attempt at the job; none without.
    files = rows.settings.files
    earlier = None if files.overwrite else settled_by(output, files.shard_of)
    return () if earlier is None else tuple(earlier.get(DTYPES, ()))


def _identify(inputs: Inputs, parts: Parts, models: LocalModels, report: RunReport, output: str) -> None:
    found = report.fingerprint = fingerprint(inputs, parts, models)
    report.take_chat(inputs.builder.way)
    report.add(LayoutUse.of(inputs.opened, inputs.rows.asking))
    if parts.earlier is not None:
        parts.earlier.find(report, output)
    if parts.calibration is not None:
        parts.calibration.require_fitting(found)
    if parts.review is not None:
        parts.review.require_fitting(found)
    if parts.exits is not None:
        parts.exits.require_same_job(inputs, found)
    if parts.heads is not None:
        parts.heads.require_fitting(inputs, found)


def _open_sink(inputs: Inputs, digests: Mapping[str, str], output: str) -> Sink:
    settings, files = inputs.settings, inputs.settings.files
    return (Sink if files.shard is None else ShardSink).open(
        output,
        output_job(digests, settings),
        inputs.schema,
        resume=files.resume,
        overwrite=files.overwrite,
        retry_errors=settings.earlier.retry_errors,
        partitions=inputs.source.partitions if files.partition else None,
        shard=files.shard_of,
    )


@dataclass(frozen=True)
class ScoreJob:
    """The steps of one run of `prefill score`, whose inputs and output are open. What it reaches is noted for its
    report."""

    _run: Run
    parts: Parts
    models: LocalModels
    reached: ReachedSteps
    granularity: Granularity

    def run(self) -> None:
        """Score what is left to score, and look at the finished output."""
        sink, files = self._run.sink, self._run.settings.files
        if not sink.complete:
            exits = self.parts.exits
            (self if exits is None else replace(self, _run=exits.widened(self._run)))._score()
        elif self.parts.estimate is not None and self.parts.estimate.is_missing(self._run):
            with ExitStack() as opened:  # an earlier attempt ended after its last row
                self._estimate(opened, None)
        step("looking at the finished output")
        failed = self._judge()
        # A shard's share of errors shows nothing about the whole: prefill merge judges that.
        most = files.max_error_rate if files.shard is None else None
        empty, skip = sink.empty_input, files.skip_empty
        conclude(self._run.report, sink.counts, max_error_rate=most, empty_input=empty, skip_empty=skip, failed=failed)

    def _score(self) -> None:
        run, parts, sink = self._run, self.parts, self._run.sink
        sink.settle({**sink.settled, DTYPES: run.inputs.opened.dtypes})
        profile, forecast = self._find_profile(), None
        if profile is not None:
            forecast = RemainingTime(profile.seconds, self._expected_rows, run.settings.processes.workers)
        ended: list[int] = []
        coming = self._windows(ended)
        self.reached.recorder = recorder = Recorder(
            run, parts, self.models, self._expected_rows, granularity=self.granularity, forecast=forecast
        )
        with ExitStack() as opened, coming, recorder.running():
            waiting = self._waiting(coming)
            if parts.earlier is not None and (rows := parts.earlier.open(run)) is not None:
                opened.callback(rows.close)
                waiting = left_to_score(waiting, rows, sink, recorder)
            scorer = None
            step("making prompts of the first rows")
            if (first := next(waiting, None)) is not None:
                run.inputs.labels.check(first)
                if parts.compression is not None:
                    parts.compression.begin(run)
                step("loading the model")
                scorer = self._load_models(opened, profile)
                if forecast is not None:
                    forecast.least_pack = scorer.models.pack_seconds
                step("preparing to score")
                self._learn(scorer)
                score(
                    scorer,
                    parts,
                    chain([first], waiting),
                    recorder,
                    block_tokens=self.granularity.block_tokens,
                    ready=lambda: coming.ready,
                    chosen=lambda: sink.counts.tallies.chosen_rows,
                    written=self._written,
                )
                scorer.pool.ask_for_reports()
            step("writing the output")
            self._finish(ended)
            if run.settings.estimate.estimate is not None:
                self._estimate(opened, scorer)

    def _windows(self, ended: list[int]) -> Prefetcher[Window]:
        # The windows that are left to score, made ahead of the model. At the end of the input `ended` gets their
        # number.
        inputs, sink, granularity = self._run.inputs, self._run.sink, self.granularity
        condition = self.parts.condition(inputs.schema)
        return inputs.windows(
            inputs.builder.close,
            size=WindowSize(granularity.window_rows, batch_rows=granularity.batch_rows),
            skip=sink.finished,
            ended=ended.append,
            change=sink.digests(frozenset() if condition is None else condition.columns, inputs.common),
        )

    def _learn(self, scorer: ModelScorer) -> None:
        # Learning of the parts from answers of the models, before the first window.
        if self.parts.calibration is not None:
            self.parts.calibration.learn(scorer, self._run.tick)
        if self.parts.exits is not None:
            self.parts.exits.learn(self._run, scorer)
        if self.parts.heads is not None:
            self.parts.heads.learn(self._run, scorer)

    def _finish(self, ended: Sequence[int]) -> None:
        run, parts, sink = self._run, self.parts, self._run.sink
        with run.clock.phase("write"):
            self.models.require_unchanged()
            run.inputs.source.require_unchanged()
            (count,) = ended  # reported at the end of the input
            if run.settings.files.shard is not None:  # for prefill merge, which judges and evaluates the whole
                settled = sink.settled | {"max_error_rate": run.settings.files.max_error_rate}
                if parts.evaluation is not None:
                    settled |= parts.evaluation.shard_plan()
                if parts.heads is not None:
                    settled |= parts.heads.shard_use()
                sink.settle(settled)
            sink.finish(count)
        if parts.exits is not None:
            parts.exits.finished(run)
        if parts.heads is not None:
            parts.heads.finished(run)

    def _estimate(self, opened: ExitStack, scorer: ModelScorer | None) -> None:
        # Make the estimate of an output that is complete. First models guess at the rows that were not read.
        if scorer is None and self._run.settings.exits.first:
            scorer = self._load_models(opened)
        with self._run.clock.phase("evaluate"):
            estimate(self._run, self.parts.exits, scorer)

    def _judge(self) -> Sequence[str]:
        # Judge the finished output. Returns sentences on how it differs from the expected one.
        run, report = self._run, self._run.report
        asked = zip(run.inputs.schema.questions, run.inputs.labels.asked, strict=False)
        report.take_audits(run.sink.counts, {own.key: labels.is_positive for own, labels in asked})
        if run.settings.files.shard is not None:  # prefill merge judges and evaluates shards
            return ()
        for each in self.parts.judges:
            each.ended(run)
        report.take(run.sink.counts)
        return self.parts.gates.judge(report)

    def _expected_rows(self) -> Expected | None:
        # The number of rows of the job; of a shard its share of them.
        found, shard = self._run.inputs.source.expected_rows(), self._run.settings.files.shard_of
        if found is None or shard is None:
            return found
        return Expected(-(-found.rows // shard.count), exact=False)

    def _load_models(self, opened: ExitStack, profile: Profile | None = None) -> ModelScorer:
        # Load the models here or in workers; `opened` closes them.
        run, inputs, sink = self._run, self._run.inputs, self._run.sink
        if inputs.settings.processes.uses_workers:
            with run.clock.phase("load"):
                models = start_workers(inputs, sink, run.stop, self.models.digests, profile)
        else:
            with run.clock.phase("load"), run.stop.at_once():
                models = load_here(inputs.opened, inputs.settings, inputs.labels, sink, profile=profile)
        opened.callback(models.close)
        self.reached.models = models
        settle_models(models, sink)
        return make_scorer(inputs, self.parts, models, sink)

    def _written(self, window: int) -> None:
        if self.parts.exits is not None:
            self.parts.exits.window_written(self._run, window)

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


def _fill_report(report: RunReport, reached: ReachedSteps) -> None:
    # Put the numbers of a run into its report, however it ended. The numbers of steps that it did not reach stay None.
    sink, recorder, inputs = reached.sink, reached.recorder, reached.inputs
    if reached.models is not None:
        report.take_use(reached.models.pool.used())
    scored = 0
    if sink is not None:
        report.take(sink.counts)
        scored = sink.counts.scored - sink.counts.taken_over - reached.scored_before
    for each in () if reached.parts is None else reached.parts.judges:
        each.reported(report, reached)
    if recorder is not None:
        report.predicted_seconds = recorder.predicted_seconds
        report.packs, report.first_answers = recorder.packs, recorder.first_window.found
    if inputs is not None:
        threads, builder, seconds = inputs.opened.threads, inputs.builder, report.seconds
        if threads is not None and threads.ran:
            report.take_threads(*threads.ran)
        seconds.read += inputs.source.seconds
        seconds.render, seconds.tokenize = builder.render_seconds, builder.tokenize_seconds
    report.rows_per_second = scored / report.seconds.total
    report.tokens_per_second = report.tokens.prompt / report.seconds.total

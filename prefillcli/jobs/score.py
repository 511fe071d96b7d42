"""The job of `prefill score`: source -> prompts -> plan -> engine -> sink -> report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from typing import TYPE_CHECKING, Any

from prefillcli.data.dealing import ShardRows
from prefillcli.data.output.columns import ROW_COLUMN, ColumnGroups
from prefillcli.data.output.heartbeat import Heartbeat
from prefillcli.data.output.row_digests import RowDigests
from prefillcli.data.output.scored_truth import id_texts
from prefillcli.data.output.shard_folders import ShardSink
from prefillcli.data.output.sink import Sink
from prefillcli.data.output.target import Target
from prefillcli.data.rows import Window
from prefillcli.data.windows import Prefetcher, windows
from prefillcli.engines.base import WeightsReport
from prefillcli.engines.registry import ENGINES, loader_of
from prefillcli.errors import (
    OutputBusyError,
    OutputConflictError,
    OutputExistsError,
)
from prefillcli.forecast.profile import find_profile
from prefillcli.forecast.remaining_time import RemainingTime
from prefillcli.jobs.calibration_file import calibration_of, check_calibration, content_free_prompts, require_fitting
from prefillcli.jobs.dry_run import dry_run_job
from prefillcli.jobs.earlier_rows import FoundOutput, find_earlier, left_to_score, opened_rows
from prefillcli.jobs.evaluation import (
    EVALUATION,
    EvaluationPlan,
    audited_rows,
    evaluate_output,
    require_labels,
    with_texts,
)
from prefillcli.jobs.exit_learning import forget_exits, read_exit_profile, require_same_exits
from prefillcli.jobs.gates import GateKeeper
from prefillcli.jobs.identity import fingerprint, selection
from prefillcli.jobs.inputs import (
    USUAL,
    Granularity,
    JobInputs,
    LocalModels,
    carried_columns,
    open_source,
    prompt_builder,
    refuse_idle_draft,
    refuse_unlike_partitions,
    require_label_uses,
)
from prefillcli.jobs.job_exits import exit_use, stored_exit_use
from prefillcli.jobs.path_table import output_of, report_path, require_apart
from prefillcli.jobs.recorder import LabelMassCheck, Recorder
from prefillcli.jobs.rejected_rows import check_rejects, write_rejects
from prefillcli.jobs.row_choice import RowChoice, check_rationales, column_groups
from prefillcli.jobs.shell import conclude, shell
from prefillcli.jobs.window_loop import WindowLoop, keep_rate
from prefillcli.models.open import Opened, answer_labels
from prefillcli.options.score import ScoreSettings
from prefillcli.redaction import shown, shown_report
from prefillcli.report.files import write_files
from prefillcli.report.rationale import RationaleUse, SectionChange, WrittenRow
from prefillcli.report.run import (
    AdapterUse,
    MemoryTrace,
    PeakMemory,
    RunReport,
    ThreadCounts,
    Tokens,
    versions,
)
from prefillcli.report.run_page import print_table
from prefillcli.runtime import log
from prefillcli.runtime.clock import Clock, MemoryWatch
from prefillcli.runtime.memory import peak_memory
from prefillcli.runtime.progress import Progress
from prefillcli.runtime.signals import Stop

if TYPE_CHECKING:
    from prefillcli.forecast.profile import Profile

# The windows of a job's input, made in the background ahead of the model.


def coming_windows(
    settings: ScoreSettings, inputs: JobInputs, sink: Sink, granularity: Granularity, ended: Callable[[int], None]
) -> Prefetcher[Window]:
    """Those that are not finished, with the digests of their rows. At the end `ended` is called with their number."""
    shard, source, choice = settings.shard_of, inputs.source, inputs.choice
    chosen_by = () if choice is None else [name for name in choice.columns if name in source.carried_schema.names]
    return Prefetcher(
        windows(
            source,
            inputs.builder,
            inputs.labels,
            id_column=settings.id_column,
            max_rows=granularity.window_rows,
            batch_rows=granularity.batch_rows,
            skip=sink.finished,
            only=None if shard is None else ShardRows(shard, inputs.builder),
            ended=ended,
            digest=RowDigests(
                inputs.labels,
                id_column=settings.id_column,
                json_carried=source.kind == "jsonl",
                columns=chosen_by,
                common=inputs.content_free,
            ),
        ),
        cancel=inputs.builder.close,
    )


# A few rationales for the report, with the evidence beside them, read from the finished output.


MOST_ROWS = 10
_TEXT = ("rationale", "finish_reason", "rationale_source")


def written_rows(output: str, groups: ColumnGroups, id_name: str | None) -> list[WrittenRow]:
    """The first rows of an output with these columns that are written about or weighed, at most `MOST_ROWS`."""
    target = Target.parse(output)
    names = [*(_TEXT if groups.rationales else ()), *(("evidence",) if groups.evidence else ())]
    found: list[WrittenRow] = []
    for table in target.tables([id_name or ROW_COLUMN, "score", "prediction", *names]):
        rows = table.to_pylist()
        chosen = [at for at, row in enumerate(rows) if any(row[name] is not None for name in names)]
        chosen = chosen[: MOST_ROWS - len(found)]
        ids: Sequence[str | None] = [None] * len(chosen)
        if id_name is not None:
            ids = id_texts(table[id_name].take(chosen), json_text=target.file_format.json_text)
        found += [_written(rows[at], own) for at, own in zip(chosen, ids, strict=True)]
        if len(found) == MOST_ROWS:
            break
    return found


def _written(row: dict[str, object], own: str | None) -> WrittenRow:
    evidence = row.get("evidence")
    return WrittenRow.model_validate(
        {
            "row": row.get(ROW_COLUMN) if own is None else None,
            "id": own,
            "score": row["score"],
            "prediction": row["prediction"],
            "rationale": row.get("rationale"),
            "finish_reason": row.get("finish_reason"),
            "source": row.get("rationale_source"),
            "evidence": None if evidence is None else [SectionChange.model_validate(each) for each in evidence],  # type: ignore[attr-defined]
        }
    )


# What a run of `prefill score` reports of itself when it has ended, however it did.


def fill_report(
    report: RunReport,
    settings: ScoreSettings,
    clock: Clock,
    *,
    inputs: JobInputs | None,
    sink: Sink | None,
    recorder: Recorder | None,
    forecast: RemainingTime | None,
    scored_before: int,
    shown_rows: list[WrittenRow],
) -> None:
    """Put the numbers of the run into the report. What the run did not come to is None."""
    seconds, total = report.seconds, clock.total
    scored = 0
    if sink is not None:
        report.exits = stored_exit_use(sink.plan)
    if recorder is not None and recorder.exits.asked:
        report.exits = exit_use(recorder.exits, recorder.spared, recorder.tokens)
    if settings.chooses_rows:
        decoded = None if recorder is None else recorder.decoded()
        report.rationales = RationaleUse.of(decoded, settings.speculation if settings.rationale else None)
        report.rationales.shown = shown_rows
        report.rationales.take_plan({} if sink is None else sink.plan)
    if sink is not None:
        report.take(sink.counts)
        scored = sink.counts.scored - sink.counts.taken_over - scored_before
    for name, value in clock.seconds.items():
        setattr(seconds, name, value)
    if forecast is not None:
        report.predicted_seconds = forecast.ran
    tokens = Tokens()
    if recorder is not None:
        tokens, report.packs = recorder.tokens, recorder.packs
        if recorder.calibration is not None:
            report.calibration = recorder.calibration.use()
        report.tokens = tokens
        if (engine := recorder.engine) is not None:
            report.weights, report.reduced = engine.weights_report(), engine.reduced()
    if inputs is not None:
        source, builder, opened = inputs.source, inputs.builder, inputs.opened
        if opened.threads is not None and opened.threads.ran:
            report.threads = ThreadCounts(min=opened.threads.ran[0], max=opened.threads.ran[1])
        if settings.compresses and sink is not None:
            report.keep, report.keep_auto = (
                keep_rate(settings, sink.plan),
                sink.plan.get("keep_auto"),
            )
        seconds.read += source.seconds
        seconds.render, seconds.tokenize = builder.render_seconds, builder.tokenize_seconds
    seconds.total = total
    report.rows_per_second = scored / total
    report.tokens_per_second = tokens.prompt / total
    report.peak_memory_bytes = PeakMemory(**peak_memory())
    report.versions = versions()


def score_job(settings: ScoreSettings, granularity: Granularity = USUAL) -> dict[str, Any]:
    """Run the job; write `run.json` and its page whatever happens; return the summary for the last line on stdout.

    Errors are told on stderr, and become the exit code in the summary. A dry run writes a report of its own.
    """
    run_id = settings.run_id or log.new_run_id()
    with log.log_of(run_id, json_lines=settings.log_format == "json"):
        if settings.dry_run:
            return dry_run_job(settings, granularity)
        return _run_job(settings, run_id, granularity)


def _run_job(settings: ScoreSettings, run_id: str, granularity: Granularity) -> dict[str, Any]:
    clock = Clock()
    report = RunReport(
        run_id=run_id,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        settings=shown(settings.model_dump(mode="json")),
    )
    log.event("started", "the run begins", settings=report.settings)
    settings = settings.model_copy(update={"run_id": run_id})  # workers say it, too
    job, memory = _ScoreJob(settings, clock, report, granularity), MemoryWatch(clock)

    def finish() -> None:
        job.finish_report()
        report.memory_trace = MemoryTrace.of(memory.samples)
        write_files(report, job.metrics_file)

    with shell(report, debug=settings.debug, resumable=True, finish=finish) as stop, memory:
        job.run(stop)
    if not settings.quiet and report.status == "complete" and not log.logs_json():
        print_table(shown_report(report))
    log.event("ended", f"the run is {report.status}, exit code {report.exit_code}", summary=report.summary())
    return report.summary()


class _ScoreJob:
    """One run of `prefill score`. It writes into the report, and reads nothing back from it."""

    def __init__(self, settings: ScoreSettings, clock: Clock, report: RunReport, granularity: Granularity) -> None:
        self.settings = settings
        self.clock = clock
        self.report = report
        self._granularity = granularity
        self._inputs: JobInputs | None = None
        self._shards = settings.shard_of.count if settings.shard_of is not None else 1
        self._sink: Sink | None = None
        self._scored_before = 0  # rows that an earlier run has scored
        self._earlier: FoundOutput | None = None
        self._evaluation: EvaluationPlan | None = None
        self._shown: list[WrittenRow] = []
        self._forecast: RemainingTime | None = None
        self._recorder: Recorder | None = None
        self.metrics_file: str | None = None
        """Where metrics go, as soon as nothing else can be there."""

    def run(self, stop: Stop) -> None:
        settings, report = self.settings, self.report
        output = output_of(settings)
        report.output, report.shard = output, settings.shard
        with self.clock.phase("read"), stop.at_once():
            require_apart(settings)  # before anything is written, the report of a failed run among it
        report.report = report_path(output, settings.report, settings.shard_of)
        self.metrics_file = settings.metrics_file
        gates = GateKeeper(settings, report, report.report)
        inputs = self._inputs = self._open_inputs(output, stop)
        self._evaluation = EvaluationPlan.of(settings, inputs.labels)
        report.adapters = [AdapterUse(name=each.name, path=str(each.path)) for each in inputs.opened.adapters]
        with self.clock.phase("read"), stop.at_once():
            digests = report.fingerprint = fingerprint(
                settings,
                inputs.opened,
                inputs.models,
                inputs.source,
                inputs.builder,
                inputs.labels,
                inputs.calibration,
                inputs.exit_profile,
            )
            if settings.calibration is not None and inputs.calibration is not None:
                require_fitting(inputs.calibration, settings.calibration, digests)
            if inputs.exit_profile is not None:
                require_same_exits(inputs.exit_profile, settings, inputs.opened, inputs.labels.names, digests)
            self._earlier, report.since = find_earlier(settings, output, digests)
        with self._open_sink(output, inputs, digests) as sink:
            self._sink = sink
            if settings.shard is not None:  # else as the user named it, with its slash
                report.output = sink.location
            self._scored_before = sink.counts.scored - sink.counts.taken_over
            report.resumed = sink.counts.total > 0
            if not sink.complete:
                profile = self._profile(inputs.opened, digests["model"])
                if profile is not None:
                    rows = inputs.source.selection().count(inputs.source.count()) // self._shards
                    self._forecast = RemainingTime(profile.seconds, rows, settings.workers)
                self._score(inputs, sink, profile, stop)
            if settings.audit:
                report.audit = audited_rows(sink.counts, inputs.labels)
            if self._evaluation is not None and settings.shard is None:  # prefill merge evaluates shards
                with self.clock.phase("evaluate"), stop.at_once():
                    self._evaluate(self._evaluation, sink.location, inputs)
            if settings.rejects is not None:
                with self.clock.phase("write"), stop.at_once():
                    write_rejects(settings.rejects, inputs.source, sink)
                report.rejects = settings.rejects
            if settings.chooses_rows and settings.show_text and settings.shard is None:
                self._shown = written_rows(sink.location, column_groups(settings), settings.id_column)
            # A shard's share of errors says nothing of the whole: prefill merge judges that.
            most = settings.max_error_rate if settings.shard is None else 1.0
            skip = settings.skip_empty and sink.empty_input
        report.gates = gates.judge(sink.counts, digests)
        conclude(report, sink.counts, max_error_rate=most, skip_empty=skip, gates=report.gates)

    def _open_inputs(self, output: str, stop: Stop) -> JobInputs:
        settings, clock = self.settings, self.clock
        with clock.phase("read"), stop.at_once():
            check_calibration(settings)
            check_rationales(settings)
            exit_profile = read_exit_profile(settings)
            source, template = open_source(settings, carried_columns(settings))
            if settings.rejects is not None:
                check_rejects(settings.rejects, source)
            refuse_unlike_partitions(settings, source, output)
            refuse_idle_draft(settings, source)
            source.begin_hashing()
            models = LocalModels(settings)  # before anything of them is read
        with clock.phase("load"), stop.at_once():
            opened = loader_of(settings.engine).open_models(settings)
            labels = answer_labels(opened, settings)
            require_label_uses(settings, labels)
            calibration = calibration_of(settings, labels.labels)
            builder = prompt_builder(settings, opened, source, carried_columns(settings, source), template)
            choice = RowChoice.of(settings, labels, source.carried_schema, source.kind)
            content_free = content_free_prompts(settings, source, builder, labels)
        return JobInputs(source, builder, labels, opened, models, calibration, content_free, exit_profile, choice)

    def _profile(self, opened: Opened, model_hash: str) -> Profile | None:
        """None without a profile that applies; it is told of one that does not, with a warning if it was asked for."""
        settings = self.settings
        if "forecast" not in ENGINES[settings.engine].can:
            return None
        profile, name, why = find_profile(settings.profile, model_hash, opened.files.dtype, opened.device)
        self.report.no_prediction = why
        if why is not None and settings.profile is not None:
            log.warning(f"no prediction: {why}")
        elif why is not None and not settings.quiet and os.path.exists(name):
            log.info(f"no prediction: {why}")
        return profile

    def _open_sink(self, output: str, inputs: JobInputs, digests: dict[str, str]) -> Sink:
        """The output. Where it must not be touched, neither must the report that lies beside it."""
        settings, source = self.settings, inputs.source
        try:
            return (Sink if settings.shard is None else ShardSink).open(
                output,
                fingerprint=digests,
                selection=selection(settings),
                resume=settings.resume,
                overwrite=settings.overwrite,
                label_names=inputs.labels.names,
                carried=source.carried_schema,
                id_name=settings.id_column,
                jsonl_input=source.kind == "jsonl",
                truth=settings.truth,
                groups=column_groups(settings),
                measure=inputs.labels.measure,
                partitions=source.partitions if settings.partition else None,
                shard=settings.shard_of,
                retry_errors=settings.retry_errors,
            )
        except (OutputExistsError, OutputConflictError, OutputBusyError):
            self.report.report = None
            raise

    def _score(self, inputs: JobInputs, sink: Sink, profile: Profile | None, stop: Stop) -> None:
        settings, clock, forecast, source = self.settings, self.clock, self._forecast, inputs.source
        ended: list[int] = []
        coming = coming_windows(settings, inputs, sink, self._granularity, ended.append)
        progress = Progress(
            source.selected_rows if settings.shard is None else None,
            interval=settings.progress_interval,
            quiet=settings.quiet,
            seconds_left=(lambda: None) if forecast is None else forecast.seconds_left,
        )
        with ExitStack() as loaded, coming, progress, Heartbeat(sink.work, progress.pace):
            progress.resume(sink.counts.total)
            if forecast is not None:
                forecast.skip(sink.counts.total)
            recorder = self._recorder = Recorder(
                sink,
                clock,
                progress,
                stop,
                temperature=settings.temperature,
                label_mass=LabelMassCheck(inputs.labels),
                calibration=inputs.calibration,
                unchanged=inputs.require_unchanged,
                forecast=forecast,
                flush_seconds=self._granularity.flush_seconds,
            )
            with clock.phase("read"), stop.at_once():
                earlier = loaded.enter_context(opened_rows(self._earlier, sink))
            waiting = left_to_score(self._waiting(coming, stop), earlier, sink, recorder)
            if (first := next(waiting, None)) is not None:
                inputs.labels.check(first)
                if self._evaluation is not None and first.index == 0:
                    require_labels(first, self._evaluation, json_text=source.kind == "jsonl")
                loop = self._window_loop(inputs, sink, recorder, profile, stop, loaded)
                if settings.uses_workers:
                    workers = self.report.workers = loop.run_with_workers(
                        chain([first], waiting), lambda: coming.ready
                    )
                    self.report.weights = WeightsReport.of_workers([each.weights for each in workers if each.weights])
                else:
                    loop.run_here(chain([first], waiting))
            with clock.phase("write"):
                inputs.require_unchanged(None)
                (count,) = ended  # told at the end of the input
                if settings.shard is not None:  # prefill merge judges and evaluates the whole
                    sink.plan = sink.plan | {"max_error_rate": settings.max_error_rate}
                    if self._evaluation is not None:
                        sink.plan = sink.plan | {EVALUATION: self._evaluation.to_json()}
                sink.finish(count)
                forget_exits(sink)

    def _window_loop(
        self,
        inputs: JobInputs,
        sink: Sink,
        recorder: Recorder,
        profile: Profile | None,
        stop: Stop,
        loaded: ExitStack,
    ) -> WindowLoop:
        return WindowLoop(
            settings=self.settings,
            granularity=self._granularity,
            inputs=inputs,
            sink=sink,
            recorder=recorder,
            profile=profile,
            clock=self.clock,
            stop=stop,
            loaded=loaded,
            digests=self.report.fingerprint,
            report=self.report.report,
        )

    def _waiting(self, coming: Iterator[Window], stop: Stop) -> Iterator[Window]:
        """The windows, with the time spent waiting for them."""
        while True:
            with self.clock.phase("waiting"), stop.at_once():
                window = next(coming, None)
            if window is None:
                return
            yield window

    def _evaluate(self, plan: EvaluationPlan, output: str, inputs: JobInputs) -> None:
        settings, report = self.settings, self.report
        report.evaluation = evaluate_output(output, plan, settings.id_column)
        if settings.show_text:
            carried = carried_columns(settings, inputs.source)
            builder = prompt_builder(settings, inputs.opened, inputs.source, carried)  # the first one is closed
            report.evaluation = with_texts(report.evaluation, replace(inputs, builder=builder), settings.id_column)
            builder.close()

    def finish_report(self) -> None:
        """Put the numbers of the run into the report."""
        fill_report(
            self.report,
            self.settings,
            self.clock,
            inputs=self._inputs,
            sink=self._sink,
            recorder=self._recorder,
            forecast=self._forecast,
            scored_before=self._scored_before,
            shown_rows=self._shown,
        )

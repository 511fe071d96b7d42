"""The windows of a job, one after the other in this process, or several at a time with workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from prefillcli.compress.answers import AuditDraw
from prefillcli.data.output.sink import Sink
from prefillcli.data.rows import Window
from prefillcli.decode.continuations import sum_of
from prefillcli.engines.base import Engine, PlanEngine, WeightsReport
from prefillcli.engines.memory_plan import REDUCED
from prefillcli.engines.registry import loader_of
from prefillcli.jobs.load import load_models
from prefillcli.jobs.wanted_rows import job_rationales, text_room
from prefillcli.jobs.window_scoring import Finished, ScoringOptions, score_window
from prefillcli.options.commands import ScoreSettings
from prefillcli.report.run import WorkerCounts

if TYPE_CHECKING:  # these take torch along
    from prefillcli.compress.compressor import Compressor
    from prefillcli.compress.window_compressor import WindowCompressor
    from prefillcli.jobs.score import Job


def score_windows(job: Job, windows: Iterator[Window], ready: Callable[[], bool]) -> None:
    """Load the models of a job, and score its windows: one after the other in this process, or several at a time with
    workers. `ready` tells whether the next window can be had at once."""
    (_with_workers if job.settings.uses_workers else _here)(job, windows, ready)


def _here(job: Job, windows: Iterator[Window], ready: Callable[[], bool]) -> None:
    settings, sink, recorder = job.settings, job.sink, job.recorder
    with job.clock.phase("load"), job.stop.at_once():
        models = load_models(
            job.opened,
            settings,
            loader_of(settings.engine),
            keep=keep_rate(settings, sink.plan),
            before=sink.plan,
            options=settings.engine_options,
            measured=job.profile,
            placement=settings,
            **text_room(settings, job.opened, job.labels.names),
        )
    recorder.loaded(models.engine, models.pack_seconds)
    job.loaded.callback(models.close)
    _begin(job, models.engine, models.compressor, models.plan)
    compressor, options = _window_compressor(job, models.engine, models.compressor), _options(job)
    for window in windows:
        done, carried = sink.done(window.index), sink.carried_into(window.index)
        scored = score_window(window, done, carried, models.engine, compressor, options, recorder)
        recorder.record(window, done, _noting(sink, models.engine, scored))
        for each in job.features:
            each.window_written(job, window.index)


def _noting(sink: Sink, engine: Engine, scored: Iterator[Finished]) -> Iterator[Finished]:
    """What is scored; the plan of the job keeps what the engine has had to do with since memory ran out, so that
    no other attempt runs out of it the same way."""
    try:
        for finished in scored:
            _note(sink, engine)
            yield finished
    finally:
        _note(sink, engine)


def _note(sink: Sink, engine: Engine) -> None:
    found = engine.reduced()
    if found is not None and sink.plan.get(REDUCED) != asdict(found):
        sink.plan = sink.plan | {REDUCED: asdict(found)}


def _with_workers(job: Job, windows: Iterator[Window], ready: Callable[[], bool]) -> None:
    from prefillcli.jobs.runners.parallel import ParallelScoring, pool_compressor, start_pool

    settings, sink, opened = job.settings, job.sink, job.opened
    keep = keep_rate(settings, sink.plan)
    with job.clock.phase("load"):
        pool = start_pool(
            settings,
            opened,
            job.stop,
            keep=keep,
            before=sink.plan,
            profile=job.profile,
            digests=job.models.digests,
        )
    job.loaded.callback(pool.close)
    small = pool_compressor(settings, opened, pool, keep)
    _begin(job, pool, small, pool.plan)
    compressor = _window_compressor(job, pool, small)
    ParallelScoring(pool, job, compressor, _options(job)).score(windows, ready)
    reports = pool.reports()
    job.recorder.written_by_workers = sum_of([each.decoded for each in reports if each.decoded is not None])
    job.report.workers = [WorkerCounts(**asdict(report)) for report in reports]
    job.report.weights = WeightsReport.of_workers([each.weights for each in job.report.workers if each.weights])


def _begin(job: Job, engine: PlanEngine, compressor: Compressor | None, plan: Mapping[str, Any]) -> None:
    """Store the plan of the job, with what features learn before the first window: all attempts at it share that."""
    sink, before, job.compressor = job.sink, job.sink.plan, compressor
    kept = {name for each in job.features for name in each.plan_keys}
    sink.plan = {**plan, **{name: value for name, value in before.items() if name in kept}}
    for each in job.features:
        learnt = each.learn(job, engine, before, job.tick)  # which may change the plan itself
        sink.plan = sink.plan | dict(learnt)
    job.recorder.probabilities = job.probabilities


def _options(job: Job) -> ScoringOptions:
    settings, source, threads = job.settings, job.source, job.opened.threads
    rationales = job_rationales(job, job.choice, lambda: job.sink.counts.tallies.chosen_rows)
    if rationales is not None and rationales.evidence is not None:
        job.loaded.callback(rationales.evidence.close)
    return ScoringOptions(
        labels=job.labels,
        schedule=settings.schedule,
        block_tokens=0 if settings.compresses else job.granularity.block_tokens,
        audit=AuditDraw(settings.audit, source.selection(), source.count()) if settings.audit else None,
        features=job.features,
        rationales=rationales,
        adjust_threads=(lambda: None) if threads is None else threads.adjust,
    )


def _window_compressor(job: Job, engine: PlanEngine, compressor: Compressor | None) -> WindowCompressor | None:
    """What compresses the windows of this job, if anything does."""
    if compressor is None:
        return None
    from prefillcli.compress.window_compressor import AutoKeep, WindowCompressor  # takes torch along

    settings, sink, auto = job.settings, job.sink, None
    if settings.keep == "auto" and "keep" not in sink.plan:
        auto = AutoKeep(settings.max_flips, settings.audit)
    methods = sink.counts.tallies.methods
    return WindowCompressor(compressor, engine, job.labels, auto=auto, methods=methods)


def keep_rate(settings: ScoreSettings, plan: Mapping[str, Any]) -> float:
    """A job's keep rate: given or, by its plan, chosen; 1 until it is."""
    rate: float = plan.get("keep", 1.0 if settings.keep == "auto" else settings.keep)
    return rate

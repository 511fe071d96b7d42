"""The windows of a job, one after the other in this process, or several at a time with workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from prefillcli.compress.answers import AuditDraw
from prefillcli.data.output.sink import Sink
from prefillcli.data.rows import Window
from prefillcli.decode.continuations import sum_of
from prefillcli.engines.base import Engine, PlanEngine
from prefillcli.engines.memory_plan import REDUCED
from prefillcli.engines.registry import loader_of
from prefillcli.jobs.calibration_file import contextual_calibration
from prefillcli.jobs.exit_learning import ExitLearning
from prefillcli.jobs.inputs import Granularity, JobInputs
from prefillcli.jobs.job_exits import EXITS, JobExits
from prefillcli.jobs.load import load_models
from prefillcli.jobs.recorder import Recorder
from prefillcli.jobs.wanted_rows import JobRationales, job_rationales, text_room
from prefillcli.jobs.window_scoring import Finished, ScoringOptions, score_window
from prefillcli.options.score import ScoreSettings
from prefillcli.report.run import WorkerCounts
from prefillcli.runtime.clock import Clock
from prefillcli.runtime.signals import Stop
from prefillcli.stats.calibration import Calibration

if TYPE_CHECKING:  # these take torch along
    from prefillcli.compress.compressor import Compressor
    from prefillcli.compress.window_compressor import WindowCompressor
    from prefillcli.forecast.profile import Profile

_CONTENT_FREE = "content_free"  # in the plan of a job


@dataclass(frozen=True, slots=True)
class WindowLoop:
    """What scores and records the windows of a job. What it opens is closed with `loaded`.

    `digests` are the job's fingerprint, and `report` is where its `run.json` goes, if anywhere.
    """

    settings: ScoreSettings
    granularity: Granularity
    inputs: JobInputs
    sink: Sink
    recorder: Recorder
    profile: Profile | None
    clock: Clock
    stop: Stop
    loaded: ExitStack
    digests: dict[str, str]
    report: str | None

    def run_here(self, windows: Iterator[Window]) -> None:
        """Load the models, and score with them in this process."""
        settings, sink = self.settings, self.sink
        with self.clock.phase("load"), self.stop.at_once():
            models = load_models(
                self.inputs.opened,
                settings,
                loader_of(settings.engine),
                keep=keep_rate(settings, sink.plan),
                before=sink.plan,
                options=settings.engine_options,
                measured=self.profile,
                placement=settings,
                **text_room(settings, self.inputs.opened, self.inputs.labels.names),
            )
        self.recorder.loaded(models.engine, models.pack_seconds)
        self.loaded.callback(models.close)
        exits = self._begin(models.plan, models.engine, models.compressor)
        compressor, options = self._window_compressor(models.compressor, models.engine), self._options(exits)
        for window in windows:
            done, carried = sink.done(window.index), sink.carried_into(window.index)
            scored = score_window(window, done, carried, models.engine, compressor, options, self.recorder)
            self.recorder.record(window, done, self._noting(models.engine, scored))
            exits.watch(sink, window.index)

    def _noting(self, engine: Engine, scored: Iterator[Finished]) -> Iterator[Finished]:
        """What is scored; the plan of the job keeps what the engine has had to do with since memory ran out, so that
        no other attempt runs out of it the same way."""
        try:
            for finished in scored:
                self._note(engine)
                yield finished
        finally:
            self._note(engine)

    def _note(self, engine: Engine) -> None:
        found = engine.reduced()
        if found is not None and self.sink.plan.get(REDUCED) != asdict(found):
            self.sink.plan = self.sink.plan | {REDUCED: asdict(found)}

    def run_with_workers(self, windows: Iterator[Window], ready: Callable[[], bool]) -> list[WorkerCounts]:
        """Begin the workers, and score with them; `ready` tells whether the next window can be had at once."""
        from prefillcli.jobs.runners.parallel import ParallelScoring, pool_compressor, start_pool

        settings, sink, opened = self.settings, self.sink, self.inputs.opened
        keep = keep_rate(settings, sink.plan)
        with self.clock.phase("load"):
            pool = start_pool(
                settings,
                opened,
                self.stop,
                keep=keep,
                before=sink.plan,
                profile=self.profile,
                digests=self.inputs.models.digests,
            )
        self.loaded.callback(pool.close)
        small = pool_compressor(settings, opened, pool, keep)
        exits = self._begin(pool.plan, pool, small)
        compressor = self._window_compressor(small, pool)
        ParallelScoring(pool, sink, self.recorder, self.clock, compressor, self._options(exits)).score(windows, ready)
        reports = pool.reports()
        self.recorder.written_by_workers = sum_of([each.decoded for each in reports if each.decoded is not None])
        return [WorkerCounts(**asdict(report)) for report in reports]

    def _begin(self, plan: Mapping[str, Any], engine: PlanEngine, compressor: Compressor | None) -> JobExits:
        """Store the plan of the job, with what is found out before the first window: all attempts at it share that.

        Returns the exits of its rows.
        """
        inputs, sink = self.inputs, self.sink
        before = {name: sink.plan[name] for name in (_CONTENT_FREE, EXITS) if name in sink.plan}
        sink.plan = {**plan, **before}
        if inputs.content_free:
            if _CONTENT_FREE not in before:
                with self.clock.phase("model"):
                    found = contextual_calibration(inputs.content_free, inputs.labels, engine, self._tick)
                sink.plan = sink.plan | {_CONTENT_FREE: found.model_dump(mode="json")}
            self.recorder.calibration = Calibration.model_validate(sink.plan[_CONTENT_FREE])
        if not self.settings.exit:
            return JobExits()
        with self.clock.phase("exits"):
            learning = ExitLearning(
                self.settings,
                inputs,
                engine,
                compressor,
                sink,
                self.digests,
                self.report,
                None if self.profile is None else self.profile.regroup_layers,
                self._tick,
            )
            exits, tokens = learning.exits()
        self.recorder.tokens.add(tokens)
        self.recorder.exits = exits
        return exits

    def _tick(self, tokens: float) -> None:
        self.stop.check()

    def _options(self, exits: JobExits) -> ScoringOptions:
        settings, source, threads = self.settings, self.inputs.source, self.inputs.opened.threads
        return ScoringOptions(
            labels=self.inputs.labels,
            schedule=settings.schedule,
            block_tokens=0 if settings.compresses else self.granularity.block_tokens,
            audit=AuditDraw(settings.audit, source.selection(), source.count()) if settings.audit else None,
            exits=exits,
            rationales=self._rationales(),
            adjust_threads=(lambda: None) if threads is None else threads.adjust,
        )

    def _rationales(self) -> JobRationales | None:
        """What is done with chosen rows. `chosen` counts those that are written, of all attempts."""
        inputs, sink = self.inputs, self.sink
        found = job_rationales(
            self.settings,
            inputs.choice,
            inputs.opened,
            inputs.labels,
            inputs.builder,
            self.recorder.calibration,
            lambda: sink.counts.tallies.chosen_rows,
        )
        if found is not None and found.evidence is not None:
            self.loaded.callback(found.evidence.close)
        return found

    def _window_compressor(self, compressor: Compressor | None, engine: PlanEngine) -> WindowCompressor | None:
        """What compresses the windows of this job, if anything does."""
        if compressor is None:
            return None
        from prefillcli.compress.window_compressor import AutoKeep, WindowCompressor  # takes torch along

        auto = None
        if self.settings.keep == "auto" and "keep" not in self.sink.plan:
            auto = AutoKeep(self.settings.max_flips, self.settings.audit)
        methods = self.sink.counts.tallies.methods
        return WindowCompressor(compressor, engine, self.inputs.labels, auto=auto, methods=methods)


def keep_rate(settings: ScoreSettings, plan: Mapping[str, Any]) -> float:
    """A job's keep rate: given or, by its plan, chosen; 1 until it is."""
    rate: float = plan.get("keep", 1.0 if settings.keep == "auto" else settings.keep)
    return rate

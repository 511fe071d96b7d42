"""What a run of `prefill score` reports of itself when it has ended, however it did."""

from __future__ import annotations

from dataclasses import asdict

from prefillcli.data.output.sink import Sink
from prefillcli.forecast.remaining_time import RemainingTime
from prefillcli.jobs.exit_report import exit_use, stored_exit_use
from prefillcli.jobs.inputs import JobInputs
from prefillcli.jobs.recorder import Recorder
from prefillcli.jobs.window_loop import keep_rate
from prefillcli.options.score import ScoreSettings
from prefillcli.report.rationale_use import RationaleUse, WrittenRow
from prefillcli.report.run import PeakMemory, ReducedUse, RunReport, ThreadCounts, Tokens, WeightsUse, versions
from prefillcli.runtime.clock import Clock
from prefillcli.runtime.memory import peak_memory


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
        engine = recorder.engine
        if engine is not None and (weights := engine.weights_report()) is not None:
            report.weights = WeightsUse(**asdict(weights))
        if engine is not None and (reduced := engine.reduced()) is not None:
            report.reduced = ReducedUse(**asdict(reduced))
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

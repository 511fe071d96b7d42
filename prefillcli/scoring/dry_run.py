"""The job of `--dry-run`: `*.dry-run.json`, the last line on stdout, and tables in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from pydantic import Field

from prefillcli.core.inputs import Inputs
from prefillcli.core.scorer import Granularity
from prefillcli.core.windows import WindowSize
from prefillcli.errors import PrefillError, ResourceError, UsageError
from prefillcli.forecast.outlook import HeadOutlook, outlook_of
from prefillcli.forecast.profile import find_profile
from prefillcli.forecast.survey import Costs, InputStatistics, Survey, lengths_of, survey_section
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.groups import PIPE
from prefillcli.report.run import CommandReport
from prefillcli.report.section import mebibytes, pairs_table, print_section, stderr_console
from prefillcli.runtime import log
from prefillcli.runtime.clock import Clock, Progress, duration
from prefillcli.runtime.memory import available_memory, peak_memory
from prefillcli.scoring.loading import plan_weights
from prefillcli.scoring.opening import open_inputs, open_rows
from prefillcli.scoring.path_table import dry_run_report, output_of, require_apart
from prefillcli.scoring.pipes import piped
from prefillcli.scoring.shell import conclude, shell


class DryRunReport(CommandReport):
    """The contents of `*.dry-run.json`. The `output` is where the scores would go."""

    report: str | None = None
    survey: Survey | None = None
    profile: str | None = None  # the profile that predicted
    no_prediction: str | None = None  # why there is none
    outlooks: dict[str, Any] = Field(default_factory=dict)  # by the part of the report of a run
    peak_memory_bytes: int = 0  # of the host

    def summary(self) -> dict[str, Any]:
        """Return the last line on stdout."""
        line: dict[str, Any] = {"status": self.status, "exit_code": self.exit_code, "dry_run": True}
        if self.survey is not None:
            survey, plan = self.survey, self.survey.plan
            line |= {
                "rows": survey.rows.model_dump(),
                "prompt_tokens": survey.prompt_tokens,
                "unique_tokens": survey.unique_tokens,
                "computed_tokens": plan.computed_tokens,
                "packs": plan.packs,
                "predicted_seconds": plan.seconds,
                "predicted_price": plan.price,
            }
        safe = self.safe()
        line |= {"seconds": round(self.seconds, 3), "output": safe.output, "report": safe.report}
        return line | ({"error": self.error} if self.error else {})


def _print_dry_run(report: DryRunReport, lines: Sequence[tuple[str, str]]) -> None:
    # The whole report, on stderr, with these lines.
    if report.survey is not None:
        print_section(stderr_console(), survey_section(report.survey))
    rows = [
        *lines,
        ("prediction", f"by {report.profile}" if report.profile else f"none: {report.no_prediction}"),
        ("dry run", f"{duration(report.seconds)}, {mebibytes(report.peak_memory_bytes)} MiB; none scored"),
        ("output", f"{report.output} (not written)"),
        ("report", report.report or "none"),
    ]
    stderr_console().print(pairs_table(rows))


def dry_run_job(settings: ScoreSettings, granularity: Granularity) -> dict[str, Any]:
    """Survey the input; write the report whatever happens; return the summary for the last line on stdout.

    No output is looked at or written. Errors are reported on stderr, and become the exit code in the summary.
    """
    clock, report = Clock(), DryRunReport.new(settings.to_json())
    lines: list[tuple[str, str]] = []

    def finish() -> None:
        report.seconds, report.peak_memory_bytes = clock.total, peak_memory()["host"]
        if report.report is None:
            return
        try:
            report.write(report.report)
        except PrefillError as error:
            log.error(f"cannot write the report: {error}")
            report.report = None
            report.exit_code = report.exit_code or ResourceError.exit_code

    given = settings
    with shell(report, debug=given.run.debug, finish=finish) as stop, ExitStack() as pipes:
        report.output = PIPE if given.writes_stdout else output_of(given)
        with stop.at_once():
            pipe = pipes.enter_context(piped(given))
            settings, output = pipe.settings, output_of(pipe.settings)
            require_apart(settings)
        if pipe.output is None or settings.files.report is not None:
            report.report = dry_run_report(output, settings.files.report, settings.files.shard_of)
        with stop.at_once():
            rows, parts = open_rows(settings, (settings.ids.id_column, *settings.files.keep_columns))
            inputs = open_inputs(rows, parts)
            costs = _costs(inputs, granularity, report)
        size = WindowSize(granularity.window_rows, batch_rows=granularity.batch_rows)
        expected = inputs.source.expected_rows if settings.files.shard_of is None else None
        progress = Progress(expected, interval=settings.run.progress_interval, quiet=settings.run.quiet)
        with progress, stop.at_once():
            report.survey = survey(inputs, inputs.windows(inputs.builder.close, size=size), costs, progress.advance)
            if (exits := parts.exits) is not None:
                report.outlooks["exits"], lines = outlook_of(inputs, report.survey, exits.profile)
            if parts.heads is not None:
                report.outlooks["heads"] = outlook = HeadOutlook.of(parts.heads, inputs.opened)
                lines.append(outlook.line)
        counts = report.survey.rows.counts
        empty = settings.files.shard is None and counts.total == 0
        rate, skip = settings.files.max_error_rate, settings.files.skip_empty
        conclude(report, counts, max_error_rate=rate, empty_input=empty, skip_empty=skip)
    if not settings.run.quiet and report.status == "complete":
        _print_dry_run(report.safe(), lines)
    return report.summary()


def _costs(inputs: Inputs, granularity: Granularity, report: DryRunReport) -> Costs:
    # The plans to compare, with the times of the profile that applies here. Raises UsageError or ResourceError.
    from prefillcli.models.weights import draft_bytes  # takes torch along

    settings, opened = inputs.settings, inputs.opened
    profile, name, report.no_prediction = find_profile(settings, opened)
    if profile is None and settings.is_flag("price_per_hour"):
        raise UsageError(f"--price-per-hour: no time is predicted, so there is no price: {report.no_prediction}")
    report.profile = None if profile is None else name
    free = None
    if settings.packs.memory is None:
        taken = plan_weights(settings.layers, opened).taken + draft_bytes(opened)
        free = max(available_memory(opened.device) - taken, 0)
    else:
        try:
            plan_weights(settings.layers, opened)
        except ResourceError as error:
            log.warning(f"a run would fail here: {error}")
    names, block_tokens = inputs.labels.names, granularity.block_tokens
    return Costs(settings, opened, names, free=free, profile=profile, block_tokens=block_tokens)


def survey(
    inputs: Inputs,
    coming: AbstractContextManager[Iterable[Any]],
    costs: Costs,
    tick: Callable[[int, int], None],
) -> Survey:
    """Read the windows that are `coming`, and plan them by `costs`.

    The windows are of the rows of the `inputs`. `tick` is called with the rows and prompt tokens of each window, and
    may raise. Raises the errors that the job raises before it loads weights.
    """
    id_column = inputs.settings.ids.id_column
    found, clock = InputStatistics(id_column, json_text=inputs.source.kind == "jsonl"), Clock()
    with coming as windows:
        for number, window in enumerate(windows):
            if number == 0:
                inputs.labels.check(window)
            with clock.phase("plan"):
                found.add(window)
                costs.add(window.prompts)
            tick(len(window.rows), sum(len(prompt.whole) for prompt in window.prompts))
    return Survey(
        rows=found.rows(costs.errors),
        prompt_tokens=found.tokens,
        lengths=lengths_of(found.lengths),
        images=found.images,
        duplicates=found.duplicates,
        windows=costs.windows,
        unique_tokens=costs.unique_tokens,
        limits=costs.limits,
        plan=costs.plan,
        keeps=costs.keeps,
        texts=costs.texts,
        seconds={
            "read": inputs.source.seconds,
            "render": inputs.builder.render_seconds,
            "tokenize": inputs.builder.tokenize_seconds,
            "plan": clock.seconds["plan"],
        },
    )

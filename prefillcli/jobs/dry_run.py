"""The job of `--dry-run`: `*.dry-run.json`, the last line on stdout, and tables in the terminal."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, Field

from prefillcli.core.further import condition_of
from prefillcli.data.output.columns import Counts
from prefillcli.data.output.store import put_text
from prefillcli.data.proof import hash_model
from prefillcli.data.windows import ShardRows, windows
from prefillcli.errors import PrefillError, ResourceError, UsageError, shown, shown_report
from prefillcli.forecast.profile import find_profile
from prefillcli.jobs.load import text_room
from prefillcli.jobs.path_table import dry_run_report, output_of, require_apart
from prefillcli.jobs.scorer import Granularity, Scorer
from prefillcli.jobs.shell import conclude, shell
from prefillcli.models.open import Opened, weights_of
from prefillcli.options.commands import ScoreSettings
from prefillcli.report.run import versions
from prefillcli.report.section import mebibytes, pairs_table, print_section, stderr_console
from prefillcli.report.survey import Survey, survey_section
from prefillcli.runtime import log
from prefillcli.runtime.clock import Clock, Progress, duration
from prefillcli.runtime.memory import peak_memory
from prefillcli.runtime.signals import Stop

SCHEMA_VERSION = 1


class DryRunReport(BaseModel):
    """The contents of `*.dry-run.json`."""

    schema_version: int = SCHEMA_VERSION
    status: Literal["complete", "failed", "interrupted"] = "failed"
    exit_code: int = 1
    error: str | None = None
    started: str = ""  # ISO 8601, UTC
    output: str | None = None  # where the scores would go
    report: str | None = None
    survey: Survey | None = None
    profile: str | None = None  # the profile that predicted
    no_prediction: str | None = None  # why there is none
    seconds: float = 0.0
    peak_memory_bytes: int = 0  # of the host
    settings: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """The last line on stdout."""
        line: dict[str, Any] = {"status": self.status, "exit_code": self.exit_code, "dry_run": True}
        if self.survey is not None:
            survey, plan = self.survey, self.survey.plan
            line |= {
                "rows": survey.rows.model_dump(),
                "prompt_tokens": survey.prompt_tokens,
                "unique_tokens": survey.sharing.unique_tokens,
                "computed_tokens": plan.computed_tokens,
                "packs": plan.packs,
                "predicted_seconds": plan.seconds,
                "predicted_price": plan.price,
            }
        safe = shown_report(self)
        line |= {"seconds": round(self.seconds, 3), "output": safe.output, "report": safe.report}
        return line | ({"error": self.error} if self.error else {})


def print_dry_run(report: DryRunReport) -> None:
    """The whole report, on stderr."""
    if report.survey is not None:
        print_section(stderr_console(), survey_section(report.survey))
    rows = [
        ("prediction", f"by {report.profile}" if report.profile else f"none: {report.no_prediction}"),
        ("dry run", f"{duration(report.seconds)}, {mebibytes(report.peak_memory_bytes)} MiB; none scored"),
        ("output", f"{report.output} (not written)"),
        ("report", report.report or "none"),
    ]
    stderr_console().print(pairs_table(rows))


def dry_run_job(settings: ScoreSettings, granularity: Granularity) -> dict[str, Any]:
    """Survey the input; write the report whatever happens; return the summary for the last line on stdout.

    No output is looked at or written. Errors are told on stderr, and become the exit code in the summary.
    """
    clock = Clock()
    report = DryRunReport(
        started=datetime.now(UTC).isoformat(timespec="seconds"), settings=shown(settings.model_dump(mode="json"))
    )

    def finish() -> None:
        report.seconds, report.peak_memory_bytes = clock.total, peak_memory()["host"]
        report.versions = versions()
        _write(report)

    with shell(report, debug=settings.debug, finish=finish) as stop:
        _run(settings, report, granularity, stop)
    if not settings.quiet and report.status == "complete":
        print_dry_run(shown_report(report))
    return report.summary()


def _write(report: DryRunReport) -> None:
    if report.report is None:
        return
    try:
        put_text(report.report, shown_report(report).model_dump_json(indent=2) + "\n")
    except (OSError, PrefillError) as error:
        log.error(f"cannot write the report: {error}")
        report.report = None
        report.exit_code = report.exit_code or ResourceError.exit_code


def _run(settings: ScoreSettings, report: DryRunReport, granularity: Granularity, stop: Stop) -> None:
    from prefillcli.forecast.survey import Alternatives, survey

    report.output = output_of(settings)
    with stop.at_once():
        require_apart(settings)
    report.report = dry_run_report(report.output, settings.report, settings.shard_of)
    opening = Scorer(settings, granularity)
    with stop.at_once():
        opening.open_source()
        opening.open_models()
        opened = opening.opened
        profile, name, report.no_prediction = find_profile(
            settings.profile, hash_model(opened.files.origin), opened.files.dtype, opened.device
        )
        if profile is None and settings.is_flag("price_per_hour"):
            raise UsageError(f"--price-per-hour: no time is predicted, so there is no price: {report.no_prediction}")
        free = _free(settings, opened)
    report.profile = name if profile is not None else None
    shard, source = settings.shard_of, opening.source
    condition_of(opening.features, opening.schema())  # raises UsageError
    total = source.selected_rows if shard is None else None
    progress = Progress(total, interval=settings.progress_interval, quiet=settings.quiet)
    with progress, stop.at_once():
        plans = Alternatives(
            settings,
            opened,
            free=free,
            profile=profile,
            block_tokens=granularity.block_tokens,
            **text_room(settings, opened, opening.labels.names),
        )
        coming = windows(
            source,
            opening.builder,
            opening.labels,
            id_column=settings.id_column,
            max_rows=granularity.window_rows,
            batch_rows=granularity.batch_rows,
            only=None if shard is None else ShardRows(shard, opening.builder),
        )
        found = report.survey = survey(source, opening.builder, opening.labels, coming, plans, progress.advance)
    rows = found.rows
    counts = Counts(rows.total, rows.prompts, rows.errors, rows.skipped, rows.errors_by_code)
    conclude(report, counts, max_error_rate=settings.max_error_rate, skip_empty=settings.skip_empty)


def _free(settings: ScoreSettings, opened: Opened) -> int | None:
    """Bytes that the weights will leave free; None where `--memory` gives the budget."""
    from prefillcli.models.weights import draft_bytes, plan_weights

    if settings.memory is None:
        from prefillcli.runtime.memory import available_memory

        weights = plan_weights(opened, settings)
        taken = weights.memory + draft_bytes(opened) if weights.streamed else weights_of(opened)
        return max(available_memory(opened.device) - taken, 0)
    try:
        plan_weights(opened, settings)
    except ResourceError as error:
        log.warning(f"a run would fail here: {error}")
    return None

"""`prefill merge`: the shards of a job become the output that one process would have written."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from prefillcli.errors import OutputDamagedError, counted, shown
from prefillcli.judging.gates import Gates
from prefillcli.options.commands import MergeSettings
from prefillcli.report.run import RunReport, write_files
from prefillcli.report.verdict import ABOUT_ANSWERS, untold
from prefillcli.rows.output.destination import Destination, Manifest
from prefillcli.rows.output.shards import JoinedShards
from prefillcli.rows.output.tallies import Counts
from prefillcli.runtime import log
from prefillcli.runtime.clock import Clock, step
from prefillcli.runtime.signals import Stop
from prefillcli.scoring.compose import JUDGES
from prefillcli.scoring.path_table import report_path, require_apart
from prefillcli.scoring.shell import conclude, leave_earlier_report, shell


def merge_job(settings: MergeSettings) -> dict[str, Any]:
    """Merge; write `run.json` and its page however it ends; return the summary for the last line on stdout.

    Errors are reported on stderr, and become the exit code in the summary.
    """
    run_id = settings.log.run_id or log.new_run_id()
    with log.log_of(run_id, json_lines=settings.log.log_format == "json"):
        return _merge_and_report(settings, run_id)


def _merge_and_report(settings: MergeSettings, run_id: str) -> dict[str, Any]:
    clock = Clock()
    report = RunReport(
        run_id=run_id,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        settings=shown(settings.to_json()),
        output=settings.files.output,
    )
    metrics_file, at_end = None, False

    def finish() -> None:
        report.end(clock)
        report.warnings = log.warnings_of_run(without=ABOUT_ANSWERS)
        if not at_end:
            leave_earlier_report(report, settings.files.output, None, quiet=settings.run.quiet)
        write_files(report, metrics_file)

    log.event("started", "the merge begins", settings=report.settings)
    with shell(report, debug=settings.run.debug, finish=finish) as stop:
        with stop.at_once():
            require_apart(settings)
        report.report, metrics_file = (
            report_path(settings.files.output, settings.files.report, None),
            settings.files.metrics_file,
        )
        _run(settings, report, clock, stop)
        at_end = True
    step("")
    if not settings.run.quiet and report.status == "complete":
        log.info(_sentence(report))
    for text in untold(report):
        log.warning(text, event=ABOUT_ANSWERS)
    log.event("ended", f"the merge is {report.status}, exit code {report.exit_code}", summary=report.summary())
    return report.summary()


def _run(settings: MergeSettings, report: RunReport, clock: Clock, stop: Stop) -> None:
    gates = Gates(settings.gates)
    gates.begin(report)
    with JoinedShards(Destination.parse(settings.files.output)) as joined:
        with clock.phase("read"), stop.at_once():
            joined.open(overwrite=settings.files.overwrite)
        if joined.merged is not None:
            counts = _merged_before(joined, joined.merged, report, clock)
        else:
            counts = _merge(joined, report, clock, stop)
        manifest = joined.merged or joined.manifest
        report.take(counts)
        report.take_audits(counts)
        with clock.phase("evaluate"), stop.at_once():
            for judge in JUDGES:
                judge.merged(report, settings.files.output, replace(manifest, counts=counts))
    failed = gates.judge(report)
    rate, skip = settings.files.max_error_rate, settings.files.skip_empty
    if "max_error_rate" not in settings.given:
        rate = manifest.settled.get("max_error_rate", rate)  # as the shards were given it
    empty = counts.total == 0
    conclude(report, counts, max_error_rate=rate, empty_input=empty, skip_empty=skip, failed=failed)


def _merge(joined: JoinedShards, report: RunReport, clock: Clock, stop: Stop) -> Counts:
    report.shards, report.fingerprint = joined.count, joined.manifest.job.fingerprint
    with clock.phase("read"), stop.at_once():
        joined.check()
    with clock.phase("write"):
        with stop.at_once():
            counts = joined.write()
        joined.remove()
    return counts


def _merged_before(joined: JoinedShards, merged: Manifest, report: RunReport, clock: Clock) -> Counts:
    """Return the counts of the output of an earlier merge. Remains of the shards are removed."""
    report.resumed = True
    report.shards, report.fingerprint = len(merged.merged), merged.job.fingerprint
    with clock.phase("read"):
        if damage := joined.damage():
            raise OutputDamagedError(f"{damage[0]}\nthe shards were merged to it; write it again with --overwrite")
        joined.remove()
    return merged.counts or Counts()


def _sentence(report: RunReport) -> str:
    rows = report.rows
    done = "was merged before" if report.resumed else f"is made of {report.shards} shards"
    return (
        f"{report.output} {done}: {counted(rows.total, 'row')}, {rows.scored:,} scored, {rows.errors:,} with an error"
    )

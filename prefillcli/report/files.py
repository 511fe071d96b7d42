"""The files of reports: JSON with a page beside it, and for a run metrics for Prometheus."""

from __future__ import annotations

import time

from prefillcli.data.output.store import put_text
from prefillcli.errors import Interrupted, PrefillError, ResourceError
from prefillcli.redaction import shown_report, without_secrets
from prefillcli.report.metrics import to_metrics
from prefillcli.report.rendering import page_of
from prefillcli.report.run import RunReport, to_json
from prefillcli.report.run_page import run_html
from prefillcli.runtime import log


def write_with_page(path: str, report: str, page: str) -> None:
    """Write a report as JSON, and its page beside it; a reader sees an old file or a whole new one.

    Raises PrefillError.
    """
    for name, text in ((path, report), (page_of(path), page)):
        try:
            put_text(name, text)
        except OSError as error:
            raise ResourceError(f"{name}: cannot write: {error.strerror or error}") from None


def write_files(report: RunReport, metrics_file: str | None = None) -> None:
    """Write the files of a run; a reader sees an old one or a whole new one. Failures are reported on stderr.

    Without `report.report` there is neither `run.json` nor page. A run without `run.json` is a failed one; page and
    metrics are for watching it: without them it ends as it would have.
    """
    if report.report is not None:
        report.page = page_of(report.report)
        try:
            put_text(report.page, run_html(shown_report(report)))
        except Exception as error:  # whatever goes wrong, the scores are written
            report.page = None
            _warn("page", error)
        except Interrupted:  # a store hangs, and a signal has come
            report.report = report.page = None
            raise
        try:
            put_text(report.report, to_json(shown_report(report)))
        except (OSError, PrefillError) as error:
            log.error(f"cannot write the report: {error}")
            report.report = None
            report.exit_code = report.exit_code or ResourceError.exit_code
        except Interrupted:
            report.report = None
            raise
    if metrics_file is not None:
        try:
            put_text(metrics_file, to_metrics(report, time.time()))
        except Exception as error:
            _warn("metrics", error)


def _warn(what: str, error: Exception) -> None:
    why = without_secrets(str(error)) or type(error).__name__
    log.warning(f"cannot write the {what}: {why}")

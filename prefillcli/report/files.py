"""The files of reports: JSON with a page beside it, and for a run metrics for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

from prefillcli.data.output.store import put_text
from prefillcli.errors import NOTHING_TO_DO, Interrupted, PrefillError, ResourceError
from prefillcli.redaction import shown_report, without_secrets
from prefillcli.report.rationale import RationaleUse
from prefillcli.report.rendering import page_of
from prefillcli.report.run import RunReport, to_json
from prefillcli.report.run_page import run_html
from prefillcli.runtime import log

# A run as metrics in Prometheus' text format, for the textfile collector of node_exporter.
#
# The format: https://prometheus.io/docs/instrumenting/exposition_formats/. All are gauges, about the last run.


_Sample = tuple[dict[str, str], float]


def to_metrics(report: RunReport, now: float) -> str:
    """All metrics of a run that ended at `now`, in seconds since 1970."""
    return "".join(line for name, text, samples in _metrics(report, now) for line in _family(name, text, samples))


def _metrics(report: RunReport, now: float) -> Iterator[tuple[str, str, list[_Sample]]]:
    rows = report.rows
    success = float(report.exit_code in (0, NOTHING_TO_DO))
    yield "run_success", "1 if the last run was done or had nothing to do, else 0.", _one(success)
    yield "run_exit_code", "Exit code of the last run.", _one(report.exit_code)
    results = {"scored": rows.scored, "error": rows.errors, "skipped": rows.skipped}
    yield "rows_total", "Rows of the output by result.", _by("result", results)
    yield "rows_errors", "Error rows of the output by code.", _by("code", rows.errors_by_code)
    yield "tokens_total", "Tokens of the last run by kind.", _by("kind", report.tokens.model_dump())
    phases = report.seconds.model_dump(exclude={"total"})
    yield "phase_seconds", "Wall time of the last run by phase.", _by("phase", phases)
    yield "run_seconds", "Wall time of the last run.", _one(report.seconds.total)
    yield "rows_per_second", "Rows scored per second by the last run.", _one(report.rows_per_second)
    peak = report.peak_memory_bytes.model_dump()
    yield "peak_memory_bytes", "Largest memory used by the last run.", _by("where", peak)
    if report.mean_score is not None:
        yield "score_mean", "Mean score of the output.", _one(report.mean_score)
    if report.mean_label_mass is not None:
        yield "label_mass_mean", "Mean label mass of the output.", _one(report.mean_label_mass)
    for section in report.sections():
        yield from section.metrics
    if report.audit is not None and report.audit.flip_rate is not None:
        yield (
            "audit_flip_rate",
            "Share of audited rows that compression or early exits flip.",
            _one(report.audit.flip_rate),
        )
    if report.rationales is not None:
        yield from _rationale_metrics(report.rationales)
    yield "last_run_timestamp_seconds", "When the last run ended, in Unix time.", _one(now)


def _rationale_metrics(use: RationaleUse) -> Iterator[tuple[str, str, list[_Sample]]]:
    yield "rationale_rows", "Rows of the output with a rationale by why it ends.", _by("reason", use.finish_reasons)
    yield "rationale_tokens", "Tokens of the output's rationales.", _one(use.tokens)
    yield "evidence_rows", "Rows of the output whose sections were weighed.", _one(use.evidence_rows)
    yield "rationale_decode_seconds", "Seconds in which the last run wrote.", _one(use.decode_seconds)
    yield "rationale_prefill_seconds", "Seconds in which it read prompts once more.", _one(use.prefill_seconds)
    if use.passes_per_token is not None:
        yield "rationale_passes_per_token", "Passes of the model for one token.", _one(use.passes_per_token)
    accepted = {name: each.acceptance for name, each in use.drafters.items() if each.acceptance is not None}
    yield "rationale_acceptance", "Share of the tokens guessed ahead that were right.", _by("drafter", accepted)


def _one(value: float) -> list[_Sample]:
    return [({}, value)]


def _by(label: str, values: Mapping[str, float]) -> list[_Sample]:
    return [({label: name}, value) for name, value in values.items()]


def _family(name: str, text: str, samples: Iterable[_Sample]) -> Iterator[str]:
    yield f"# HELP prefill_{name} {text}\n# TYPE prefill_{name} gauge\n"
    for labels, value in samples:
        pairs = ",".join(f'{label}="{_escaped(own)}"' for label, own in labels.items())
        yield f"prefill_{name}{f'{{{pairs}}}' if pairs else ''} {value!r}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


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

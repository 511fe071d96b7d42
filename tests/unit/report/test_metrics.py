"""Metrics of a run as Prometheus itself reads them."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from prefillcli.report.run import RunReport, to_metrics
from prefillcli.stats.flips import audit_of

NOW = 1_760_000_000.25


def metrics(report: RunReport) -> dict[tuple[str, str], float]:
    """Value by name and label; every family has a type and a help text."""
    found = {}
    for family in text_string_to_metric_families(to_metrics(report, NOW)):
        assert family.type == "gauge"
        assert family.documentation.endswith(".")
        for sample in family.samples:
            assert sample.name.startswith("prefill_")
            key = (sample.name, ",".join(f"{name}={value}" for name, value in sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def test_numbers_are_those_of_the_report() -> None:
    report = RunReport(status="complete", exit_code=3, mean_score=0.25, rows_per_second=12.5)
    report.rows.total, report.rows.scored, report.rows.errors, report.rows.skipped = 10, 7, 2, 1
    report.rows.errors_by_code = {"null_prompt": 2}
    report.tokens.prompt, report.tokens.draft = 1234, 99
    report.seconds.total, report.seconds.model = 1.5, 1e-7
    report.peak_memory_bytes.host, report.peak_memory_bytes.device = 1 << 33, 1 << 34
    report.audits["answer"] = audit_of([(0.2, 0.7, None), (0.2, 0.1, None)])
    found = metrics(report)
    expected = {
        ("prefill_run_success", ""): 0,
        ("prefill_run_exit_code", ""): 3,
        ("prefill_rows_total", "result=scored"): 7,
        ("prefill_rows_total", "result=error"): 2,
        ("prefill_rows_total", "result=skipped"): 1,
        ("prefill_rows_errors", "code=null_prompt"): 2,
        ("prefill_tokens_total", "kind=prompt"): 1234,
        ("prefill_tokens_total", "kind=draft"): 99,
        ("prefill_phase_seconds", "phase=model"): 1e-7,
        ("prefill_run_seconds", ""): 1.5,
        ("prefill_rows_per_second", ""): 12.5,
        ("prefill_peak_memory_bytes", "where=host"): 1 << 33,
        ("prefill_peak_memory_bytes", "where=device"): 1 << 34,
        ("prefill_score_mean", ""): 0.25,
        ("prefill_audit_flip_rate", ""): 0.5,
        ("prefill_last_run_timestamp_seconds", ""): NOW,
    }
    assert expected.items() <= found.items()
    assert ("prefill_phase_seconds", "phase=total") not in found


@pytest.mark.parametrize(("exit_code", "success"), [(0, 1), (99, 1), (1, 0), (3, 0), (143, 0)])
def test_success_is_a_run_that_needs_nobody(exit_code: int, success: int) -> None:
    assert metrics(RunReport(exit_code=exit_code))["prefill_run_success", ""] == success


def test_what_is_not_known_is_left_out() -> None:
    names = {name for name, _ in metrics(RunReport())}
    assert not names & {"prefill_score_mean", "prefill_audit_flip_rate", "prefill_rows_errors"}


def test_labels_are_escaped() -> None:
    report = RunReport()
    report.rows.errors_by_code = {'a"b\\c\nd': 1}
    assert metrics(report)["prefill_rows_errors", 'code=a"b\\c\nd'] == 1

"""The page of `prefill bench`, and its files."""

from __future__ import annotations

from typing import Any

from prefillcli.bench.report import REFERENCE, BenchReport, WorkloadResult
from prefillcli.bench.text_report import TEXT_REFERENCE, TextResult
from prefillcli.bench.text_tables import TEXT_LEGEND, text_headline, text_table
from prefillcli.bench.verdicts import workload_remarks
from prefillcli.bench.workload_tables import answer_table, cost_table, drift_table, speedup_table, workload_headline
from prefillcli.redaction import shown_report
from prefillcli.report.files import write_with_page
from prefillcli.report.rendering import TableRows, percent_interval, render_page, shown_settings


def bench_html(report: BenchReport) -> str:
    """The page of a report."""
    return render_page(
        "prefillcli.bench",
        "page.html.j2",
        report=report,
        workloads=[
            {
                "headline": workload_headline(each),
                "tables": [
                    ("Speed", cost_table(each)),
                    (f"Speedup over {REFERENCE}", speedup_table(each)),
                    (f"Answers against {REFERENCE}", answer_table(each)),
                    *_drift_tables(each),
                ],
                "remarks": workload_remarks(each),
                "able": each.reference_able is not False,
                "speedups": _speedup_bars(each),
                "flips": _flip_bars(each),
            }
            for each in report.workloads
        ],
        texts=[
            {
                "headline": text_headline(each),
                "table": text_table(each),
                "legend": TEXT_LEGEND,
                "notes": each.notes,
                "speedups": _text_bars(each),
            }
            for each in report.texts
        ],
        settings=shown_settings(report.settings),
    )


def _drift_tables(workload: WorkloadResult) -> list[tuple[str, TableRows]]:
    """The table of state drift, where there is any."""
    rows = drift_table(workload)
    return [("State drift: distance over the norm, median of each layer", rows)] if rows else []


def _speedup_bars(workload: WorkloadResult) -> list[dict[str, Any]]:
    """For each method the lengths of its bars in percent of the longest, and what stands behind them."""
    methods = [each for each in workload.methods if each.method != REFERENCE]
    longest = max([1.0, *(max(each.speedup.median, each.predicted.flops or 0) for each in methods)])
    return [
        {
            "method": each.method,
            "measured": 100 * each.speedup.median / longest,
            "predicted": None if each.predicted.flops is None else 100 * each.predicted.flops / longest,
            "one": 100 / longest,
            "text": f"{each.speedup.median:.2f}x"
            + ("" if each.predicted.flops is None else f", {each.predicted.flops:.2f}x by FLOPs"),
        }
        for each in methods
    ]


def _text_bars(result: TextResult) -> list[dict[str, Any]]:
    """For each way of writing but the reference, its speedups in percent of the largest: in all, and of decoding."""
    methods = [each for each in result.methods if each.method != TEXT_REFERENCE]
    longest = max([1.0, *(max(each.speedup.median, each.decode_speedup.median) for each in methods)])
    return [
        {
            "method": each.method,
            "measured": 100 * each.speedup.median / longest,
            "decoding": 100 * each.decode_speedup.median / longest,
            "one": 100 / longest,
            "text": f"{each.speedup.median:.2f}x, decoding alone {each.decode_speedup.median:.2f}x",
        }
        for each in methods
    ]


def _flip_bars(workload: WorkloadResult) -> list[dict[str, Any]]:
    """Bars of the flip rates with their intervals, in percent of the largest upper bound."""
    audits = [(each.method, each.answers.audit) for each in workload.methods if each.answers.audit is not None]
    known = [(name, each.flip_rate, each.interval) for name, each in audits]
    longest = max((interval[1] for _, _, interval in known if interval is not None), default=1.0)
    return [
        {
            "method": name,
            "rate": 100 * rate / longest,
            "low": 100 * interval[0] / longest,
            "width": 100 * (interval[1] - interval[0]) / longest,
            "text": f"{rate:.1%} ({percent_interval(interval)})",
        }
        for name, rate, interval in known
        if rate is not None and interval is not None
    ]


def save_report(report: BenchReport, path: str) -> None:
    """Write `bench.json` to `path`, and its page. Raises PrefillError."""
    safe = shown_report(report)
    write_with_page(path, safe.model_dump_json(indent=2) + "\n", bench_html(safe))

"""The tables of a workload's results: for the terminal, and for the page."""

from __future__ import annotations

from collections.abc import Mapping

from prefillcli.bench.measured_range import Range
from prefillcli.bench.report import METHODS, REFERENCE, MethodResult, WorkloadResult
from prefillcli.bench.verdicts import legend, verdicts, workload_remarks
from prefillcli.report.rendering import (
    WIDTH,
    TableRows,
    mebibytes,
    percent_interval,
    percent_or_nothing,
    print_explained,
    print_numbers,
    stderr_console,
    three_digits,
)


def cost_table(workload: WorkloadResult) -> TableRows:
    """Header and one row for each method: what it took."""
    rows = [["method", "seconds", "rows/s", "tokens/s", "computed", "by draft", "kept", "peak MiB"]]
    for each in workload.methods:
        peak = "" if each.peak_bytes is None else mebibytes(each.peak_bytes)
        rows.append(
            [
                each.method,
                _range(each.seconds),
                f"{each.rows_per_second:,.{1 if each.rows_per_second >= 1 else 3}f}",
                f"{each.tokens_per_second:,.0f}",
                f"{each.target_tokens:,}",
                f"{each.draft_tokens:,}" if each.draft_tokens else "",
                f"{each.kept:.1%}",
                peak,
            ]
        )
    return rows


def speedup_table(workload: WorkloadResult) -> TableRows:
    """Header and one row for each method but the reference: its speedup, and what cost models promise."""
    rows = [["method", "speedup", "by FLOPs", "1/(r+k)", "table 5", "measured/FLOPs"]]
    for each in workload.methods:
        if each.method != REFERENCE:
            promised = [each.predicted.flops, each.predicted.ratio, each.predicted.table5]
            cells = ["" if value is None else f"{value:.2f}" for value in [*promised, each.measured_over_predicted]]
            rows.append([each.method, _range(each.speedup), *cells])
    return rows


def answer_table(workload: WorkloadResult) -> TableRows:
    """Header and one row for each method: flips against the reference, and how many are right."""
    rows = [["method", "flips", "95 % interval", "mean diff.", "largest", "accuracy", "95 % interval", "AUC"]]
    for each in workload.methods:
        found, audit = each.answers, each.answers.audit
        cells = [""] * 4
        if audit is not None and audit.interval is not None and audit.flip_rate is not None:
            cells = [
                f"{audit.flips:,} ({audit.flip_rate:.1%})",
                percent_interval(audit.interval),
                f"{audit.mean_difference:.2g}",
                f"{audit.max_difference:.2g}",
            ]
        cells += [
            percent_or_nothing(found.accuracy),
            "" if found.accuracy_interval is None else percent_interval(found.accuracy_interval),
            "" if found.auc is None else f"{found.auc:.3f}",
        ]
        rows.append([each.method, *cells])
    return rows


def drift_table(workload: WorkloadResult) -> TableRows:
    """Header and one row for each method that made states drift; no rows without recurrent layers."""
    found = [(each.method, each.drift) for each in workload.methods if each.drift is not None]
    if not found:
        return []
    rows = [["method", "rows", "median", "largest", *(f"layer {each.layer}" for each in found[0][1].layers)]]
    for method, drift in found:
        layers = [f"{each.median:.2f}" for each in drift.layers]
        rows.append([method, f"{drift.rows:,}", f"{drift.median:.2f}", f"{drift.largest:.2f}", *layers])
    return rows


def workload_headline(workload: WorkloadResult) -> str:
    """Name and size in a line."""
    return (
        f"{workload.workload}: {workload.rows:,} rows, {workload.prompt_tokens:,} prompt tokens "
        f"({workload.prompt_tokens / workload.rows:,.0f} a row), {workload.unique_tokens:,} unique"
    )


def _range(value: Range) -> str:
    digits = 2 if value.median >= 1 else 3
    return f"{value.median:.{digits}f} ({value.low:.{digits}f}-{value.high:.{digits}f})"


def quick_table(workload: WorkloadResult) -> TableRows:
    """Header and one row for each method: as much as fits a terminal."""
    rows = [["method", "seconds", "speedup", "rows/s", "kept", "MiB", "flips", "AUC"]]
    for each in workload.methods:
        audit, peak = each.answers.audit, each.peak_bytes
        flips = "" if audit is None or audit.flip_rate is None else f"{audit.flip_rate:.1%}"
        rows.append(
            [
                each.method,
                three_digits(each.seconds.median),
                _speedup(each, workload.rounds),
                three_digits(each.rows_per_second),
                f"{each.kept:.0%}",
                "" if peak is None else mebibytes(peak),
                flips,
                "" if each.answers.auc is None else f"{each.answers.auc:.3f}",
            ]
        )
    return rows


def _speedup(method: MethodResult, rounds: int) -> str:
    if method.method == REFERENCE:
        return "1"
    return three_digits(method.speedup.median) if rounds < 2 else _short(method.speedup)


def _short(value: Range) -> str:
    return f"{three_digits(value.median)} ({three_digits(value.low)}-{three_digits(value.high)})"


def print_workload(workload: WorkloadResult, machine: Mapping[str, str | int], *, whole: bool) -> None:
    """The tables of a workload on stderr; `whole` with predictions and intervals."""
    console = stderr_console(WIDTH)
    console.print(f"\n{workload_headline(workload)}", style="bold")
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()), style="dim")
    console.print()
    tables = [quick_table(workload)]
    if whole:
        answers = [[row[column] for column in (0, 1, 2, 3, 5, 7)] for row in answer_table(workload)]
        tables += [speedup_table(workload), answers]
    for rows in tables:
        print_numbers(console, rows)
    print_explained(console, list(dict.fromkeys(each.method.partition("@")[0] for each in workload.methods)), METHODS)
    console.print(f"  {legend(workload)}", style="dim")
    console.print()
    for text in verdicts(workload):
        console.print(text)
    for text in workload_remarks(workload):
        console.print(f"note: {text}")

"""A run of `prefill score` in the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from prefillcli.report.evaluation_lines import evaluation_lines
from prefillcli.report.exit_lines import exit_lines
from prefillcli.report.numbers import mebibytes
from prefillcli.report.rationale_lines import rationale_lines
from prefillcli.report.run import RunReport
from prefillcli.report.tables import pairs_table, stderr_console
from prefillcli.stats.audit import audit_lines


def print_table(report: RunReport) -> None:
    """The run in a few lines, on stderr."""
    stderr_console().print(pairs_table(run_lines(report)))


def run_lines(report: RunReport) -> Iterator[tuple[str, str]]:
    """The lines of the table: a name and a text each."""
    rows, tokens, seconds = report.rows, report.tokens, report.seconds
    counts = f"{rows.scored:,} scored of {rows.total:,}"
    if rows.errors:
        codes = ", ".join(f"{code} {count:,}" for code, count in sorted(rows.errors_by_code.items()))
        counts += f", {rows.errors:,} errors ({codes})"
    if rows.skipped:
        counts += f", {rows.skipped:,} skipped"
    yield "rows", counts
    if report.since is not None:
        whence = "" if report.since.output is None else f" from {report.since.output}"
        yield "taken over", f"{report.since.rows:,} rows{whence}"
    yield from _judgements(report)
    if report.calibration is not None:
        yield "probability", report.calibration.sentence()
    if tokens.prompt:
        own = tokens.computed - tokens.audit - tokens.follow_up
        yield (
            "tokens",
            f"{tokens.prompt:,} in prompts, {tokens.computed:,} computed "
            f"({tokens.kept / max(own, 1):.2f}x shared), {tokens.unique:,} unique",
        )
    if report.keep is not None and tokens.prompt:
        yield (
            "compression",
            f"{tokens.kept:,} tokens kept ({tokens.kept / tokens.prompt:.1%}, keep rate {report.keep:g}), "
            f"{tokens.draft:,} computed by the draft",
        )
    if report.exits is not None:
        yield from exit_lines(report.exits)
    if report.audit is not None:
        yield from audit_lines(report.audit)
    if report.rationales is not None:
        yield from rationale_lines(report.rationales)
    if report.evaluation is not None:
        yield from evaluation_lines(report.evaluation)
    phases = {k: v for k, v in seconds.model_dump().items() if k != "total" and v >= 0.05}
    detail = ", ".join(f"{name} {value:.1f}" for name, value in phases.items())
    yield "seconds", f"{seconds.total:.1f}" + (f" ({detail})" if detail else "")
    if report.predicted_seconds is not None:
        yield "model", f"{seconds.model:.1f} seconds, {report.predicted_seconds:.1f} predicted by the profile"
    yield "speed", f"{report.rows_per_second:,.1f} rows/s, {report.tokens_per_second:,.0f} prompt tokens/s"
    peak = report.peak_memory_bytes
    yield (
        "peak memory",
        f"{mebibytes(peak.host)} MiB host" + (f", {mebibytes(peak.device)} MiB device" if peak.device else ""),
    )
    if report.weights is not None and report.weights.mode == "stream":
        used = report.weights
        yield (
            "weights",
            f"{mebibytes(used.bytes)} MiB streamed in {mebibytes(used.memory_bytes)} MiB; "
            f"{mebibytes(used.bytes_read)} MiB read, {used.seconds_waited:.1f} seconds waited for them",
        )
    yield "output", report.output or "none"
    yield "report", ", ".join(filter(None, (report.report, report.page))) or "none"


def _judgements(report: RunReport) -> Iterator[tuple[str, str]]:
    """What tells a night from others."""
    if report.mean_score is not None:
        yield "mean score", f"{report.mean_score:.4f}"
    if report.mean_label_mass is not None:
        yield "label mass", f"{report.mean_label_mass:.4f} on average"
    for gate in report.gates:
        yield "gate", f"{'passed' if gate.passed else 'FAILED'}: {gate.text}"

"""The report of a run: `run.json`, its last line on stdout, and its table in the terminal."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field
from rich.console import Console
from rich.table import Table

from prefillcli.data.store import open_store
from prefillcli.report.audit import Audit, audit_lines

SCHEMA_VERSION = 1


class Rows(BaseModel):
    """Rows of the input. `total` = `scored` + `errors` + `skipped`."""

    total: int = 0
    scored: int = 0
    errors: int = 0
    skipped: int = 0  # over-long rows under --on-long skip
    errors_by_code: dict[str, int] = Field(default_factory=dict)


class Tokens(BaseModel):
    """Tokens of this run (a resumed run counts what it did itself)."""

    prompt: int = 0
    shared: int = 0  # prompt tokens that were computed once for several rows
    unique: int = 0  # of the trie of each window's prompts: the least that can be computed
    computed: int = 0
    kept: int = 0
    draft: int = 0  # computed by the draft
    audit: int = 0  # part of `computed`: for compressed rows that were read in full as well


class Seconds(BaseModel):
    """Wall time by phase. Read, render and tokenize run beside the model, ahead of it; `waiting` is what the model
    waited for them."""

    total: float = 0.0
    read: float = 0.0
    render: float = 0.0
    tokenize: float = 0.0
    waiting: float = 0.0
    plan: float = 0.0
    load: float = 0.0
    draft: float = 0.0
    model: float = 0.0
    write: float = 0.0


class PeakMemory(BaseModel):
    """Largest use in bytes."""

    host: int = 0
    device: int = 0


class RunReport(BaseModel):
    """What `run.json` holds."""

    schema_version: int = SCHEMA_VERSION
    status: Literal["complete", "failed", "interrupted"] = "failed"
    exit_code: int = 1
    error: str | None = None
    started: str = ""  # ISO 8601, UTC
    output: str | None = None
    report: str | None = None
    resumed: bool = False
    rows: Rows = Field(default_factory=Rows)
    mean_score: float | None = None
    tokens: Tokens = Field(default_factory=Tokens)
    seconds: Seconds = Field(default_factory=Seconds)
    rows_per_second: float = 0.0
    tokens_per_second: float = 0.0
    peak_memory_bytes: PeakMemory = Field(default_factory=PeakMemory)
    packs: int = 0
    settings: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    fingerprint: dict[str, str] = Field(default_factory=dict)
    keep: float | None = None  # the job's keep rate, chosen or given, where there is a draft
    keep_auto: dict[str, Any] | None = None  # what --keep auto tried
    audit: Audit | None = None

    def summary(self) -> dict[str, Any]:
        """The last line on stdout."""
        line = {
            "status": self.status,
            "exit_code": self.exit_code,
            "rows": self.rows.model_dump(),
            "mean_score": self.mean_score,
            "seconds": round(self.seconds.total, 3),
            "output": self.output,
            "report": self.report,
        }
        return line | ({"error": self.error} if self.error else {})


def print_table(report: RunReport) -> None:
    """The run in a few lines, on stderr."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    rows, tokens, seconds = report.rows, report.tokens, report.seconds
    counts = f"{rows.scored:,} scored of {rows.total:,}"
    if rows.errors:
        codes = ", ".join(f"{code} {count:,}" for code, count in sorted(rows.errors_by_code.items()))
        counts += f", {rows.errors:,} errors ({codes})"
    if rows.skipped:
        counts += f", {rows.skipped:,} skipped"
    table.add_row("rows", counts)
    if report.mean_score is not None:
        table.add_row("mean score", f"{report.mean_score:.4f}")
    if tokens.prompt:
        table.add_row(
            "tokens",
            f"{tokens.prompt:,} in prompts, {tokens.computed:,} computed "
            f"({tokens.kept / max(tokens.computed - tokens.audit, 1):.2f}x shared), {tokens.unique:,} unique",
        )
    if report.keep is not None and tokens.prompt:
        table.add_row(
            "compression",
            f"{tokens.kept:,} tokens kept ({tokens.kept / tokens.prompt:.1%}, keep rate {report.keep:g}), "
            f"{tokens.draft:,} computed by the draft",
        )
    for name, text in audit_lines(report.audit) if report.audit is not None else ():
        table.add_row(name, text)
    phases = {k: v for k, v in seconds.model_dump().items() if k != "total" and v >= 0.05}
    detail = ", ".join(f"{name} {value:.1f}" for name, value in phases.items())
    table.add_row("seconds", f"{seconds.total:.1f}" + (f" ({detail})" if detail else ""))
    table.add_row("speed", f"{report.rows_per_second:,.1f} rows/s, {report.tokens_per_second:,.0f} prompt tokens/s")
    peak = report.peak_memory_bytes
    table.add_row(
        "peak memory",
        f"{peak.host / 2**20:,.0f} MiB host" + (f", {peak.device / 2**20:,.0f} MiB device" if peak.device else ""),
    )
    table.add_row("output", report.output or "none")
    table.add_row("report", report.report or "none")
    Console(stderr=True, highlight=False, soft_wrap=True).print(table)


def versions() -> dict[str, str]:
    """Versions of what a score depends on."""
    import platform
    from importlib.metadata import version

    from prefillcli import __version__

    packages = ("torch", "transformers", "tokenizers", "pyarrow")
    return {
        "prefillcli": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def save_report(report: RunReport, path: str) -> None:
    """Write `run.json`; a reader sees the old one or the whole new one. Raises PrefillError."""
    folder, slash, name = path.rpartition("/")
    open_store(folder or slash or ".").put_bytes(name, (report.model_dump_json(indent=2) + "\n").encode())
